"""Who holds what of a run's newest step, as its driver knows it."""

from __future__ import annotations

from collections.abc import Collection

from autohet.driver.control.observation import Observation
from recovery.state.holdings import restorable_step
from tests.harness.struck_run import StruckRun


def others_hold_all(run: StruckRun, seen: Observation, victims: Collection[str]) -> bool:
    """Whether live memory holds the newest step whole without that of these workers."""
    held = run.orders.live_holdings(seen, run.controller.members)
    newest = max((holding.step for holding in held), default=None)
    orders = run.controller.ledger.orders
    if newest is None or not orders:
        return False
    shards = next(iter(orders.values())).layout.shards
    left = [holding for holding in held if holding.source.name not in victims]
    return restorable_step(shards, left) == newest
