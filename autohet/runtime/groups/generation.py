"""Process groups of one worker in one generation.

The groups are standalone, never WORLD. Every wait has a deadline, and another thread can end it.

If operations run in the order of a stream, a worker has at most eight groups: of all participants,
one or two for each direction between stages, of its stage, and two or four for gradient sums. One
group for both kinds of borders would let a stage send only after it had received what may come
later: four stages would wait for each other. Further sets of holders share the groups of supersets
(`planner.plans.communicators`).
"""

import hashlib
import logging
import os
import signal
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from autohet.runtime.groups.abort_guard import AbortGuard
from autohet.runtime.groups.errors import Interrupted, PeerLost
from autohet.runtime.groups.gloo import GlooGroup
from autohet.runtime.groups.group import Group
from autohet.runtime.groups.nccl import NcclGroup

STORE_POLL_S = 0.001
POLL_GROWTH = 1.5
LONGEST_STORE_POLL_S = 0.05
"""Seconds between the first two polls of the store, their growth, and the limit as they grow.

Members that have just met for another group arrive within milliseconds of each other.
"""
MOST_NAMED = 8
BUILD_POLL_S = 0.02
INTERRUPT_S = 1.0
ABORT_LIMIT_S = 20.0
"""Seconds after which a guard kills the process because an abort hangs.

An abort takes half a second, and 10 ms for each pending kernel (NVIDIA's NVRx).
"""
HEALTH_LIMIT_S = 10.0
logger = logging.getLogger("autohet.groups")
BACK_ENDS: dict[str, type[Group]] = {"cpu": GlooGroup, "cuda": NcclGroup}
"""Group classes by the type of the tensors' device."""


@dataclass(frozen=True)
class GroupTimeouts:
    """Deadlines of a generation's groups: of one operation, and of the members' meeting."""

    operation_s: float
    rendezvous_s: float


