"""Process groups that a generation owns: standalone, never WORLD, every wait bounded, and wakeable from another thread.

gloo has no abort. What wakes its waiters (measured, torch 2.13: 15 ms) is a receive that times out on the same context: gloo then fails
every pending operation of that context ("Application timeout caused pair closure"). The group is dropped afterwards; new ones work.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroupGloo, ReduceOp, Work
from torch.distributed.distributed_c10d import AllgatherOptions, PrefixStore, Store

from autohet.runtime.groups.errors import Interrupted, PeerLost

POISON_TAG = 1 << 30
STORE_POLL_S = 0.01
BUILD_POLL_S = 0.02
INTERRUPT_S = 1.0


class Group:
    """Workers that communicate with each other, in one generation. One thread uses it; any thread may `interrupt` it.

    Collectives are called by every member in the same order and block until done; `send` and `recv` start an operation that `wait` ends.
    A failure raises PeerLost, or Interrupted after `interrupt`.
    """

    def __init__(
        self, name: str, members: Sequence[str], me: str, store: Store, device: torch.device, timeout_s: float
    ) -> None:
        self.name, self.members, self.me = name, tuple(members), me
        self.rank, self.size = self.members.index(me), len(members)
        self.timeout_s = timeout_s
        self.device = device
        self._interrupted = threading.Event()
        self._group: Any = self._create(PrefixStore(name, store)) if self.size > 1 else None

    def _create(self, store: Store) -> Any:
        timeout = timedelta(seconds=self.timeout_s)
        if self.device.type == "cuda":
            from torch.distributed import ProcessGroupNCCL

            # Its watchdog would end the process when a peer is lost; this process goes on with the next generation.
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
            os.environ["TORCH_NCCL_ENABLE_MONITORING"] = "0"

            options = ProcessGroupNCCL.Options()
            options._timeout = timeout
            return ProcessGroupNCCL(store, self.rank, self.size, options)
        return ProcessGroupGloo(store, self.rank, self.size, timeout)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over the group, in place; the same bits on every member."""
        self.wait(self.start_all_reduce(tensor))

    def all_reduce_max(self, tensor: Tensor) -> None:
        """Elementwise maximum over the group, in place."""
        self.wait(self.start_all_reduce(tensor, ReduceOp.MAX))

    def start_all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> Work | None:
        """As `all_reduce`, ended by `wait`."""
        if self._group is None:
            return None
        options = dist.AllreduceOptions()
        options.reduceOp = op
        work: Work | None = self._call(lambda: self._group.allreduce([tensor], options))
        return work

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        """Every member's `part`, one after the other in order of ranks, into `out`: as large as all parts together; both contiguous."""
        assert out.numel() == self.size * part.numel(), f"{self.size} parts of {part.numel()} into {out.numel()}"
        if self._group is None:
            out.view(-1).copy_(part.view(-1))
            return
        self.wait(self._call(lambda: self._group._allgather_base(out.view(-1), part.view(-1), AllgatherOptions())))

    def send(self, tensor: Tensor, to: str, tag: int) -> Work | None:
        """Start sending a contiguous tensor; it must not change before `wait`."""
        work: Work | None = self._call(lambda: self._group.send([tensor], self.members.index(to), tag))
        return work

    def recv(self, tensor: Tensor, source: str, tag: int) -> Work | None:
        """Start receiving into a contiguous tensor."""
        work: Work | None = self._call(lambda: self._group.recv([tensor], self.members.index(source), tag))
        return work

    def wait(self, work: Work | None) -> None:
        """End an operation: the tensor may be used (on CUDA: by the current stream)."""
        if work is not None:
            self._call(
                lambda: work.wait(timedelta(seconds=self.timeout_s)) if self.device.type == "cpu" else work.wait()
            )

    def wait_on_host(self, work: Work | None) -> None:
        """As `wait`, and on CUDA the host waits too, within the deadline: where a step's outcome is decided."""
        if work is None or self.device.type == "cpu":
            return self.wait(work)
        deadline = time.monotonic() + self.timeout_s
        while not work.is_completed():
            if self._interrupted.is_set():
                raise Interrupted(self.name)
            if time.monotonic() > deadline:
                raise PeerLost(f"{self.name}: no answer within {self.timeout_s:.0f} s")
            time.sleep(2e-4)
        return self.wait(work)

    def _call(self, operation: Callable[[], Any]) -> Any:
        if self._interrupted.is_set():
            raise Interrupted(self.name)
        try:
            return operation()
        except RuntimeError as error:
            if self._interrupted.is_set():
                raise Interrupted(self.name) from None
            raise PeerLost(f"{self.name}: {str(error).splitlines()[0][:300]}") from None

    def interrupt(self) -> None:
        """Wake whoever waits on this group, in bounded time; the group is of no use afterwards. Any thread; idempotent."""
        if self._interrupted.is_set():
            return
        self._interrupted.set()
        if self._group is None:
            return
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                self._group.abort()
        else:
            self._poison()

    def _poison(self) -> None:
        """Let a receive time out. Where a peer's connection is closed already (it died first), gloo refuses at once and closes nothing:
        then the next peer's."""
        for other in range(self.size):
            if other != self.rank:
                try:
                    self._group.recv([torch.empty(1)], other, POISON_TAG).wait(timedelta(milliseconds=1))
                except RuntimeError as error:
                    if "timed out" in str(error).lower():
                        return


