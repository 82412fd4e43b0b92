"""Deadline and budget of a job: checks before anything is bought."""

from __future__ import annotations

from autohet.control.planning.fleet_choice import Offer
from autohet.runtime.job import Job
from autohet.runtime.job.elastic import time_of
from planner.errors import ConfigError
from planner.inputs.cluster import Cluster


def deadline_s(job: Job, now: float, started: float | None = None) -> float | None:
    """Return the seconds from `now` until the job's deadline; None: it has none.

    now, started: seconds since the epoch. started: first start of the run; None: it starts now.

    Raises:
        ConfigError: the deadline has passed before the run has started.
    """
    given = job.elastic.deadline
    if given is None:
        return None
    left_s = time_of(given, now if started is None else started, "elastic.deadline") - now
    if left_s <= 0 and started is None:
        raise ConfigError(
            f"the deadline {given} was {-left_s / 3600:.1f} h ago; give a later time or a duration"
        )
    return left_s


def check_budget(job: Job, cluster: Cluster, cheapest: Offer | None) -> None:
    """Check that the job's budget can pay for all of its steps.

    cheapest: fleet with the lowest price of a step; None: not known.

    Raises:
        ConfigError: a node type has no price, or the budget is too small for any fleet.
    """
    budget = job.elastic.budget_usd
    if budget is None:
        return
    unpriced = [kind.name for kind in cluster.node_types if kind.usd_per_hour is None]
    if unpriced:
        raise ConfigError(
            f"a budget of {budget:.2f} USD cannot be kept, since no price is known of"
            f" {', '.join(unpriced)}; give the label autohet.io/usd-per-hour"
        )
    if cheapest is None or job.training.steps is None:
        return
    least_usd = cheapest.usd_a_step * job.training.steps
    if budget < least_usd:
        nodes = ", ".join(f"{number} {name}" for name, number in sorted(cheapest.counts.items()))
        raise ConfigError(
            f"the budget is {budget:.2f} USD, but {job.training.steps:,} steps cost"
            f" {least_usd:.2f} USD on the cheapest fleet ({nodes}); raise it, or train fewer steps"
        )
