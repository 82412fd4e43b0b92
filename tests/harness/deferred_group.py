"""A group with CUDA's semantics for tensors on the CPU: what is wrong on a GPU is wrong here,
without one.

* A wait on the stream returns at once. Data comes later; until it has come, and for ever where
  nobody has waited, the tensor holds poison (NaN, or 0x7F in every byte). What the thread computes
  next on such a tensor waits for it, as a stream does (`_Stream`, a dispatch mode); what the *host*
  reads does not: `tolist`, `numpy`, `item` show the poison.
* Operations of a group run one after the other, in their order, each a random moment late; a send
  takes its tensor's content only then. Tags mean nothing: messages between two members are taken in
  their order.
* A failure is silent. The operation never completes, and neither does anything that its stream was
  given after it, on whatever group, until the group is aborted: then each operation counts as
  completed, with poison in its tensor, and the stream goes on, on garbage.
* The constructor talks to nobody; the first operation connects, on the host, where no interrupt
  wakes it.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions, BroadcastOptions, ProcessGroupGloo, ReduceOptions
from torch.distributed.distributed_c10d import AllgatherOptions, AllToAllOptions, Store
from torch.utils._python_dispatch import TorchDispatchMode

from autohet.runtime.groups.clock import HostClock
from autohet.runtime.groups.gloo import close_connections
from autohet.runtime.groups.group import Group
from tests.harness.waits import HANG_S

LATEST_S = 5e-4
STREAM_POLL_S = 2e-3
HOST_READS = ("_local_scalar_dense", "equal", "is_nonzero")


def poison(tensor: Tensor) -> None:
    """`.data`: no version counter of autograd's is raised, as none is on a GPU."""
    tensor.data.view(-1).view(torch.uint8).fill_(0x7F)
    if tensor.is_floating_point():
        tensor.data.fill_(float("nan"))


def tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors of an operator's arguments: they are there or in lists."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from tensors_in(argument)


@dataclass(eq=False)
class DeferredWork:
    """`stream_waits`: somebody waited, so what comes may be used once it is there.

    `run` is what its back end's thread does.
    """

    back_end: _DeferredBackEnd
    run: Callable[[DeferredWork], None]
    written: tuple[Tensor, ...] = ()
    read: tuple[Tensor, ...] = ()
    stalled_by: _DeferredBackEnd | None = None
    stream_waits: bool = False
    result: Tensor | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def is_completed(self) -> bool:
        return self.done.is_set() or self.back_end.aborted.is_set()

    def wait(self) -> None:
        if not self.stream_waits:
            self.stream_waits = True
            this_stream().waits_for.append(self)

    def exception(self) -> None:
        return None


class _Stream(TorchDispatchMode):
    """What one thread computes: each operation first waits for the communication that the stream
    was told to wait for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stalled_by: _DeferredBackEnd | None = None
        self.waits_for: list[DeferredWork] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spare each operator a call of torch._dynamo; nothing here is compiled."""
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if _PENDING:
            on_host = function.overloadpacket.__name__ in HOST_READS
            for tensor in tensors_in((*args, *(kwargs or {}).values())):
                if tensor.device.type == "cpu":
                    self.settle(tensor, block=not on_host)
        return function(*args, **(kwargs or {}))

    def settle(self, tensor: Tensor, *, block: bool) -> None:
        for work in list(_PENDING.get(tensor.untyped_storage().data_ptr(), ())):
            if work.stream_waits and (block or work.done.is_set()):
                self._end(work)

    def catch_up(self) -> None:
        """An operation of a group starts once all that its stream was given before has ended."""
        for work in self.waits_for:
            self._end(work)
        self.waits_for.clear()

    def _end(self, work: DeferredWork) -> None:
        deadline = time.monotonic() + work.back_end.timeout_s
        while not work.done.is_set() and not work.back_end.aborted.is_set():
            if work.back_end.failure is not None or self.is_stalled or time.monotonic() > deadline:
                if not self.is_stalled:
                    self.stalled_by = work.back_end
                return  # the host goes on: it has only launched something
            work.done.wait(STREAM_POLL_S)
        _forget(work)
        result, work.result = work.result, None
        if work.done.is_set() and result is not None:
            work.written[0].data.copy_(result.view(work.written[0].shape))

    @property
    def is_stalled(self) -> bool:
        return self.stalled_by is not None and not self.stalled_by.aborted.is_set()


_PENDING: dict[int, list[DeferredWork]] = {}
_LOCK = threading.Lock()
_HERE = threading.local()


def this_stream() -> _Stream:
    """The calling thread's; from its first group operation on, everything that it computes goes
    through it.
    """
    if not hasattr(_HERE, "stream"):
        _HERE.stream = _Stream()
        _HERE.stream.__enter__()
    return _HERE.stream


def leave_stream() -> None:
    """What the calling thread computes from now on goes through no stream; for a thread that lives
    on after what began one.
    """
    if hasattr(_HERE, "stream"):
        _HERE.stream.__exit__(None, None, None)
        del _HERE.stream


def _remember(work: DeferredWork) -> None:
    with _LOCK:
        for tensor in (*work.written, *work.read):
            _PENDING.setdefault(tensor.untyped_storage().data_ptr(), []).append(work)


def _forget(work: DeferredWork) -> None:
    with _LOCK:
        for tensor in (*work.written, *work.read):
            key = tensor.untyped_storage().data_ptr()
            left = [other for other in _PENDING.get(key, ()) if other is not work]
            if left:
                _PENDING[key] = left
            else:
                _PENDING.pop(key, None)


