"""Planner: from a fleet, a model and measured layer times to the plan with the best predicted step.

See README.md.
"""
