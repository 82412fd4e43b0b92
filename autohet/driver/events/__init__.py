"""Events of a run: the log that the driver writes, and facts that follow from its lines."""
