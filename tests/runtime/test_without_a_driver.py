"""A process without a driver: how long it lives, and whom it obeys when one comes back."""

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autohet.runtime.process import headless_watch, unattended
from autohet.runtime.process.epoch_fence import EpochFence, StaleDriver
from autohet.runtime.process.headless_watch import HeadlessWatch
from autohet.runtime.process.unattended import Unattended
from tests.harness.waits import HANG_S, wait_until


def test_who_was_replaced_is_obeyed_no_more() -> None:
    fence = EpochFence(3)
    fence.admit(3)
    fence.admit(5)
    fence.admit(5)
    with pytest.raises(StaleDriver, match=r"epoch 4.*epoch 5"):
        fence.admit(4)
    copied = pickle.loads(pickle.dumps(StaleDriver(4, 5)))
    assert (copied.epoch, copied.newest) == (4, 5)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A watch over reports whose `away_s` a test sets, with a limit of 600 s."""
    monkeypatch.setattr(headless_watch, "LOOK_S", 0.01)
    made = SimpleNamespace(reports=SimpleNamespace(away_s=0.0), ended=threading.Event(), looked=[])

    def begin(save: Callable[[Callable[[], bool]], None] | None = None) -> HeadlessWatch:
        alone: Any = None if save is None else SimpleNamespace(save=save, look=made.looked.append)
        made.watch = HeadlessWatch(made.reports, 600.0, alone, made.ended.set)
        return made.watch

    made.begin = begin
    yield made
    made.watch.close()


@pytest.mark.parametrize(
    ("away_s", "stops", "ends"),
    [(599.0, False, False), (601.0, False, True), (4.0, True, True), (0.0, True, False)],
)
def test_it_ends_after_its_limit_or_at_once_where_the_job_is_stopped(
    watch: Any, away_s: float, stops: bool, ends: bool
) -> None:
    watch.begin().is_stopped = stops
    watch.reports.away_s = away_s
    assert watch.ended.wait(HANG_S if ends else 0.2) == ends


def test_it_ends_once_its_state_is_saved_and_not_if_a_driver_comes_meanwhile(watch: Any) -> None:
    saves: list[str] = []

    def save(is_over: Callable[[], bool]) -> None:
        saves.append("begun")
        if len(saves) == 1:
            watch.reports.away_s = 0.0
            assert not is_over()
        assert not watch.ended.is_set()

    watch.reports.away_s = 40.0
    watch.begin(save)
    wait_until(lambda: watch.looked, "a look after checkpoints")
    watch.reports.away_s = 601.0
    wait_until(lambda: len(saves) == 1, "the first save")
    assert not watch.ended.wait(0.2)
    watch.reports.away_s = 601.0
    assert watch.ended.wait(HANG_S)
    assert len(saves) == 2


@pytest.mark.parametrize(
    ("worker", "away_s", "commits"),
    [("a/0", 31.0, True), ("a/0", 29.0, False), ("b/0", 31.0, False)],
)
def test_the_first_worker_of_the_layout_commits_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: str, away_s: float, commits: bool
) -> None:
    committed: list[Any] = []
    monkeypatch.setattr(unattended, "commit_stored", lambda storage: committed.append(storage.uri))
    order = SimpleNamespace(layout=SimpleNamespace(workers=("b/0", "a/0")))
    stub: Any = SimpleNamespace(
        place=SimpleNamespace(worker=worker),
        job=SimpleNamespace(checkpoint_storage=str(tmp_path)),
        preservation=SimpleNamespace(order=order),
    )
    alone = Unattended(stub)
    for _ in range(3):
        alone.look(away_s)
    assert len(committed) == commits, "at most once in a while"