class GenerationGroups:
    """All groups of one worker in one generation. `world` has every participant; p2p of activations and of gradients go over
    `forward` and `backward` (apart on NCCL, where a pair's operations run in order; one and the same on gloo, which has tags)."""

    def __init__(
        self, store: Store, generation: int, me: str, device: torch.device, timeout_s: float, rendezvous_s: float
    ) -> None:
        self.me, self.device, self.timeout_s = me, device, timeout_s
        self._store = PrefixStore(f"generation-{generation}", store)
        self._rendezvous_s = rendezvous_s
        self._groups: dict[tuple[str, tuple[str, ...]], Group] = {}
        self.over = threading.Event()
        """Set by `interrupt`: what else waits on behalf of this generation gives up then."""
        self._lock = threading.Lock()

    def meet(self, members: Collection[str]) -> None:
        """Wait until every member is here: a store poll that an interrupt ends, so that no group's constructor waits for the dead."""
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
        """Wait until all members are about to build a group, so that hardly ever somebody is left in a constructor (see `_build`)."""
        complete = f"complete/{name}"
        if self._store.add(f"arrived/{name}", 1) == size:
            self._store.set(complete, "1")
        self._poll(lambda: self._store.check([complete]), f"building {name}", self.timeout_s)

    def group(self, members: Iterable[str], purpose: str = "sync") -> Group:
        """The group of these members, made on first use: all of them call in the same order of groups."""
        key = (purpose if self.device.type == "cuda" else "any", tuple(members))
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
            raise PeerLost(f"building {name}: {str(error).splitlines()[0][:300]}") from None
        with self._lock:
            self._groups[key] = made
        if self.over.is_set():
            made.interrupt()
        return made

    def _build(self, name: str, members: tuple[str, ...]) -> Group:
        """Make a group, in a thread: a member that is lost after the gathering leaves the others in the constructor, which nothing wakes.
        After an interrupt that thread is left to end at the constructor's own deadline, and what it makes is dropped."""
        made: Future[Group] = Future()

        def run() -> None:
            try:
                made.set_result(Group(name, members, self.me, self._store, self.device, self.timeout_s))
            except Exception as error:  # noqa: BLE001 - raised again by whoever waits
                made.set_exception(error)

        threading.Thread(target=run, name=f"building {name}", daemon=True).start()
        while not wait([made], BUILD_POLL_S).done:
            self.check()
        return made.result()

    def interrupt(self) -> None:
        """Wake this worker out of every group; any thread."""
        self.over.set()
        with self._lock:
            groups = list(self._groups.values())
        threads = [
            threading.Thread(target=group.interrupt, name=f"interrupt {group.name}", daemon=True) for group in groups
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(INTERRUPT_S)

    def check(self) -> None:
        """Raises Interrupted once `interrupt` was called."""
        if self.over.is_set():
            raise Interrupted("the generation is over")

    @property
    def interrupted(self) -> bool:
        return self.over.is_set()

    def close(self) -> None:
        """Drop every group; whoever holds none of their works lets gloo's threads end."""
        with self._lock:
            self._groups.clear()
