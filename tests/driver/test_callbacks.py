"""Callbacks: every event in order, off the driver's thread; a failing or slow one harms neither the
run nor the others.
"""

import logging
import sys
import threading
import types
from dataclasses import replace

import pytest

from autohet.driver.callbacks import EventDispatch
from autohet.driver.callbacks.trackers import Scalars, TrackerIds, make_callbacks
from autohet.driver.events.event_log import EventLog
from autohet.runtime.job import Job, TrackerEntry
from planner.errors import ConfigError
from tests.harness.fake_job import fake_job

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


def job_with(*trackers: str | TrackerEntry) -> Job:
    return replace(fake_job(), name="toy", trackers=trackers)


def test_trackers_that_are_not_there(tmp_path, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    with caplog.at_level(logging.WARNING, "autohet"):
        assert make_callbacks(job_with("wandb"), tmp_path) == ([], {})
        assert "Tracker wandb is off, since it is not installed" in caplog.text

        def init(**options):
            raise RuntimeError("no API key")

        monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
        assert make_callbacks(job_with("wandb"), tmp_path) == ([], {})
        assert (
            "Tracker wandb is off, since it cannot begin: RuntimeError: no API key" in caplog.text
        )


def fake_trackers(monkeypatch, calls):
    """Modules of all three that write down their calls, and refuse options that the real ones do
    not have.
    """

    def record(name, answer=None):
        def called(*arguments, **options):
            calls.append((name, arguments, options))
            return answer

        return called

    def init(
        *,
        project=None,
        name=None,
        group=None,
        tags=None,
        config=None,
        dir=None,
        id=None,
        resume=None,
    ):
        calls.append(("init", (), {**locals()}))
        return types.SimpleNamespace(id=id or "new", log=record("log"), finish=record("finish"))

    def start_run(run_id=None, *, run_name=None, tags=None):
        calls.append(("start_run", (), {"run_id": run_id, "run_name": run_name, "tags": tags}))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or "new"))

    writer = types.SimpleNamespace(
        add_scalar=record("add_scalar"), add_text=record("add_text"), close=record("close")
    )
    board = types.SimpleNamespace(SummaryWriter=lambda path: writer)
    monkeypatch.setitem(sys.modules, "tensorboardX", board)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    names = {
        name: record(name) for name in ("set_experiment", "log_metrics", "log_dict", "end_run")
    }
    client = types.SimpleNamespace(get_metric_history=lambda run_id, key: [])
    mlflow = types.SimpleNamespace(start_run=start_run, MlflowClient=lambda: client, **names)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    for variable in ("WANDB_PROJECT", "WANDB_NAME", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(variable, raising=False)


def named(calls, name):
    return [options for called, _, options in calls if called == name]


def test_a_tracker_has_the_jobs_names_and_the_whole_job(tmp_path, monkeypatch):
    calls = []
    fake_trackers(monkeypatch, calls)
    wandb = TrackerEntry(kind="wandb", project="p", name="n", group="g", tags=("a", "b"))
    mlflow = TrackerEntry(kind="mlflow", group="g", tags=("a",))
    _, ids = make_callbacks(job_with(wandb, mlflow), tmp_path)
    (init,) = named(calls, "init")
    assert (init["project"], init["name"], init["group"]) == ("p", "n", "g")
    assert (init["tags"], init["id"], init["resume"]) == (["a", "b"], None, "allow")
    assert init["config"]["training"] == job_with().to_document()["training"]
    (start,) = named(calls, "start_run")
    assert start == {"run_id": None, "run_name": "toy", "tags": {"a": "true", "group": "g"}}
    assert ("set_experiment", ("autohet",), {}) in calls
    assert ids == {"wandb": "new", "mlflow": "new"}


def test_a_trackers_own_environment_goes_before_what_the_job_leaves_out(tmp_path, monkeypatch):
    calls = []
    fake_trackers(monkeypatch, calls)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    make_callbacks(job_with("wandb", "mlflow"), tmp_path)
    (init,) = named(calls, "init")
    assert (init["project"], init["name"]) == (None, "toy")
    assert not named(calls, "set_experiment")


def test_a_run_that_goes_on_goes_on_in_its_trackers(tmp_path, monkeypatch):
    calls = []
    fake_trackers(monkeypatch, calls)
    make_callbacks(job_with("wandb", "mlflow"), tmp_path, {"wandb": "w1", "mlflow": "m1"})
    assert named(calls, "init")[0]["id"] == "w1"
    assert named(calls, "start_run")[0]["run_id"] == "m1"
    ids = TrackerIds(str(tmp_path / "storage"))
    assert ids.read(is_restart=True) == {}
    ids.write({"wandb": "w1"})
    assert ids.read(is_restart=True) == {"wandb": "w1"}
    assert ids.read(is_restart=False) == {}, "without a checkpoint the run begins anew"


def test_steps_rise_whatever_is_run_again(tmp_path, monkeypatch):
    calls = []
    fake_trackers(monkeypatch, calls)
    (callback,), _ = make_callbacks(job_with("wandb"), tmp_path)
    for step in (3, 4, 5, 4, 5, 6):
        callback.on_event({**STEP, "step": step})
    assert [options["step"] for options in named(calls, "log")] == [3, 4, 5, 5, 6]


def test_files_of_tensorboard_need_no_further_package(tmp_path):
    """Wrong: torch's writer, which imports the package that shows the files."""
    (callback,), _ = make_callbacks(job_with("tensorboard"), tmp_path)
    callback.on_event(STEP)
    callback.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"gradient_norm" in file.read_bytes()


def test_tensorboard_has_no_groups():
    with pytest.raises(ConfigError, match="trackers gives tensorboard the group 'g'"):
        TrackerEntry(kind="tensorboard", group="g")


def test_each_tracker_is_given_numbers_by_step_and_ended(tmp_path, monkeypatch):
    calls = []
    fake_trackers(monkeypatch, calls)
    followers, _ = make_callbacks(job_with("tensorboard", "wandb", "mlflow"), tmp_path)
    for callback in followers:
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
