"""How long the driver waits between two rounds, and what it makes of all that was said meanwhile:
no Ray, and a fake clock.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest

from autohet.control.values.observation import Loss, NodeView, Notice
from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray import workers as ray_workers
from autohet.driver.ray import workforce as ray_workforce
from autohet.driver.ray.agents import node_agents as ray_agents
from autohet.driver.ray.agents.agent_calls import AgentReport
from autohet.driver.ray.cluster import RayNode
from autohet.driver.ray.ray_calls import RayCalls
from autohet.driver.ray.reports.newest_reports import LatestReport, Reports
from autohet.driver.ray.reports.silence import FreezeDetector
from autohet.driver.ray.tracked_nodes import TrackedNode
from autohet.driver.ray.worker_actor import WorkerActor
from autohet.driver.ray.workers import WorkerSettings
from autohet.driver.ray.workforce import BUSY_TICK_S, CALM_TICK_S, RayWorkforce
from autohet.runtime.job.elastic import ElasticSection
from autohet.runtime.messages import AgentEndpoint, Phase, StateTransfer, StepRecord, WorkerReport
from autohet.runtime.profiling import exact_products
from planner.inputs.fleet import Node, NodeType

KIND = NodeType("small", "A10G", 1, 24 << 30, 32e9, 3e9)
TRAINS = WorkerReport("a/0", 1, 1, Phase.TRAINING, 5, 1)


@dataclass
class FakeTime:
    """Stands for `time`, and for the wake-up that is waited for: waiting lets time pass unless it
    was called.
    """

    now: float = 0.0
    woken: bool = False

    def monotonic(self) -> float:
        return self.now

    def wait(self, timeout_s: float, gather_s: float) -> None:
        self.now = round(self.now + (0.0 if self.woken else max(0.0, timeout_s)), 6)
        self.woken = False

    def wake(self) -> None:
        self.woken = True

    def close(self) -> None:
        """Nothing was opened."""


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(ray_workforce, "time", fake)
    return fake


def make(fake: FakeTime, monkeypatch: pytest.MonkeyPatch, **elastic: Any) -> RayWorkforce:
    monkeypatch.setattr(ray_cluster, "head_address", lambda: "127.0.0.1")
    monkeypatch.setattr(ray_cluster, "living_nodes", list)
    monkeypatch.setattr(ray_cluster, "draining_nodes", dict)
    job: Any = SimpleNamespace(elastic=ElasticSection(**elastic))
    made = RayWorkforce(job, "run", Mock(), None, WorkerSettings(1), clock=fake.monotonic)
    made.observer.wake_up.close()
    made.observer.wake_up = fake  # type: ignore[assignment]
    return made


@pytest.fixture
def force(fake_time: FakeTime, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayWorkforce]:
    """Of one worker that trains."""
    made = make(fake_time, monkeypatch)
    monkeypatch.setattr(ray_workforce.ray, "kill", Mock())
    made.observer.worker_reports.answers = {"a/0": LatestReport(0.0, 0.0, TRAINS)}
    made.wait()
    yield made
    made.close(at_once=True)


def waited(force: RayWorkforce, fake: FakeTime) -> float:
    before = fake.now
    force.wait()
    return round(fake.now - before, 6)


def test_while_all_train_and_say_nothing_rounds_are_seldom(
    force: RayWorkforce, fake_time: FakeTime
) -> None:
    assert waited(force, fake_time) == CALM_TICK_S


@pytest.mark.parametrize(
    "what",
    [
        "restores",
        "starts",
        "lost",
        "leaves",
        "inventories",
        "agents are asked",
        "ends",
        "is suspected",
    ],
)
def test_while_anything_changes_rounds_are_quick(
    what: str, force: RayWorkforce, fake_time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "restores":
        force.observer.worker_reports.answers["a/0"].value = replace(TRAINS, phase=Phase.RESTORING)
    elif what == "starts":
        force.observer.worker_reports.answers["b/0"] = LatestReport(0.0)
    elif what == "lost":
        force.observer.losses["b/0"] = Loss("b/0", "gone", 0.0, 0.0)
    elif what == "leaves":
        force.observer.notices.departures["b"] = Notice("b", "EC2", 0.0)
    elif what == "ends":
        monkeypatch.setattr(Reports, "await_words", True)
    elif what == "is suspected":
        monkeypatch.setattr(FreezeDetector, "asked", True)
    elif what == "inventories":
        force.observer.inventories.request({}, 0.0)
    else:
        force.observer.agent_commands.refuse_copies("a", Mock())
    assert waited(force, fake_time) == BUSY_TICK_S


def test_the_workers_of_a_node_with_a_new_xid_check_their_devices_once(
    force: RayWorkforce,
) -> None:
    here, elsewhere = Mock(), Mock()
    force.observer.workers.update({"a/0": here, "b/0": elsewhere})
    report = AgentReport("a", AgentEndpoint("a", "127.0.0.1", 1, ""))
    for num_xids in (0, 2, 2, 3):
        report = replace(report, num_xids=num_xids)
        force.observer.agent_reports.answers["a"] = LatestReport(0.0, 0.0, report)
        force._check_devices()
    assert here.command.remote.call_args_list == 2 * [call(force.charge.epoch, "check_device")]
    elsewhere.command.remote.assert_not_called()


def test_a_worker_whose_device_fails_the_check_says_so_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = WorkerActor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    actor = build.__new__(build)
    actor._is_faulty = False
    actor._worker = Mock(report=lambda: TRAINS)
    for is_exact in (True, False, True):
        monkeypatch.setattr(exact_products, "has_exact_products", lambda *_, it=is_exact: it)
        before = actor._report()
        actor.check_device()
        assert actor._report().has_faulty_device == (before.has_faulty_device or not is_exact)
    assert actor._report().is_news_after(TRAINS)


def test_a_signal_ends_the_wait(force: RayWorkforce, fake_time: FakeTime) -> None:
    force.observer.stop_reason = "SIGTERM"
    assert waited(force, fake_time) == 0.0
    assert force.observe().stop_reason == "SIGTERM"
    assert waited(force, fake_time) == CALM_TICK_S, "once"


def step(number: int) -> StepRecord:
    return StepRecord(number, 1.0, 1.0, 64, 1.0, 1, float(number))


def test_all_that_was_said_since_the_last_round_is_told_once(force: RayWorkforce) -> None:
    copy, upload = (
        StateTransfer("peer", "a/0", 1, 5, 70, 0.5),
        StateTransfer("s3", "a/0", 1, 5, 90, 0.5),
    )
    last = replace(TRAINS, step=7, steps=(step(6),), receipts=("three",), transfers=(upload,))
    said = [
        replace(
            TRAINS, step=6, steps=(step(4), step(5)), receipts=("one", "two"), transfers=(copy,)
        ),
        last,
    ]
    force.observer.worker_reports.unread = [*said, replace(TRAINS, worker="gone/0")]
    force.observer.worker_reports.answers["a/0"].value = last
    told = force.observer.take_reports(0.0)
    assert told == {
        "a/0": replace(
            last,
            steps=(step(4), step(5), step(6)),
            receipts=("one", "two", "three"),
            transfers=(copy, upload),
        ),
    }
    assert force.observer.take_reports(1.0) == {
        "a/0": replace(last, steps=(), receipts=(), transfers=())
    }


def test_what_agents_have_handed_over_is_observed_once(
    force: RayWorkforce, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed_over = StateTransfer("peer", "a", 1, 5, 70, 0.5)
    monkeypatch.setattr(
        RayCalls,
        "take",
        lambda self, asked: [(asked.pop(call), handed_over) for call in list(asked)],
    )
    force.observer.agent_commands.hand_over({"a": Mock()}, {"a": ()}, ())
    assert force.observe().transfers == (handed_over,)
    assert force.observe().transfers == ()


def test_the_dead_say_nothing(force: RayWorkforce) -> None:
    force.observer.take_reports(0.0)
    force.observer.worker_reports.unread = [TRAINS]
    force.observer.losses["a/0"] = Loss("a/0", "gone", 0.0, 0.0)
    assert force.observer.take_reports(1.0) == {}
    force.observer.losses["a/0"] = Loss("a/0", "silent", 1.5, 0.0)
    assert force.observer.take_reports(2.0) == {}, "nor whose silence is what is wrong"


def test_last_words_of_one_found_dead_in_this_round_are_told_once(force: RayWorkforce) -> None:
    last = replace(TRAINS, step=7, steps=(step(6),))
    force.observer.take_reports(1.0)
    force.observer.worker_reports.unread = [last]
    force.observer.worker_reports.answers["a/0"].value = last
    force.observer.losses["a/0"] = Loss("a/0", "gone", 1.5, 0.0)
    assert force.observer.take_reports(1.5) == {"a/0": last}
    assert force.observer.take_reports(2.0) == {}


def track_node(force: RayWorkforce) -> None:
    """Of the node a, which Ray does not know."""
    force.observer.nodes["a"] = TrackedNode(
        RayNode("ab" * 28, "here", "a", 1, {}),
        NodeView(Node("a", KIND), 0.0, agent_started=False),
        "a",
    )


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("how", ["ray", "node"])
def test_last_words_are_told_with_the_loss(
    how: str, fails: bool, force: RayWorkforce, fake_time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may hold a vote that nobody else has seen; also where the round that found the loss has
    failed.
    """
    last = replace(TRAINS, vote=(5, "a vote"))
    force.observer.worker_reports.unread, force.observer.worker_reports.answers["a/0"].value = (
        [last],
        last,
    )
    if how == "ray":
        force.observer.worker_reports.answers["a/0"].error = "the actor died"
    else:
        track_node(force)
        force.observer.workers["a/0"] = Mock()
    if fails:
        with monkeypatch.context() as failing:
            failing.setattr(force.observer.notices, "look", Mock(side_effect=RuntimeError))
            with pytest.raises(RuntimeError):
                force.observe()
        fake_time.now += 1.0
    seen = force.observe()
    assert set(seen.losses) == {"a/0"}
    assert seen.reports == {"a/0": last}
    fake_time.now += 1.0
    force.observer.worker_reports.unread = [last]
    assert force.observe().reports == {}, "once"


