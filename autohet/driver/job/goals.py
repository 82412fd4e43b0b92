"""Deadline and budget of a job: checks before anything is bought, and what a run has spent."""

import time
from collections.abc import Callable

from autohet.control.planning.fleet_choice import Offer
from autohet.control.planning.goal import Goal, GoalTerms
from autohet.driver.checkpoints.durable import Durable
from autohet.driver.checkpoints.spending import EVERY_S, Spending, read_spending, store_spending
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


class GoalKeeper:
    """Deadline and budget of a run on the driver's clocks; its storage knows what was spent."""

    def __init__(self, job: Job, durable: Durable, clock: Callable[[], float]) -> None:
        self._job = job
        self._durable = durable
        self._clock = clock
        self._stored_at = 0.0
        self._started = 0.0

    def begin(self) -> GoalTerms | None:
        """Return what the run has to keep; None: nothing.

        Raises:
            StorageError: the storage does not answer.
        """
        if not self._job.elastic.has_goal:
            return None
        now = time.time()
        before = read_spending(self._durable.storage) or Spending(now, now)
        self._started = before.started
        left_s = deadline_s(self._job, now, before.started)
        deadline_at = None if left_s is None else self._clock() + left_s
        return GoalTerms(deadline_at, self._job.elastic.budget_usd, before.usd_until(now))

    def store(self, goal: Goal | None) -> None:
        """Store what is spent, once a minute."""
        if goal is None or self._clock() - self._stored_at < EVERY_S:
            return
        self._stored_at = self._clock()
        spent = Spending(self._started, time.time(), goal.spent_usd, goal.usd_per_hour)
        durable = self._durable
        durable.work_pool.submit(store_spending, durable.storage, spent, durable.epoch)
