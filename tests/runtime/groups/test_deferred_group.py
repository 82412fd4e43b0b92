"""The group with CUDA's semantics has them: what reads too early sees poison, what fails is silent,
and an abort ends everything alike.
"""

import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, TCPStore

from autohet.runtime.groups import GenerationGroups, GroupTimeouts, Interrupted, PeerLost
from autohet.runtime.parallel.executor import Executor
from tests.harness.deferred_group import DeferredGroup

CPU = torch.device("cpu")


def pair(timeout_s: float = 30.0) -> tuple[DeferredGroup, DeferredGroup]:
    store, made = HashStore(), {}

    def build(me: str) -> None:
        group = DeferredGroup("pair", ("a", "b"), me, store, CPU, timeout_s)
        group.connect()
        made[me] = group

    threads = [threading.Thread(target=build, args=(me,)) for me in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return made["a"], made["b"]


def send(group: DeferredGroup, tensor: torch.Tensor) -> None:
    """From a thread of its own, since a thread is a stream: what it does here would wait for what
    the receiver waits for.
    """
    thread = threading.Thread(target=lambda: group.send(tensor, "a", 0))
    thread.start()
    thread.join(30)


def test_what_nobody_waited_for_is_poison_and_what_the_stream_waits_for_comes() -> None:
    a, b = pair()
    send(b, torch.tensor([1.0, 2.0]))
    here = torch.zeros(2)
    work = a.recv(here, "b", 0)
    assert here.isnan().all(), "a receive that nobody has waited for shows its data"
    time.sleep(0.05)
    assert here.isnan().all(), "it came without a wait"
    a.wait_on_stream(work)
    assert (here + 1).tolist() == [2.0, 3.0]


def test_the_host_sees_poison_until_it_waits() -> None:
    a, b = pair()
    here = torch.zeros(2)
    work = a.recv(here, "b", 0)
    a.wait_on_stream(work)
    assert torch.tensor(here.tolist()).isnan().all()
    assert not work.is_completed()
    send(b, torch.tensor([1.0, 2.0]))
    a.wait_on_host(work)
    assert here.tolist() == [1.0, 2.0]


def test_a_send_takes_what_is_in_the_tensor_when_its_turn_has_come() -> None:
    a, b = pair()
    mine = torch.ones(2)
    b.recv(torch.zeros(1), "a", 0)  # until `a` sends, no turn comes behind it
    send(b, mine)
    mine.fill_(9.0)  # before any wait: wrong on a GPU
    a.send(torch.zeros(1), "b", 0)
    here = torch.zeros(2)
    a.wait_on_host(a.recv(here, "b", 0))
    assert here.tolist() == [9.0, 9.0]


def test_a_failure_is_silent_until_asked_for_and_the_stream_behind_it_stands() -> None:
    a, b = pair()
    here, total = torch.zeros(2), torch.ones(1)
    lost = a.recv(here, "b", 0)
    b.interrupt()
    a.wait_on_stream(lost)
    behind = a.start_all_reduce(total)
    assert not lost.is_completed()
    with pytest.raises(PeerLost, match=r"pair: (?!no answer)"):
        a.wait_on_host(behind)
    a.interrupt()
    assert lost.is_completed()
    assert torch.tensor(here.tolist()).isnan().all(), "an abort has made up data"
    with pytest.raises(Interrupted):
        a.wait_on_host(lost)


def test_a_host_wait_keeps_its_deadline() -> None:
    a, _ = pair(timeout_s=0.2)
    with pytest.raises(PeerLost, match="no answer within 0 s"):
        a.wait_on_host(a.recv(torch.zeros(1), "b", 0))


def test_a_first_use_blocks_on_the_host_and_a_generation_makes_it_before() -> None:
    """Nothing wakes a first use: so `GenerationGroups` connects while it builds, in a thread that
    an interrupt leaves behind.
    """
    nobody = HashStore()
    nobody.set_timeout(timedelta(seconds=1))  # of its own: without it 300 s, whatever the group's
    alone = DeferredGroup("alone", ("a", "b"), "a", nobody, CPU, 1.0)
    with pytest.raises(PeerLost):
        alone.all_reduce(torch.zeros(1))
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    GenerationGroups(store, 1, "b", CPU, GroupTimeouts(20.0, 20.0), DeferredGroup)._store.add(
        "arrived/sync/2/a+b", 1
    )
    groups = GenerationGroups(store, 1, "a", CPU, GroupTimeouts(20.0, 20.0), DeferredGroup)
    timer = threading.Timer(0.3, groups.interrupt)
    timer.start()
    with pytest.raises(Interrupted):
        groups.group(("a", "b"))
    timer.join(10)


def test_time_computed_is_the_streams_and_not_the_hosts() -> None:
    """The host's clock would count what the stream waits for as computing, and a stage that waits
    long as slow.
    """
    a, b = pair()
    executor = Executor.__new__(Executor)
    executor.clock = DeferredGroup.clock
    here = torch.zeros(4)
    work = a.recv(here, "b", 0)
    a.wait_on_stream(work)
    sender = threading.Timer(0.3, send, (b, torch.ones(4)))
    begun = time.perf_counter()
    sender.start()
    begin = executor.clock.mark()
    here.sum()
    executor.computed = [(begin, executor.clock.mark())]
    took = time.perf_counter() - begun
    assert took >= 0.3
    assert executor.compute_s < took - 0.25