@pytest.mark.parametrize("heartbeat_s", [None, 2.0, 0.5])
def test_workers_are_heard_often_enough_to_be_suspected_rightly(
    heartbeat_s: float | None, fake_time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(fake_time, monkeypatch, heartbeat_timeout_s=heartbeat_s)
    beat_s = made.observer.worker_reports.expect("a/0").beat_s
    made.observer.worker_reports.answers = {"a/0": LatestReport(0.0, 0.0, TRAINS)}
    made.wait()
    tick_s = waited(made, fake_time)
    made.close(at_once=True)
    assert 0 < 4 * beat_s <= made.observer.timeouts.suspicion_s
    assert tick_s <= beat_s, "and none of it is read too late"


@pytest.mark.parametrize(("phase", "reads"), [(Phase.TRAINING, 1), (Phase.RESTORING, 4)])
def test_ray_is_asked_for_its_nodes_seldom_while_all_train(
    phase: Phase,
    reads: int,
    force: RayWorkforce,
    fake_time: FakeTime,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Mock(return_value=[])
    monkeypatch.setattr(ray_cluster, "living_nodes", asked)
    monkeypatch.setattr(ray_cluster, "draining_nodes", dict)
    force.observer.worker_reports.answers["a/0"].value = replace(TRAINS, phase=phase)
    for _ in range(4):
        force.observe()
        force.observer.worker_reports.answers["a/0"].heard_at = fake_time.now
        fake_time.now += 0.25
    assert asked.call_count == reads


@pytest.mark.parametrize("actor", [ray_workers.WorkerActor, ray_agents.AgentActor])
def test_calls_that_watch_take_no_thread_from_others(actor: Any) -> None:
    """One that was cut off stays under way in the actor, beside the one that is made again."""
    assert actor.__ray_metadata__.method_meta.concurrency_group_for_methods["until_end"] == "life"
    assert actor._default_options["concurrency_groups"]["life"] == 1


class FakeActor:
    """Stands for an actor class and for its handle. The first that is made cannot be called."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def options(self, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(remote=self._make)

    def _make(self, *_: Any) -> Any:
        call = Mock(side_effect=None if self.made else RuntimeError("the GCS does not answer"))
        self.made.append(SimpleNamespace(until_end=SimpleNamespace(remote=call)))
        return self.made[-1]


def test_an_actor_that_cannot_be_watched_is_started_again(
    force: RayWorkforce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent's end is known by that alone: its silence means nothing."""
    workers, agents = FakeActor(), FakeActor()
    monkeypatch.setattr(ray_workers, "WorkerActor", workers)
    monkeypatch.setattr(ray_agents, "AgentActor", agents)
    force.observer.job.checkpoint = SimpleNamespace(memory_directory="m", local_directory="d")  # type: ignore[assignment]
    track_node(force)
    for start in (
        lambda: force.workers.hire(["a/0"]),
        lambda: force.node_agents.start_agents(["a"]),
    ):
        with pytest.raises(RuntimeError):
            start()
        start()
        start()  # it is there
    for actor in (workers, agents):
        assert [made.until_end.remote.call_count for made in actor.made] == [1, 1]
    assert force.observer.workers["a/0"] is workers.made[1]
    assert force.observer.nodes["a"].agent is agents.made[1]