class _DeferredBackEnd:
    """What `Group` calls; the operations run in a thread, over gloo."""

    def __init__(self, name: str, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self.timeout_s = timeout_s
        self.aborted = threading.Event()
        self.failure: str | None = None
        self._store = store
        self._gloo: Any = None
        self._number: Counter[tuple[str, int]] = Counter()
        self._chance = random.Random(f"{name} {rank}")
        self._queue: queue.SimpleQueue[DeferredWork | None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=f"stream of {name}", daemon=True).start()

    def abort(self) -> None:
        self.aborted.set()
        self._queue.put(None)
        if self._gloo is not None:  # connections close, which peers may or may not see
            close_connections(self._gloo, self.rank, self.size)

    def allreduce(self, tensors: list[Tensor], options: AllreduceOptions) -> DeferredWork:
        this_stream().catch_up()
        mine = tensors[0].detach().clone()

        def run(work: DeferredWork) -> None:
            self._wait(self._gloo.allreduce([mine], options))
            work.result = mine

        return self._issue(run, written=(tensors[0],))

    def reduce(self, tensors: list[Tensor], options: ReduceOptions) -> DeferredWork:
        """The root alone has the sum; what the others' tensors have afterwards is poison."""
        this_stream().catch_up()
        mine = tensors[0].detach().clone()

        def run(work: DeferredWork) -> None:
            self._wait(self._gloo.reduce([mine], options))
            work.result = mine if options.rootRank == self.rank else None

        return self._issue(run, written=(tensors[0],))

    def broadcast(self, tensors: list[Tensor], options: BroadcastOptions) -> DeferredWork:
        this_stream().catch_up()
        mine = tensors[0].detach().clone()

        def run(work: DeferredWork) -> None:
            self._wait(self._gloo.broadcast([mine], options))
            work.result = mine

        return self._issue(run, written=(tensors[0],))

    def _allgather_base(self, out: Tensor, part: Tensor, options: AllgatherOptions) -> DeferredWork:
        this_stream().catch_up()
        mine = part.detach().clone()

        def run(work: DeferredWork) -> None:
            whole = torch.empty_like(out)
            self._wait(self._gloo._allgather_base(whole, mine, options))
            work.result = whole

        return self._issue(run, written=(out,))

    def alltoall_base(
        self,
        out: Tensor,
        given: Tensor,
        received: list[int],
        sent: list[int],
        options: AllToAllOptions,
    ) -> DeferredWork:
        this_stream().catch_up()
        mine = given.detach().clone()

        def run(work: DeferredWork) -> None:
            came = torch.empty_like(out)
            self._wait(self._gloo.alltoall_base(came, mine, received, sent, options))
            work.result = came

        return self._issue(run, written=(out,))

    def send(self, tensors: list[Tensor], to: int, tag: int) -> DeferredWork:
        number = self._order("to", to)

        def run(work: DeferredWork) -> None:
            self._wait(
                self._gloo.send([tensors[0].detach().clone()], to, number)
            )  # what is there now, not what was there

        return self._issue(run, read=(tensors[0],))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> DeferredWork:
        number = self._order("from", source)

        def run(work: DeferredWork) -> None:
            came = torch.empty_like(tensors[0])
            self._wait(self._gloo.recv([came], source, number))
            work.result = came

        return self._issue(run, written=(tensors[0],))

    def _order(self, direction: str, other: int) -> int:
        self._number[direction, other] += 1
        return self._number[direction, other]

    def _issue(
        self, run: Callable[[DeferredWork], None], written: Any = (), read: Any = ()
    ) -> DeferredWork:
        self._connect_on_first_use()
        stream = this_stream()
        stream.catch_up()
        work = DeferredWork(
            self, run, written, read, stream.stalled_by if stream.is_stalled else None
        )
        for tensor in written:
            poison(tensor)
        _remember(work)
        self._queue.put(work)
        return work

    def _connect_on_first_use(self) -> None:
        if self._gloo is None:
            self._gloo = ProcessGroupGloo(
                self._store, self.rank, self.size, timedelta(seconds=self.timeout_s)
            )

    def _wait(self, work: Any) -> None:
        if not work.wait(timedelta(seconds=HANG_S)):
            raise RuntimeError("gloo did not end the operation")

    # the group's own thread
    # ------------------------------------------------------------------------------

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None and not self.aborted.is_set():
            while work.stalled_by is not None and not work.stalled_by.aborted.wait(STREAM_POLL_S):
                if self.aborted.is_set():
                    return
            time.sleep(self._chance.uniform(0.0, LATEST_S))
            try:
                work.run(work)
            except RuntimeError as error:
                self.failure = str(error)
                return  # nothing after it runs
            work.done.set()


class _DeferredClock(HostClock):
    in_step_with_host = False

    def mark(self) -> float:
        this_stream().catch_up()
        return super().mark()


class DeferredGroup(Group):
    """As NcclGroup, on the CPU."""

    in_stream_order = True
    clock = _DeferredClock()

    def create(self, store: Store) -> Any:
        return _DeferredBackEnd(self.name, store, self.rank, self.size, self.timeout_s)

    def connect(self) -> None:
        if self.process_group is not None:
            self.barrier_on_host()

    def wait_on_stream(self, work: Any) -> None:
        if work is not None:
            self._call(work.wait)

    def wait_on_host(self, work: Any) -> None:
        super().wait_on_host(work)
        if work is not None:
            for tensor in work.written:
                this_stream().settle(tensor, block=False)

    def error(self) -> str | None:
        return None if self.process_group is None else self.process_group.failure

    def _abort(self) -> None:
        self.process_group.abort()
