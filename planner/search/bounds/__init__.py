"""Lower bounds of the step time over all pipelines."""