class GenerationGroups:
    """Process groups of one worker in one generation.

    `world` has every participant. Messages of activations and of gradients use `forward` and
    `backward`, alternating over a pipeline's borders (they are the same group if messages have
    tags). The vote uses `backward` after all these messages have ended.

    back_end: class of the groups; by default that of the device.
    """

    def __init__(
        self,
        store: Store,
        generation: int,
        me: str,
        device: torch.device,
        timeouts: GroupTimeouts,
        back_end: type[Group] | None = None,
    ) -> None:
        self.me = me
        self.generation = generation
        self.device = device
        self.timeout_s = timeouts.operation_s
        self.back_end = back_end or BACK_ENDS[device.type]
        self.wants_gate = False
        """Wish for `gated`."""
        self._store = PrefixStore(f"generation-{generation}", store)
        self._rendezvous_s = timeouts.rendezvous_s
        self.built: dict[tuple[str, tuple[str, ...]], Group] = {}
        """Groups built so far, by purpose and members."""
        self._met: set[str] = set()
        """Names of the meetings at which all members have arrived."""
        self.over = threading.Event()
        """Set by `interrupt`; other waits on behalf of this generation then give up."""
        self.aborted = threading.Event()
        """Set when every group is aborted."""
        self.alive = torch.ones(1, dtype=torch.float64, pin_memory=device.type == "cuda")
        """Flag for the vote: 1 until `interrupt`, which zeroes it before it aborts any group.

        The device copies the flag into its vote in stream order. Operations that an abort releases
        can therefore cast no vote.
        """
        self._lock = threading.Lock()

    @property
    def gated(self) -> bool:
        """True if gradient sums of a step start once all workers have announced that they may.

        The vote and these sums then share no group with a pipeline's own messages. Groups that run
        in the order of a stream are never gated.
        """
        return self.wants_gate and not self.back_end.in_stream_order

    def meet(
        self, members: Sequence[str], where: str = "rendezvous", limit_s: float | None = None
    ) -> None:
        """Wait until every member has arrived; all give the same members in the same order.

        No group's constructor then waits for a dead member. Polls the store; an interrupt ends the
        wait. No-op if all have met there before.

        limit_s: limit on the wait; None: that of the rendezvous.
        """
        name = _name_of(where, members)
        if name in self._met:
            return
        if limit_s is None:
            limit_s = self._rendezvous_s
        complete = f"complete/{name}"
        # One counter, since a key of each member would cost the store the square of their number.
        if self._store.add(f"arrived/{name}", 1) == len(members):
            self._store.set(complete, "1")
        deadline = time.monotonic() + limit_s
        pause_s = STORE_POLL_S
        while not self._store.check([complete]):
            if self.over.is_set():
                raise Interrupted(where)
            if time.monotonic() > deadline:
                raise PeerLost(f"not everyone came to {name} within {limit_s:.0f} s")
            time.sleep(pause_s)
            pause_s = min(POLL_GROWTH * pause_s, LONGEST_STORE_POLL_S)
        self._met.add(name)

    def group(self, members: Iterable[str], purpose: str = "sync") -> Group:
        """Return the group of these members; build it on first use.

        All members call this in the same order of groups.
        """
        key = (purpose if self.back_end.in_stream_order else "any", tuple(members))
        with self._lock:
            found = self.built.get(key)
        if found is not None:
            return found
        self.check()
        name = _name_of(*key)
        if len(key[1]) > 1:
            # A member is then seldom left waiting in a constructor (see `_build`).
            self.meet(key[1], f"building {key[0]}", self.timeout_s)
        try:
            made = self._build(name, key[1])
        except RuntimeError as error:
            self.check()
            raise PeerLost(f"building {name}: {error}") from None
        with self._lock:
            self.built[key] = made
        if self.over.is_set():
            made.interrupt()
        return made

    def _build(self, name: str, members: tuple[str, ...]) -> Group:
        """Build a group in a thread.

        If a member is lost after the gathering, the other members block in the constructor, and
        nothing can wake them. An interrupt abandons that thread: it ends at the constructor's own
        deadline, and its group is dropped.
        """
        made: Future[Group] = Future()

        def run() -> None:
            try:
                group = self.back_end(
                    name, members, self.me, self._store, self.device, self.timeout_s
                )
                group.check_generation = self.check
                group.connect()
                made.set_result(group)
            except Exception as error:  # noqa: BLE001
                made.set_exception(error)

        threading.Thread(target=run, name=f"building {name}", daemon=True).start()
        while not wait([made], BUILD_POLL_S).done:
            self.check()
        return made.result()

    def interrupt(self) -> None:
        """End the generation for this worker and wake it from every group.

        Any thread may call this. Returns when all groups are aborted, or after INTERRUPT_S. In the
        latter case a guard process ensures that they are aborted later, or that this process ends.

        Records the end of the generation first, here and for the device: an abort releases
        operations that wait for one another, with arbitrary contents in their tensors. Never
        destroys groups, since that would wait for members.
        """
        with self._lock:
            is_first = not self.over.is_set()
            groups = list(self.built.values())
            self.over.set()
        if is_first:
            self.alive.zero_()
            threading.Thread(
                target=self._abort_all, args=(groups,), name="aborting groups", daemon=True
            ).start()
        self.aborted.wait(INTERRUPT_S)

    def interrupt_beyond(self, members: Collection[str]) -> None:
        """Wake this worker from the groups that have others than these members.

        Groups within `members` go on.
        """
        with self._lock:
            groups = list(self.built.values())
        for group in groups:
            if not set(group.members) <= set(members):
                group.interrupt()

    def _abort_all(self, groups: list[Group]) -> None:
        """Abort groups in parallel, since an abort may wait for a kernel of another group."""
        guard = AbortGuard(ABORT_LIMIT_S) if self.back_end.abort_may_hang and groups else None
        threads = [
            threading.Thread(target=_abort, args=(each,), name=f"abort {each.name}", daemon=True)
            for each in groups
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if guard is not None:
            guard.disarm()
        self.aborted.set()

    def check(self) -> None:
        """Raise if the generation cannot continue.

        Raises:
            Interrupted: `interrupt` was called.
            PeerLost: a group knows that an operation has failed.
        """
        if self.over.is_set():
            raise Interrupted("the generation is over")
        with self._lock:
            groups = list(self.built.values())
        for group in groups:
            failure = group.error()
            if failure is not None:
                raise PeerLost(f"{group.name}: {failure}")

    @property
    def interrupted(self) -> bool:
        return self.over.is_set()

    def close(self) -> None:
        """Drop every group.

        gloo's threads end once no caller holds works of these groups any more.
        """
        with self._lock:
            self.built.clear()


def _name_of(purpose: str, members: Sequence[str]) -> str:
    """Return a name of these members, which is short for a thousand of them as well."""
    names = "+".join(members)
    if len(members) > MOST_NAMED:
        names = hashlib.blake2s(names.encode(), digest_size=16).hexdigest()
    return f"{purpose}/{len(members)}/{names}"


def _abort(group: Group) -> None:
    try:
        group.interrupt()
    except RuntimeError as error:
        logger.warning("aborting %s: %s", group.name, error)


def reconfigure(
    previous: GenerationGroups | None,
    uuid: int,
    handles: Store | GenerationGroups,
    me: str,
    device: torch.device,
    timeouts: GroupTimeouts,
) -> GenerationGroups:
    """End one generation of groups and begin the next; block until the old groups are aborted.

    uuid: number of the new generation, never used before; handles: store over which its members
    meet, or the groups of the next generation if they were built ahead.
    """
    if previous is not None:
        end_generation(previous)
    if isinstance(handles, GenerationGroups):
        return handles
    return GenerationGroups(handles, uuid, me, device, timeouts)


def end_generation(groups: GenerationGroups) -> None:
    """Abort a generation's groups and drop them; block until that is done.

    If the device does not compute any more, kill this process; a new one takes its place.
    """
    groups.interrupt()
    groups.aborted.wait(ABORT_LIMIT_S)
    groups.close()
    if not groups.back_end.is_healthy(groups.device, HEALTH_LIMIT_S):
        logger.error(
            "%s does not compute after an abort: this process ends, and a new one will take its"
            " place",
            groups.device,
        )
        os.kill(os.getpid(), signal.SIGKILL)
