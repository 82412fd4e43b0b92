"""All process groups of one worker in one generation: standalone, never WORLD, every wait bounded
and wakeable from another thread.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, wait

import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from autohet.runtime.groups.abort_guard import AbortGuard
from autohet.runtime.groups.errors import Interrupted, PeerLost
from autohet.runtime.groups.gloo import GlooGroup
from autohet.runtime.groups.group import Group
from autohet.runtime.groups.nccl import NcclGroup

STORE_POLL_S = 0.01
BUILD_POLL_S = 0.02
INTERRUPT_S = 1.0
ABORT_LIMIT_S = 20.0
"""After which a guard ends the process: aborts take half a second, and 10 ms for each pending
kernel (NVIDIA's NVRx).
"""
HEALTH_LIMIT_S = 10.0
logger = logging.getLogger("autohet.groups")
BACK_ENDS: dict[str, type[Group]] = {"cpu": GlooGroup, "cuda": NcclGroup}
"""By the type of the device that the tensors are on."""


class GenerationGroups:
    """All groups of one worker in one generation. `world` has every participant; messages of
    activations and of gradients go over `forward` and `backward`, in turns over a pipeline's
    borders (one and the same group where messages have tags), and the vote, when all of these have
    ended, over `backward`.

    back_end: what makes the groups; by default the device's.
    """

    def __init__(
        self,
        store: Store,
        generation: int,
        me: str,
        device: torch.device,
        timeout_s: float,
        rendezvous_s: float,
        back_end: type[Group] | None = None,
    ) -> None:
        self.me, self.device, self.timeout_s = me, device, timeout_s
        self.back_end = back_end or BACK_ENDS[device.type]
        self._store = PrefixStore(f"generation-{generation}", store)
        self._rendezvous_s = rendezvous_s
        self._groups: dict[tuple[str, tuple[str, ...]], Group] = {}
        self.over = threading.Event()
        """Set by `interrupt`: what else waits on behalf of this generation gives up then."""
        self.aborted = threading.Event()
        """Set when every group is aborted."""
        self.alive = torch.ones(1, dtype=torch.float64, pin_memory=device.type == "cuda")
        """1 until `interrupt`, which zeroes it before it aborts anything. The device copies it into
        its vote in the order of its stream: what an abort has let through is then no vote.
        """
        self._lock = threading.Lock()

    def meet(self, members: Collection[str]) -> None:
        """Wait until every member is here: a store poll that an interrupt ends, so that no group's
        constructor waits for the dead.
        """
        self._store.set(f"here/{self.me}", "1")
        keys = [f"here/{member}" for member in members]
        self._poll(lambda: self._store.check(keys), "the rendezvous", self._rendezvous_s)

    def _poll(self, everyone_came: Callable[[], bool], where: str, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        while not everyone_came():
            if self.over.is_set():
                raise Interrupted(where)
            if time.monotonic() > deadline:
                raise PeerLost(f"not everyone came to {where} within {limit_s:.0f} s")
            time.sleep(STORE_POLL_S)

    def _gather(self, name: str, size: int) -> None:
        """Wait until all members are about to build a group, so that hardly ever somebody is left
        in a constructor (see `_build`).
        """
        complete = f"complete/{name}"
        if self._store.add(f"arrived/{name}", 1) == size:
            self._store.set(complete, "1")
        self._poll(lambda: self._store.check([complete]), f"building {name}", self.timeout_s)

    def group(self, members: Iterable[str], purpose: str = "sync") -> Group:
        """The group of these members, made on first use: all of them call in the same order of
        groups.
        """
        key = (purpose if self.back_end.in_stream_order else "any", tuple(members))
        with self._lock:
            found = self._groups.get(key)
        if found is not None:
            return found
        self.check()
        name = f"{key[0]}/{len(key[1])}/{'+'.join(key[1])}"
        if len(key[1]) > 1:
            self._gather(name, len(key[1]))
        try:
            made = self._build(name, key[1])
        except RuntimeError as error:
            self.check()
            raise PeerLost(f"building {name}: {error}") from None
        with self._lock:
            self._groups[key] = made
        if self.over.is_set():
            made.interrupt()
        return made

    def _build(self, name: str, members: tuple[str, ...]) -> Group:
        """Make a group, in a thread: a member that is lost after the gathering leaves the others in
        the constructor, which nothing wakes. After an interrupt that thread is left to end at the
        constructor's own deadline, and what it makes is dropped.
        """
        made: Future[Group] = Future()

        def run() -> None:
            try:
                group = self.back_end(
                    name, members, self.me, self._store, self.device, self.timeout_s, self.check
                )
                group.connect()
                made.set_result(group)
            except Exception as error:  # noqa: BLE001
                made.set_exception(error)

        threading.Thread(target=run, name=f"building {name}", daemon=True).start()
        while not wait([made], BUILD_POLL_S).done:
            self.check()
        return made.result()

    def interrupt(self) -> None:
        """End the generation for this worker, and wake it out of every group; any thread. Returns
        when all groups are aborted, or after INTERRUPT_S while a guard outside the process sees to
        it that they are, or that the process ends.

        First of all it is written down, here and for the device, that the generation is over: an
        abort lets operations that wait for one another go on, each with whatever is in its tensors.
        Groups are never destroyed: that would wait for members.
        """
        with self._lock:
            is_first, groups = not self.over.is_set(), list(self._groups.values())
            self.over.set()
        if is_first:
            self.alive.zero_()
            threading.Thread(
                target=self._abort_all, args=(groups,), name="aborting groups", daemon=True
            ).start()
        self.aborted.wait(INTERRUPT_S)

    def _abort_all(self, groups: list[Group]) -> None:
        """In parallel: one abort may wait for what another group's kernel holds up."""
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
        """Raises Interrupted once `interrupt` was called, and PeerLost where a group knows that an
        operation has failed.
        """
        if self.over.is_set():
            raise Interrupted("the generation is over")
        with self._lock:
            groups = list(self._groups.values())
        for group in groups:
            if (failure := group.error()) is not None:
                raise PeerLost(f"{group.name}: {failure}")

    @property
    def interrupted(self) -> bool:
        return self.over.is_set()

    def close(self) -> None:
        """Drop every group; whoever holds none of their works lets gloo's threads end."""
        with self._lock:
            self._groups.clear()


def _abort(group: Group) -> None:
    try:
        group.interrupt()
    except RuntimeError as error:
        logger.warning("aborting %s: %s", group.name, error)


def reconfigure(
    previous: GenerationGroups | None,
    uuid: int,
    handles: Store,
    me: str,
    device: torch.device,
    timeout_s: float,
    rendezvous_s: float,
) -> GenerationGroups:
    """End one generation of groups and begin the next; blocks until the old groups are aborted.
    Where the device does not compute any more the process ends: a new one takes its place.

    uuid: of the new generation, never used before; handles: the store over which its members meet.
    """
    if previous is not None:
        previous.interrupt()
        previous.aborted.wait(ABORT_LIMIT_S)
        previous.close()
        if not previous.back_end.is_healthy(device, HEALTH_LIMIT_S):
            logger.error(
                "%s does not compute after an abort: this process ends, and a new one will take its"
                " place",
                device,
            )
            os.kill(os.getpid(), signal.SIGKILL)
    return GenerationGroups(handles, uuid, me, device, timeout_s, rendezvous_s)
