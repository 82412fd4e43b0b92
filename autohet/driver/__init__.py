"""Driver of a job on Ray: the fleet, the controller that ticks, the worker and agent actors.

The only package that imports `ray`.
"""
