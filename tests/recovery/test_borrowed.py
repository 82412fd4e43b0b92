"""Reading of live state on a device, by streams and events that note what is asked of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from recovery.state import borrowed as module
from recovery.state.borrowed import BorrowedState


class FakeStream:
    """A stream of which operations end only when it is synchronized."""

    made = 0

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        type(self).made += 1
        self.priority = priority
        self.calls: list[str] = []

    def wait_event(self, event: Any) -> None:
        self.calls.append("wait")

    def synchronize(self) -> None:
        self.calls.append("synchronize")


class FakeEvent:
    device = torch.device("cpu")


@pytest.fixture
def stream_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Let borrowed state believe that it lies on a device."""
    entered: list[FakeStream] = []

    @contextmanager
    def on_stream(stream: FakeStream) -> Iterator[None]:
        entered.append(stream)
        stream.calls.append("enter")
        yield
        stream.calls.append("leave")

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    FakeStream.made = 0
    module._reading_stream.cache_clear()
    yield entered
    module._reading_stream.cache_clear()


def on_device() -> BorrowedState:
    borrowed = BorrowedState({"a": torch.zeros(4)})
    borrowed.event = FakeEvent()  # type: ignore[assignment]
    return borrowed


def test_an_error_leaves_no_copy_under_way(stream_of: list[FakeStream]) -> None:
    """A copy that still runs when its file is unmapped is a fault of the GPU's context."""
    with pytest.raises(ValueError, match="no room"), on_device().reading():
        raise ValueError("no room")
    assert stream_of[0].calls[-1] == "synchronize"


def test_all_readings_share_one_stream_that_is_no_communicators(
    stream_of: list[FakeStream],
) -> None:
    for _ in range(40):
        with on_device().reading() as state:
            assert set(state) == {"a"}
    assert FakeStream.made == 1
    assert stream_of[0].priority < 0
    assert stream_of[0].calls[:2] == ["wait", "enter"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_is_read_behind_what_was_under_way() -> None:
    tensor = torch.zeros(1 << 20, device="cuda")
    target = torch.empty(1 << 20, pin_memory=True)
    torch.cuda._sleep(50_000_000)
    tensor.fill_(3.0)
    borrowed = BorrowedState({"a": tensor})
    with borrowed.reading() as state:
        target.copy_(state["a"], non_blocking=True)
    assert bool((target == 3.0).all())
