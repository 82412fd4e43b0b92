"""Callbacks: every event in order, off the driver's thread; a failing or slow one harms neither the
run nor the others.
"""

import logging
import sys
import threading
import types

import pytest

from autohet.driver.callbacks import EventDispatch
from autohet.driver.callbacks.trackers import Scalars, make_callbacks
from autohet.driver.control.events import EventLog
from planner.errors import ConfigError

STEP = {
    "time": 1.0,
    "generation": 1,
    "kind": "step",
    "step": 3,
    "loss": 2.5,
    "gradient_norm": 1.0,
    "learning_rate": 1e-3,
    "tokens": 100,
    "seconds": 0.5,
}

NUMBERS = {
    "loss": 2.5,
    "gradient_norm": 1.0,
    "learning_rate": 1e-3,
    "step_s": 0.5,
    "tokens_per_s": 200.0,
}


class Follower:
    def __init__(self, fails=False):
        self.events, self.closed, self.fails, self.threads = [], 0, fails, set()

    def on_event(self, event):
        self.threads.add(threading.current_thread().name)
        self.events.append(event)
        if self.fails:
            raise RuntimeError("a tracker's server is away")

    def close(self):
        self.closed += 1


def test_every_event_in_order_also_those_that_are_not_kept_in_memory():
    follower = Follower()
    dispatch = EventDispatch([follower])
    events = EventLog(None, wall_clock=lambda: 1.0, listener=dispatch)
    events.emit("started", 0, job="toy")
    events.emit("step", 1, step=3)
    dispatch.close()
    assert [event["kind"] for event in follower.events] == ["started", "step"]
    assert follower.closed == 1
    assert follower.threads == {"autohet-callbacks"}


def test_one_that_fails_is_told_nothing_more_and_the_others_everything(caplog):
    failing, sound = Follower(fails=True), Follower()
    dispatch = EventDispatch([failing, sound])
    with caplog.at_level(logging.ERROR, "autohet"):
        dispatch(STEP)
        dispatch(STEP)
        dispatch.close()
    assert (len(failing.events), len(sound.events)) == (1, 2)
    assert "Follower failed and is told nothing more" in caplog.text


def test_one_that_hangs_holds_up_neither_the_driver_nor_the_end(caplog):
    release = threading.Event()

    class Hanging(Follower):
        def on_event(self, event):
            release.wait(30)

    dispatch = EventDispatch([Hanging()], most_waiting=2, close_s=0.05)
    for _ in range(10):
        dispatch(STEP)
    with caplog.at_level(logging.WARNING, "autohet"):
        dispatch.close()
    release.set()
    assert "Callbacks are too slow" in caplog.text


def test_numbers_of_events():
    scalars = Scalars()
    assert scalars.of(STEP) == (
        3,
        NUMBERS,
    )
    assert scalars.of({**STEP, "seconds": None})[1].keys() == {
        "loss",
        "gradient_norm",
        "learning_rate",
    }
    assert scalars.of(
        {"kind": "arrival", "time": 1.0, "node": "a-0", "gpu_type": "T4", "num_gpus": 8}
    ) == (3, {"fleet/gpus": 8.0})
    assert scalars.of(
        {"kind": "arrival", "time": 1.0, "node": "b-0", "gpu_type": "L4", "num_gpus": 4}
    )[1] == {"fleet/gpus": 12.0}
    assert scalars.of({"kind": "death", "time": 1.0, "nodes": ["a-0"]})[1] == {"fleet/gpus": 4.0}
    change = {
        "kind": "reconfigure",
        "time": 2.0,
        "seconds": {"total": 2.0},
        "bytes_by_tier": {"peer": 7},
        "steps_lost": 0,
    }
    assert scalars.of(change)[1] == {
        "change/total_s": 2.0,
        "change/peer_bytes": 7.0,
        "change/steps_lost": 0.0,
    }


def test_trackers_that_are_not_there(tmp_path, caplog, monkeypatch):
    with pytest.raises(
        ConfigError, match="trackers names 'comet'; there are mlflow, tensorboard, wandb"
    ):
        make_callbacks(("comet",), "toy", tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with caplog.at_level(logging.WARNING, "autohet"):
        assert make_callbacks(("wandb",), "toy", tmp_path) == []
        assert "Tracker wandb is off, since it is not installed" in caplog.text

        def init(**options):
            raise RuntimeError("no API key")

        monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
        assert make_callbacks(("wandb",), "toy", tmp_path) == []
        assert (
            "Tracker wandb is off, since it cannot begin: RuntimeError: no API key" in caplog.text
        )


def test_each_tracker_is_given_numbers_by_step_and_ended(tmp_path, monkeypatch):
    calls = []

    def record(name):
        return lambda *arguments, **options: calls.append((name, arguments, options))

    writer = types.SimpleNamespace(add_scalar=record("add_scalar"), close=record("close"))
    run = types.SimpleNamespace(log=record("log"), finish=record("finish"))
    board = types.SimpleNamespace(SummaryWriter=lambda path: writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **options: run))
    names = {
        name: record(name) for name in ("set_experiment", "start_run", "log_metrics", "end_run")
    }
    monkeypatch.setitem(sys.modules, "mlflow", types.SimpleNamespace(**names))
    for callback in make_callbacks(("tensorboard", "wandb", "mlflow"), "toy", tmp_path):
        callback.on_event(STEP)
        callback.on_event({"time": 1.0, "generation": 1, "kind": "decision", "reason": "no number"})
        callback.close()
    assert ("add_scalar", ("loss", 2.5, 3), {}) in calls
    assert [call for call in calls if call[0] == "log"] == [
        (
            "log",
            (NUMBERS,),
            {"step": 3},
        )
    ]
    assert [call[2] for call in calls if call[0] == "log_metrics"] == [{"step": 3}]
    assert [call[0] for call in calls if call[0] in ("close", "finish", "end_run")] == [
        "close",
        "finish",
        "end_run",
    ]
