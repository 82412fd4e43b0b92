"""Planner: from a fleet, a model and measured layer times to the plan with the best predicted step.

`README.md` has a map of it.
"""

DISTRIBUTION = "autohet"
"""Owner of this package, which `autohet` checks at a start."""
