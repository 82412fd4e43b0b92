"""The next generation of one worker, built while the present one trains.

What needs no training state is built: the connection to the store, the process groups and the
trainer's parts. Nothing of it touches the generation that trains.
"""

from __future__ import annotations

import logging
import threading
import traceback
from dataclasses import dataclass

from torch.distributed import Store

from autohet.runtime.groups import GenerationGroups, GroupTimeouts
from autohet.runtime.messages import PreparationOrder, Prepared
from autohet.runtime.parallel.place import place_of
from autohet.runtime.process.store_connector import StoreConnector
from autohet.runtime.step.generation import TrainingSetup
from autohet.runtime.step.stage_parts import StageParts

logger = logging.getLogger("autohet.worker")


@dataclass
class _Building:
    """A preparation that is under way or done."""

    order: PreparationOrder
    connector: StoreConnector
    is_dropped: bool = False
    groups: GenerationGroups | None = None
    parts: StageParts | None = None
    outcome: Prepared | None = None

    def drop(self) -> None:
        self.is_dropped = True
        if self.groups is not None:
            self.groups.interrupt()
        self.connector.close()


@dataclass(frozen=True)
class Ready:
    """Groups and parts of a prepared generation, with the connection that the groups use."""

    groups: GenerationGroups
    parts: StageParts | None
    connector: StoreConnector


class NextGeneration:
    """Owner of at most one prepared generation; any thread may call it.

    timeouts: deadline of the members' meeting, and of an operation where the order names none.
    """

    def __init__(self, me: str, setup: TrainingSetup, timeouts: GroupTimeouts) -> None:
        self._me = me
        self._setup = setup
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._newest: _Building | None = None

    @property
    def outcome(self) -> Prepared | None:
        """Outcome of the newest preparation; None while it is under way."""
        newest = self._newest
        return None if newest is None else newest.outcome

    def begin(self, order: PreparationOrder) -> None:
        """Begin to prepare a generation, in a thread; what was prepared before is dropped."""
        new = _Building(order, StoreConnector(self._timeouts.rendezvous_s))
        with self._lock:
            newest = self._newest
            if newest is not None and newest.order.generation >= order.generation:
                return
            self._newest = new
        if newest is not None:
            newest.drop()
        threading.Thread(target=self._run, args=(new,), name="preparation", daemon=True).start()

    def take(self, generation: int) -> Ready | None:
        """Return what is ready for this generation, if anything is, and drop all else."""
        with self._lock:
            newest = self._newest
            self._newest = None
        if newest is None:
            return None
        is_ready = newest.outcome == Prepared(newest.order.generation)
        if newest.order.generation != generation or not is_ready:
            newest.drop()
            return None
        if newest.groups is None:
            return None
        return Ready(newest.groups, newest.parts, newest.connector)

    def drop(self) -> None:
        """Drop what is prepared."""
        self.take(0)

    def _run(self, building: _Building) -> None:
        order = building.order
        error = None
        try:
            if order.plan.spmd is None:
                self._build(building, building.connector.connect(order))
        except Exception as failure:  # noqa: BLE001 (whatever it is, the generation trains on)
            error = f"{type(failure).__name__}: {failure}"
            if not building.is_dropped:
                logger.info("generation %d: %s", order.generation, traceback.format_exc())
        building.outcome = Prepared(order.generation, error)

    def _build(self, building: _Building, store: Store) -> None:
        """Meet the other workers and build what can be built ahead.

        NCCL's communicators take device memory, and making them beside running kernels was not
        tried on several cards: on a GPU only a stage that needs none is built.
        """
        order = building.order
        limits = GroupTimeouts(
            order.step_timeout_s or self._timeouts.operation_s, self._timeouts.rendezvous_s
        )
        groups = GenerationGroups(store, order.generation, self._me, self._setup.device, limits)
        building.groups = groups
        groups.wants_gate = order.gated
        if building.is_dropped:
            groups.interrupt()
        groups.meet(order.plan.workers)
        if not groups.back_end.in_stream_order:
            building.parts = StageParts.build(self._setup, order.plan, groups)
            building.parts.build_sync_groups(groups)
            return
        place = place_of(order.plan, self._me)
        if place is not None and place.tp_degree == 1:
            building.parts = StageParts.build(self._setup, order.plan, groups, with_groups=False)
