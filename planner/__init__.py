"""Planner: from a fleet, a model and measured layer times to the plan with the best predicted step.

`README.md` has a map of it.
"""
