"""NcclGroup's own code over a fake of PyTorch's binding; `scripts/gpu` runs it over NCCL."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from autohet.runtime.groups import GenerationGroups, GroupTimeouts, Interrupted, PeerLost
from autohet.runtime.groups.nccl import NcclGroup
from tests.harness.fake_nccl import VERSIONS, ErrorType, FakeProcessGroupNCCL

CPU = torch.device("cpu")
MEMBERS = ("a", "b")
Member = Callable[[NcclGroup], Any]


@pytest.fixture(params=VERSIONS, autouse=True)
def binding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(FakeProcessGroupNCCL, "version", request.param)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", FakeProcessGroupNCCL, raising=False)
    return str(request.param)


def new_store() -> TCPStore:
    return TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )


def on_both(a: Member, b: Member) -> dict[str, Any]:
    """Run one function per member, each in a thread with its own end of a group of two.

    Returns each member's result, or the exception that it raised.
    """
    store = new_store()
    results: dict[str, Any] = {}

    def run(me: str, member: Member) -> None:
        through = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=20))
        try:
            group = NcclGroup("pair", MEMBERS, me, through, CPU, 10.0)
            group.connect()
            results[me] = member(group)
        except Exception as error:  # noqa: BLE001
            results[me] = error

    threads = [threading.Thread(target=run, args=pair) for pair in (("a", a), ("b", b))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def test_connecting_makes_the_communicator_on_the_group_device() -> None:
    found = on_both(
        lambda group: group.process_group.connected_to, lambda group: group.process_group.options
    )
    assert found["a"] == CPU
    assert found["b"].group_name == "pair"
    assert found["b"].global_ranks_in_group == [0, 1]
    assert found["b"]._timeout == timedelta(seconds=10)


def test_every_operation_runs_over_the_real_signatures() -> None:
    def collectives(group: NcclGroup) -> list[float]:
        mine = torch.full((4,), float(group.rank + 1))
        summed = mine.clone()
        group.all_reduce(summed)
        largest = mine.clone()
        group.all_reduce_max(largest)
        reduced = mine.clone()
        group.wait_on_host(group.start_reduce(reduced, "a"))
        spread = mine.clone()
        group.wait_on_host(group.start_broadcast(spread, "b"))
        gathered = torch.empty(8)
        group.all_gather(gathered, mine)
        return [summed[0].item(), largest[0].item(), spread[0].item(), *gathered.tolist()]

    found = on_both(collectives, collectives)
    assert found["a"] == found["b"] == [3.0, 2.0, 2.0, *[1.0] * 4, *[2.0] * 4]


def test_messages_between_two_members_arrive_in_order() -> None:
    def send(group: NcclGroup) -> None:
        for value in (1.0, 2.0):
            group.wait_on_host(group.send(torch.full((3,), value), "b", 7))

    def receive(group: NcclGroup) -> list[float]:
        received = torch.empty(3)
        values = []
        for _ in range(2):
            group.wait_on_host(group.recv(received, "a", 7))
            values.append(received[0].item())
        return values

    assert on_both(send, receive)["b"] == [1.0, 2.0]


def lose_peer(group: NcclGroup, **how: Any) -> Any:
    for name, value in how.items():
        setattr(group.process_group, name, value)
    return group.wait_on_host(group.start_all_reduce(torch.ones(2)))


@pytest.mark.parametrize(
    "how",
    [
        {"failure": "NCCL error: remote process exited"},
        {"reported": ErrorType.REMOTE_ERROR},
        {"reported": ErrorType.REMOTE_ERROR, "silent": True},
    ],
    ids=["operation fails", "error is reported", "error is reported and nothing completes"],
)
def test_a_lost_peer_is_peer_lost(how: dict[str, Any]) -> None:
    """Wrong: a TypeError of `Work.exception`, or a result made of garbage."""
    found = on_both(lambda group: lose_peer(group, **how), lambda group: None)
    assert isinstance(found["a"], PeerLost)


def test_a_peer_that_is_lost_in_silence_is_peer_lost_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wait(group: NcclGroup) -> Any:
        group.timeout_s = 0.05
        return lose_peer(group, silent=True)

    assert isinstance(on_both(wait, lambda group: None)["a"], PeerLost)


def test_a_result_after_an_abort_is_no_result() -> None:
    """NCCL counts an aborted operation as completed, and its `wait` returns normally."""

    def wait(group: NcclGroup) -> Any:
        group.process_group.silent = True
        work = group.start_all_reduce(torch.ones(2))
        group.interrupt()
        return group.wait_on_host(work)

    assert isinstance(on_both(wait, lambda group: None)["a"], Interrupted)


def test_generation_groups_report_a_lost_peer() -> None:
    """Wrong: the generation goes on although a group's communicator has an error."""
    store = new_store()
    raised: dict[str, BaseException] = {}
    built = threading.Barrier(2, timeout=30)

    def run(me: str) -> None:
        through = TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=20))
        groups = GenerationGroups(through, 1, me, CPU, GroupTimeouts(10.0, 20.0), NcclGroup)
        groups.meet(MEMBERS)
        world = groups.group(MEMBERS, "world")
        built.wait()
        world.process_group.reported = ErrorType.COMM_ERROR
        try:
            groups.check()
        except PeerLost as error:
            raised[me] = error

    threads = [threading.Thread(target=run, args=(me,)) for me in MEMBERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(raised) == set(MEMBERS)
    assert "COMM_ERROR" in str(raised["a"])
