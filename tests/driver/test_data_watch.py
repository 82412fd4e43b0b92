"""Nodes that prepare their data: waited for without a worker, shown, and refused where it is not
everybody's data.
"""

from dataclasses import replace

import pytest

from autohet.control.job_state import Waiting
from autohet.control.values.observation import NodeView
from autohet.driver.ray.data_watch import DataWatch, describe_preparation
from autohet.runtime.data.parts import divide
from autohet.runtime.facts.preparation import Preparation, shared_datasets
from autohet.runtime.job import Job
from autohet.runtime.messages import AgentEndpoint, DataState
from planner.inputs.fleet import Node
from tests.driver.test_controller import make, run, trained
from tests.harness.scripted_workforce import ScriptedWorkforce

READY = DataState(100, 100, "a" * 64, 10)


def job_of(source: object, cache: object = None, **document: object) -> Job:
    data = (
        {"source": str(source)} if cache is None else {"source": str(source), "cache": str(cache)}
    )
    training = {"global_batch_sequences": 2, "sequence_length": 15, "steps": 2}
    model = {"config": {"model_type": "gpt2"}}
    return Job.from_document({"model": model, "training": training, "data": data, **document})


class Preparing(ScriptedWorkforce):
    """Nodes named in `states` are in that state of preparation; `hired`: the workers that were
    started.
    """

    def __init__(self, kind) -> None:
        super().__init__(kind)
        self.states: dict[str, DataState] = {}
        self.hired: list[str] = []

    def hire(self, workers):
        self.hired += workers
        super().hire(workers)

    def observe(self):
        seen = super().observe()
        return replace(
            seen,
            nodes={n: replace(view, data=self.states.get(n)) for n, view in seen.nodes.items()},
        )


def test_no_worker_is_made_and_no_patience_spent_while_data_is_prepared():
    """Wrong: workers are started that wait for the data, and are taken for dead; or the job gives
    the fleet up meanwhile.
    """
    controller, force = make(nodes=2, workforce=Preparing(make()[1].kind))
    controller.memory.job = replace(
        controller.memory.job,
        elastic=replace(controller.memory.job.elastic, wait_for_fleet_s=3.0, min_workers=2),
    )
    force.states = {"small-0": READY, "small-1": DataState(10, 100)}
    for _ in range(100):  # 10 s
        controller.tick()
    assert isinstance(controller.state, Waiting)
    assert force.hired == ["small-0/0"]
    assert "1 node preparing the data" in controller.state.reason
    force.states["small-1"] = READY
    run(controller, trained(controller, 3))
    assert set(controller.memory.members) == {"small-0/0", "small-1/0"}
    assert sorted(force.hired) == ["small-0/0", "small-1/0"]


def test_data_that_is_wrong_ends_a_job_that_has_not_trained_in_one_sentence():
    controller, force = make(nodes=2, workforce=Preparing(make()[1].kind))
    force.states = {"small-0": READY, "small-1": DataState(error="a.jsonl, line 2: not valid JSON")}
    run(controller, lambda: controller.ended, ticks=30)
    assert not controller.ended.ok
    assert "a.jsonl, line 2" in controller.ended.reason


def test_a_later_node_with_other_data_is_left_out():
    controller, force = make(nodes=2, workforce=Preparing(make()[1].kind))
    force.states = {"small-0": READY, "small-1": READY}
    run(controller, trained(controller, 3))
    force.nodes["small-2"] = NodeView(
        Node("small-2", force.kind), force.now, AgentEndpoint("small-2", "here", 1, "token")
    )
    force.states["small-2"] = replace(READY, error="its data is not small-0's")
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    assert "small-2/0" not in force.hired
    told = [
        e["reason"]
        for e in controller.events.records
        if e["kind"] == "decision" and "small-2" in e["reason"]
    ]
    assert len(told) == 1


def test_unlike_data_is_said_of_every_node_but_the_first():
    """Wrong: only neighbours are compared; the reference goes with its node; equal data under
    another time is refused.
    """
    watch = DataWatch(job_of("corpus"))
    watch.judge({"b": READY, "c": DataState(5, 100)}, 0.0)
    assert all(state.error is None for state in watch.states.values())
    watch.judge(
        {"a": replace(READY, digest="f" * 64, num_rows=9), "c": replace(READY, done_bytes=7)}, 1.0
    )
    assert watch.states["c"].ready
    assert watch.states["a"].error is not None
    for part in ("not b's", "9 rows", "fff", "10 (aaa", "corpus"):
        assert part in watch.states["a"].error


def test_progress_is_told_now_and_then(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "autohet")
    watch = DataWatch(job_of("corpus"))
    for tick in range(100):
        watch.judge({"a": DataState(tick * 10**6, 10**8)}, tick * 0.25)
    assert [record.message for record in caplog.records] == [
        "Preparing the data on a: 0% of 100.0 MB",
        "Preparing the data on a: 40% of 100.0 MB, about 15 s left",
        "Preparing the data on a: 80% of 100.0 MB, about 5 s left",
    ]
    assert describe_preparation(DataState(), 0.0) == "looking at its files"


def wait_for(preparation: Preparation) -> DataState:
    preparation.thread.join(60)
    preparation.close()
    return preparation.state


def test_an_agent_prepares_its_nodes_data(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n" * 20)
    state = wait_for(Preparation(job_of(tmp_path / "a.txt", tmp_path / "cache")))
    assert state.ready
    assert (state.num_rows, len(state.digest)) == (12, 64)


def test_an_agent_tells_what_is_wrong_with_the_data(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("short")
    state = wait_for(Preparation(job_of(tmp_path / "a.txt", tmp_path / "cache")))
    assert not state.ready
    assert "fewer than one row" in state.error


def test_what_may_pass_is_tried_again(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text\n" * 20)
    tries = []
    monkeypatch.setattr("autohet.runtime.facts.preparation.PAUSE_S", 0.0)
    monkeypatch.setattr(
        "autohet.runtime.data.recipe.divide",
        lambda files: tries.append(1) or (1 / (len(tries) - 1) and divide(files)),
    )
    assert wait_for(Preparation(job_of(tmp_path / "a.txt", tmp_path / "cache"))).ready
    assert len(tries) == 2


def test_nodes_publish_beside_checkpoints_in_s3_alone():
    assert (
        shared_datasets(job_of("x", checkpoint={"storage": "s3://bucket/p/"}))
        == "s3://bucket/p/datasets"
    )
    assert shared_datasets(job_of("x", checkpoint={"storage": "/mnt/all"})) is None


def test_data_of_another_run_than_the_checkpoints_is_refused() -> None:
    watch = DataWatch(job_of("text"))
    watch.expected = "b" * 64
    watch.judge({"one": READY, "two": replace(READY, digest="b" * 64)}, 0.0)
    assert "data.source text are not those" in str(watch.states["one"].error)
    assert "checkpoint.allow_changes" in str(watch.states["one"].error)
    watch = DataWatch(job_of("text"))
    watch.expected = "a" * 64
    watch.judge({"one": READY, "two": DataState(1, 100)}, 0.0)
    assert watch.states["one"].error is None
    assert watch.states["two"].error is None
    assert watch.reference is not None
    assert watch.reference.digest == "a" * 64
