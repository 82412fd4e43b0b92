"""Every wait ends: the rendezvous by its deadline or an interrupt; errors say who and pickle."""

import pickle
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, TCPStore

from autohet.runtime.groups import (
    GenerationGroups,
    GlooGroup,
    Group,
    GroupTimeouts,
    Interrupted,
    PeerLost,
)
from tests.harness.deferred_group import DeferredGroup

CPU = torch.device("cpu")
BACK_END: type[Group] = GlooGroup


@pytest.fixture
def store() -> TCPStore:
    return TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )


@pytest.fixture(params=[GlooGroup, DeferredGroup], ids=["gloo", "deferred"], autouse=True)
def back_end(request: pytest.FixtureRequest) -> type[Group]:
    global BACK_END
    BACK_END = request.param
    return BACK_END


def two(store: TCPStore, name: str) -> tuple[Group, Group]:
    """Both ends of a group of two, in one process."""
    made: dict[str, Group] = {}
    other = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=20))

    def build(me: str, through: TCPStore) -> None:
        made[me] = BACK_END(name, ("a", "b"), me, through, CPU, 60.0)
        made[me].connect()

    threads = [threading.Thread(target=build, args=pair) for pair in (("a", store), ("b", other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return made["a"], made["b"]


def in_thread(operation: object) -> tuple[threading.Thread, list[BaseException]]:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            operation()  # type: ignore[operator]
        except (Interrupted, PeerLost) as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


@pytest.mark.parametrize("error", [Interrupted("generation 3"), PeerLost("world: a is gone")])
def test_errors_pickle(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)


def test_an_interrupt_wakes_a_receive_and_its_peer_sees_the_loss(store: TCPStore) -> None:
    a, b = two(store, "pair")
    thread, raised = in_thread(lambda: a.wait_on_host(a.recv(torch.zeros(3), "b", 5)))
    waiting, lost = in_thread(b.barrier_on_host)
    a.interrupt()
    for each in (thread, waiting):
        each.join(20)  # the group's own deadline is 60 s
    assert isinstance(raised[0], Interrupted)
    assert isinstance(lost[0], PeerLost)
    with pytest.raises(Interrupted):
        a.all_reduce(torch.zeros(1))


def test_sums_maxima_and_messages(store: TCPStore) -> None:
    a, b = two(store, "pair")
    one, other = torch.tensor([1.0, 5.0]), torch.tensor([2.0, 3.0])
    thread, raised = in_thread(
        lambda: (
            b.all_reduce(other),
            b.all_reduce_max(other),
            b.wait_on_host(b.send(other, "a", 1)),
        )
    )
    a.wait_on_host(a.start_all_reduce(one))
    assert one.tolist() == [3.0, 8.0]
    one += 1
    a.all_reduce_max(one)
    message = torch.empty(2)
    a.wait_on_host(a.recv(message, "b", 1))
    thread.join(20)
    assert not raised
    assert message.tolist() == other.tolist() == [4.0, 9.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_gathered_in_order_of_ranks(store: TCPStore, dtype: torch.dtype) -> None:
    a, b = two(store, "pair")
    wholes = [torch.empty(2, 3, 2, dtype=dtype) for _ in range(2)]
    parts = torch.arange(12, dtype=dtype).view(2, 6)
    thread, raised = in_thread(lambda: b.all_gather(wholes[1], parts[1]))
    a.all_gather(wholes[0], parts[0])
    thread.join(20)
    assert not raised
    for whole in wholes:
        assert whole.flatten().tolist() == list(range(12))
    with pytest.raises(AssertionError, match="2 parts of 5 into 12"):
        a.all_gather(wholes[0], torch.empty(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_go_to_each_member_and_come_in_order_of_ranks(
    store: TCPStore, dtype: torch.dtype
) -> None:
    """Uneven counts, none among them."""
    a, b = two(store, "pair")
    rows = torch.arange(12, dtype=dtype).view(6, 2)
    found: list[object] = []

    def other() -> None:
        counts = b.exchange_counts(torch.tensor([2, 0]))
        out = torch.empty(1, 2, dtype=dtype)
        b.all_to_all(out, rows[4:], [1, 0], [2, 0])
        found.append((counts, (out + 0).tolist()))

    thread, raised = in_thread(other)
    assert a.exchange_counts(torch.tensor([3, 1])) == ([3, 1], [3, 2])
    out = torch.empty(5, 2, dtype=dtype)
    a.all_to_all(out, rows[:4], [3, 2], [3, 1])
    assert (out + 0).flatten().tolist() == [0, 1, 2, 3, 4, 5, 8, 9, 10, 11]
    thread.join(20)
    assert not raised
    assert found == [(([2, 0], [1, 0]), [[6.0, 7.0]])]


def test_a_lost_peer_ends_an_exchange_of_rows(store: TCPStore) -> None:
    a, b = two(store, "pair")
    thread, raised = in_thread(lambda: a.exchange_counts(torch.tensor([1, 1])))
    b.interrupt()
    a.interrupt()
    thread.join(20)
    assert len(raised) == 1
    with pytest.raises(Interrupted):
        b.all_to_all(torch.empty(0, 2), torch.empty(0, 2), [0, 0], [0, 0])


def test_an_interrupt_wakes_a_gather_and_a_lost_peer_ends_it(store: TCPStore) -> None:
    a, b = two(store, "pair")
    thread, raised = in_thread(
        lambda: (a.all_gather(torch.empty(6), torch.empty(3)), a.barrier_on_host())
    )
    time.sleep(0.1)  # it waits by then; only makes the test harder
    a.interrupt()
    thread.join(20)  # the group's own deadline is 60 s
    assert isinstance(raised[0], Interrupted)
    with pytest.raises(PeerLost):
        (b.all_gather(torch.empty(6), torch.empty(3)), b.barrier_on_host())


def test_the_rendezvous_names_its_deadline(store: TCPStore) -> None:
    groups = GenerationGroups(
        store, 1, "a", CPU, timeouts=GroupTimeouts(5.0, 0.05), back_end=BACK_END
    )
    with pytest.raises(PeerLost, match="rendezvous"):
        groups.meet(["a", "b"])


def test_an_interrupt_ends_the_rendezvous(store: TCPStore) -> None:
    groups = GenerationGroups(
        store, 1, "a", CPU, timeouts=GroupTimeouts(5.0, 60.0), back_end=BACK_END
    )
    thread, raised = in_thread(lambda: groups.meet(["a", "b"]))
    groups.interrupt()
    thread.join(20)
    assert isinstance(raised[0], Interrupted)
    with pytest.raises(Interrupted):
        groups.group(["a"])


def test_an_interrupt_ends_the_building_of_a_group_that_a_peer_never_joins(store: TCPStore) -> None:
    """The peer came to the rendezvous and died before it built the group."""
    groups = GenerationGroups(
        store, 1, "a", CPU, timeouts=GroupTimeouts(60.0, 60.0), back_end=BACK_END
    )
    peer = GenerationGroups(
        store, 1, "b", CPU, timeouts=GroupTimeouts(60.0, 60.0), back_end=BACK_END
    )
    meeting, _ = in_thread(lambda: peer.meet(["a", "b"]))
    groups.meet(["a", "b"])
    meeting.join(20)
    thread, raised = in_thread(lambda: groups.group(["a", "b"]))
    groups.interrupt()
    thread.join(20)
    assert not thread.is_alive(), "still building"
    assert isinstance(raised[0], Interrupted)


def test_an_interrupt_ends_the_building_of_a_group_whose_other_member_dies_in_it(
    store: TCPStore,
) -> None:
    """Both were about to build; then the peer was gone, and this one waits inside gloo's
    constructor for its address.
    """
    groups = GenerationGroups(
        store, 1, "a", CPU, timeouts=GroupTimeouts(15.0, 60.0), back_end=BACK_END
    )
    other = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=20))
    GenerationGroups(
        other, 1, "b", CPU, timeouts=GroupTimeouts(15.0, 60.0), back_end=BACK_END
    )._store.add(f"arrived/building {'sync' if BACK_END.in_stream_order else 'any'}/2/a+b", 1)
    started = time.monotonic()
    thread, raised = in_thread(lambda: groups.group(["a", "b"]))
    while not any(each.name.startswith("building") for each in threading.enumerate()):
        assert time.monotonic() - started < 10, "the constructor was never entered"
        time.sleep(0.01)
    groups.interrupt()
    thread.join(10)
    assert not thread.is_alive(), "still building"
    assert isinstance(raised[0], Interrupted)


def test_a_group_that_a_peer_never_joins_has_a_deadline(store: TCPStore) -> None:
    groups = GenerationGroups(
        store, 1, "a", CPU, timeouts=GroupTimeouts(0.05, 60.0), back_end=BACK_END
    )
    with pytest.raises(PeerLost, match="/2/a\\+b"):
        groups.group(["a", "b"])


def test_a_group_of_one_needs_nobody() -> None:
    group = BACK_END("alone", ("a",), "a", HashStore(), CPU, 1.0)
    tensor, started = torch.ones(2), time.monotonic()
    group.all_reduce(tensor)
    assert tensor.tolist() == [1.0, 1.0]
    whole = torch.zeros(1, 2)
    group.all_gather(whole, tensor)
    assert whole.tolist() == [[1.0, 1.0]]
    group.interrupt()
    assert time.monotonic() - started < 20
    assert group.size == 1
