"""Model specs for the planner, read from the library's modules."""
