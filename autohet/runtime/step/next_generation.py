"""The next generation of one worker, built while the present one trains.

What needs no training state is built: the connection to the store, the process groups and the
trainer's parts. Nothing of it touches the generation that trains.

A prepared generation that `follows` the present one begins without a stop. Its orders name the
step, two or more ahead. Once all participants have their orders, each worker of the present
generation says so in the vote of the step before. If all of them do, all begin after that vote;
else nobody does.
"""

import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch.distributed import Store

from autohet.runtime.groups import (
    GenerationGroups,
    Group,
    GroupTimeouts,
    Interrupted,
    PeerLost,
    end_generation,
)
from autohet.runtime.messages import WITHDRAWN, GenerationOrder, PreparationOrder, Prepared
from autohet.runtime.parallel.place import place_of
from autohet.runtime.process.store_connector import StoreConnector
from autohet.runtime.step.generation import TrainingSetup
from autohet.runtime.step.stage_parts import StageParts
from autohet.runtime.step.votes import Voter

logger = logging.getLogger("autohet.worker")
POLL_S = 0.02
READY = "ready for the cut-over"
"""Meeting of all participants of a generation that begins without a stop, once they have orders."""


@dataclass
class _Building:
    """A preparation that is under way or done."""

    order: PreparationOrder
    connector: StoreConnector
    present: StageParts | None
    warms_up: bool
    is_dropped: bool = False
    groups: GenerationGroups | None = None
    parts: StageParts | None = None
    outcome: Prepared | None = None
    is_done: threading.Event = field(default_factory=threading.Event)
    """Set once `outcome` is."""
    is_warm: threading.Event = field(default_factory=threading.Event)
    """Set once nothing uses the parts any more."""
    ballot: tuple[Voter, int] | None = None
    """Voter of the generation that trains, and the step of the cut-over, once there are orders."""

    def is_ready(self, generation: int) -> bool:
        """Return True if it is this generation, and all of it is ready."""
        return self.order.generation == generation and self.outcome == Prepared(generation)

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
    plan_ahead: computes what depends on an order alone, before its generation begins.
    """

    def __init__(
        self,
        me: str,
        setup: TrainingSetup,
        timeouts: GroupTimeouts,
        plan_ahead: Callable[[GenerationOrder], None] = lambda order: None,
    ) -> None:
        self._me = me
        self._plan_ahead = plan_ahead
        self._setup = setup
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._newest: _Building | None = None
        self.following: GenerationOrder | None = None
        """Order of the generation that begins after a vote, if that says so."""

    @property
    def outcome(self) -> Prepared | None:
        """Outcome of the newest preparation; None while it is under way."""
        newest = self._newest
        return None if newest is None else newest.outcome

    def begin(
        self,
        order: PreparationOrder,
        present: StageParts | None = None,
        *,
        warms_up: bool = False,
    ) -> None:
        """Begin to prepare a generation, in a thread; what was prepared before is dropped.

        present: parts of the generation that trains, as in `StageParts.build`. warms_up: this
        worker has not trained yet, so that its first pass would be slow.
        """
        connector = StoreConnector(self._timeouts.rendezvous_s)
        new = _Building(order, connector, present, warms_up)
        with self._lock:
            newest = self._newest
            if newest is not None and newest.order.generation >= order.generation:
                return
            self._newest = new
        if newest is not None:
            newest.drop()
        threading.Thread(target=self._run, args=(new,), name="preparation", daemon=True).start()

    def withdraw(self, generation: int) -> None:
        """Do not begin this generation without a stop, unless this worker has voted for it.

        If it has not, nobody begins it, and `outcome` says so.
        """
        with self._lock:
            newest = self._newest
            if newest is None or not newest.is_ready(generation):
                return
            if newest.ballot is not None:
                voter, start_step = newest.ballot
                if not voter.withdraw(start_step):
                    return
            newest.outcome = Prepared(generation, WITHDRAWN)

    def await_outcome(self, generation: int, is_over: Callable[[], bool]) -> None:
        """Wait until this generation is prepared, or is not to begin.

        Its orders may come while it is prepared, since at a death nobody trains meanwhile, and
        before the order to prepare it, since an actor's threads take its calls in any order.
        """
        deadline = time.monotonic() + self._timeouts.rendezvous_s
        while not is_over() and time.monotonic() < deadline:
            newest = self._newest
            if newest is None or newest.order.generation < generation:
                time.sleep(POLL_S)
            elif newest.order.generation > generation or newest.outcome is not None:
                return
            else:
                newest.is_done.wait(POLL_S)

    def take(self, generation: int) -> Ready | None:
        """Return what is ready for this generation, if anything is, and drop all else.

        Raises:
            RuntimeError: its preparation has failed; the others may wait in its groups.
        """
        with self._lock:
            newest = self._newest
            self._newest = None
        if newest is None:
            return None
        if not newest.is_ready(generation):
            newest.drop()
            if newest.order.generation == generation:
                raise RuntimeError(f"it is not prepared: {newest.outcome}")
            return None
        if newest.groups is None:
            return None
        newest.is_warm.wait(self._timeouts.rendezvous_s)
        return Ready(newest.groups, newest.parts, newest.connector)

    def follow(self, order: GenerationOrder, voter: Voter) -> None:
        """Be ready for the cut-over once all participants have their orders; wait in a thread.

        No-op if nothing is prepared for this order.

        voter: that of the generation that trains; its vote says whether this worker is ready.
        """
        with self._lock:
            newest = self._newest
            if newest is None or newest.groups is None or not newest.is_ready(order.generation):
                return
            newest.ballot = voter, order.start_step
        threading.Thread(
            target=self._await_others, args=(order, newest), name="cut-over", daemon=True
        ).start()

    def _await_others(self, order: GenerationOrder, building: _Building) -> None:
        assert building.groups is not None
        assert building.ballot is not None
        try:
            self._plan_ahead(order)
            building.groups.meet(order.participants, READY)
        except (Interrupted, PeerLost, RuntimeError) as error:
            logger.info("generation %d does not begin: %s", order.generation, error)
            return
        voter, start_step = building.ballot
        with self._lock:
            # It may have been withdrawn or replaced meanwhile.
            if self._newest is building and building.is_ready(order.generation):
                self.following = order
                voter.next_begins_at = start_step

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
        building.is_done.set()
        # Only now: the others need not wait for it, and the orders take two steps more.
        try:
            if building.parts is not None and not building.is_dropped:
                if building.warms_up:
                    building.parts.warm_up(self._setup)
                if self._setup.training.replica_check_steps:
                    building.parts.compare()
        except Exception:  # noqa: BLE001 (the first pass is slow then)
            logger.info("generation %d: %s", order.generation, traceback.format_exc())
        finally:
            building.is_warm.set()

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
        groups.meet(order.participants)
        place = place_of(order.plan, self._me)
        build = partial(StageParts.build, self._setup, order.plan, groups, present=building.present)
        if not groups.back_end.in_stream_order:
            # A first message shows that the connections work.
            groups.group(order.participants, "world").barrier_on_host()
            if place is not None:
                building.parts = build()
                building.parts.build_sync_groups(groups)
        elif place is not None and place.tp_degree == 1:
            building.parts = build(with_groups=False)


def meet_participants(
    order: GenerationOrder, groups: GenerationGroups, left: GenerationGroups | None
) -> Group:
    """Meet the other participants of a generation; return the group of all.

    left: groups of the generation before a cut-over; they end once all have left them.

    Raises:
        PeerLost, Interrupted: somebody does not come, or the generation is over.
    """
    participants = order.participants
    try:
        groups.meet(participants)
        if order.follows is None:
            return groups.group(participants, "world")
        groups.meet(participants, READY)
        if groups.back_end.in_stream_order:
            groups.meet(participants, "leaving", groups.timeout_s)
        else:
            groups.group(participants, "world").barrier_on_host()
    finally:
        if left is not None:
            ending = threading.Thread(
                target=end_generation, args=(left,), name="ending groups", daemon=True
            )
            ending.start()
            if left.back_end.in_stream_order:
                # New communicators are made once the old ones are gone.
                ending.join()
    return groups.group(participants, "world")
