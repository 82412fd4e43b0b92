"""Who holds the newest step, as far as the driver knows."""

from collections.abc import Collection
from dataclasses import replace

from autohet.control.job_state import Training
from autohet.control.values.observation import Observation
from recovery.state.holdings import restorable_step
from recovery.state.layout import ShardId
from tests.harness.struck_run import StruckRun


def others_hold_newest(run: StruckRun, seen: Observation, victims: Collection[str]) -> bool:
    """Return whether living workers other than `victims` hold every shard of the newest step.

    In training all members have the newest step, whatever their last report says: one worker's
    step is not committed before all can apply it.
    """
    controller = run.controller
    if not controller.memory.ledger.orders:
        return False
    layout = next(iter(controller.memory.ledger.orders.values())).layout
    reports = {
        worker: report
        for worker, report in seen.reports.items()
        if worker not in victims and worker not in seen.losses
    }
    if isinstance(controller.state, Training):
        held: set[ShardId] = set()
        for worker in controller.memory.members:
            report = reports.get(worker)
            if report is not None and report.live_generation == controller.memory.generation:
                held |= layout.shards_by_worker[worker]
        return held >= layout.shards
    holdings = run.orders.live_holdings(replace(seen, reports=reports), list(reports))
    step = restorable_step(layout.shards, holdings)
    return step is not None and step >= controller.memory.ledger.committed_steps
