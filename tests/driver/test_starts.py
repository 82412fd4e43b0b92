"""Pods and machines that start: neither refused nor bought twice, and what is overdue is."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import requests
import yaml

from autohet.control.fleet import START_S, STUCK_S, UNSCHEDULABLE_S, on_their_way
from autohet.control.planning.buyer import LOOK_S
from autohet.control.values.observation import Launches, StartingNode, StartState
from autohet.driver.ray.requests import pods
from autohet.driver.ray.requests.launches import Attempts, LaunchWatch
from autohet.driver.ray.requests.pods import Pods, starting_node
from autohet.runtime.job import Job
from autohet.simulate.costs import Costs
from autohet.simulate.simulation import Scenario, TraceSimulation
from autohet.simulate.spot_trace import TraceEvent
from planner.inputs.cluster import Cluster, cluster_from_document
from tests.driver.test_buying import World, few, seen_of
from tests.driver.test_scaling import AWS
from tests.driver.test_simulation import CLUSTER, job_document

NO_ROOM = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
WORKER = {"ray.io/node-type": "worker", "ray.io/group": "g6e", "ray.io/cluster": "c"}


def pod(name: str = "c-g6e-worker-x", labels: dict[str, str] = WORKER, **status: Any) -> Any:
    """A pod as `GET /api/v1/namespaces/default/pods` has it."""
    return {"metadata": {"name": name, "labels": labels}, "status": status}


def condition(kind: str, status: str, **more: str) -> dict[str, str]:
    return {"type": kind, "status": status, **more}


UNSCHEDULABLE = condition("PodScheduled", "False", reason="Unschedulable", message=NO_ROOM)
SCHEDULED = condition("PodScheduled", "True")


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"name": "ray-worker", "state": {"waiting": {"reason": reason, "message": message}}}


@pytest.mark.parametrize(
    ("status", "state", "words"),
    [
        ({"phase": "Pending"}, "requested", ""),
        ({"conditions": [UNSCHEDULABLE]}, "unschedulable", NO_ROOM),
        ({"conditions": [UNSCHEDULABLE], "nominatedNodeName": "ip-10"}, "starting", ""),
        (
            {"conditions": [condition("PodScheduled", "False", reason="SchedulingGated")]},
            "unschedulable",
            "SchedulingGated",
        ),
        ({"conditions": [SCHEDULED]}, "starting", ""),
        (
            {"conditions": [SCHEDULED], "containerStatuses": [waiting("ContainerCreating")]},
            "starting",
            "",
        ),
        (
            {
                "conditions": [SCHEDULED],
                "containerStatuses": [waiting("ImagePullBackOff", "Back-off pulling image")],
            },
            "stuck",
            "ImagePullBackOff: Back-off pulling image",
        ),
        (
            {
                "conditions": [SCHEDULED],
                "initContainerStatuses": [waiting("CrashLoopBackOff")],
                "containerStatuses": [waiting("PodInitializing")],
            },
            "stuck",
            "CrashLoopBackOff",
        ),
        (
            {
                "conditions": [SCHEDULED, condition("Ready", "False")],
                "containerStatuses": [{"state": {"running": {}}}],
            },
            "starting",
            "",
        ),
    ],
)
def test_a_pods_state_is_what_its_conditions_say(
    status: dict[str, Any], state: str, words: str
) -> None:
    found = starting_node(pod(**status))
    assert found == StartingNode("c-g6e-worker-x", "g6e", StartState(state), 0.0, words)


def test_pods_that_have_joined_or_end_and_the_head_do_not_start() -> None:
    ready = pod(phase="Running", conditions=[SCHEDULED, condition("Ready", "True")])
    ended = pod(phase="Failed", conditions=[SCHEDULED])
    leaving = pod(conditions=[SCHEDULED])
    leaving["metadata"]["deletionTimestamp"] = "2026-11-28T00:00:00Z"
    head = pod(labels={**WORKER, "ray.io/node-type": "head"}, conditions=[UNSCHEDULABLE])
    assert [starting_node(each) for each in (ready, ended, leaving, head)] == [None] * 4


def test_a_head_without_the_right_to_list_pods_leaves_it_to_ray(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    answers: list[Any] = [{"items": [pod(conditions=[SCHEDULED])]}]
    client = Mock()
    client.return_value.get.side_effect = lambda path: answers[-1]
    monkeypatch.setattr(pods, "KubernetesHttpApiClient", client)
    (tmp_path / "namespace").write_text("team-a\n")
    monkeypatch.setattr(pods, "NAMESPACE", tmp_path / "namespace")
    monkeypatch.setattr(pods, "POLL_S", 0.01)
    watched = Pods("c")
    try:
        watched._watch.wait_for_first(10.0)
        assert [node.node_type for node in watched.starting() or ()] == ["g6e"]
        client.assert_called_once_with("team-a")
        client.return_value.get.side_effect = requests.HTTPError("403 Client Error: Forbidden")
        for _ in range(500):
            if watched.starting() is None:
                break
            watched._watch._asked.clear()
            watched._watch.wait_for_first(1.0)
        assert watched.starting() is None
    finally:
        watched.close()


@pytest.fixture
def aws() -> tuple[dict[str, Any], Cluster]:
    with open(AWS) as file:
        document = yaml.safe_load(file)
    return document, cluster_from_document(document)


class Kubernetes:
    """SIMULATED pods of one group, each with its seconds without room and until it is ready."""

    def __init__(self, *pods: tuple[float, float]) -> None:
        self._pods = pods
        self.now = 0.0

    def ready(self) -> list[str]:
        return [f"pod-{i}" for i, (_, ready_s) in enumerate(self._pods) if self.now >= ready_s]

    def starting(self) -> list[StartingNode]:
        found = []
        for index, (room_s, ready_s) in enumerate(self._pods):
            conditions = [UNSCHEDULABLE if self.now < room_s else SCHEDULED]
            if self.now >= ready_s:
                conditions.append(condition("Ready", "True"))
            found.append(starting_node(pod(f"pod-{index}", conditions=conditions)))
        return [node for node in found if node is not None]

    def attempts(self) -> Attempts:
        return Attempts(joined=dict.fromkeys(self.ready(), "g6e"))


def watch_for(world: World, kubernetes: Kubernetes, end_s: int) -> list[dict[str, int]]:
    """Let the world see these pods until `end_s`; return what it asked for, each time anew."""
    watch = LaunchWatch(kubernetes.attempts, lambda: "", kubernetes.starting)
    asked = [dict(world.counts)]
    for now in range(0, end_s, int(LOOK_S)):
        kubernetes.now = float(now)
        world.launches = watch.look(kubernetes.now)
        joined = len(kubernetes.ready())
        world.look(kubernetes.now, ("g5-floor-0/0",), g6e=joined, **{"g5-floor": 1})
        if world.counts != asked[-1]:
            asked.append(dict(world.counts))
    return asked


@pytest.mark.parametrize(
    ("room_s", "apart_s"), [(0.0, 0.0), (120.0, 0.0), (300.0, 20.0), (5.0, 60.0)]
)
def test_eight_pods_that_need_six_minutes_each_are_bought_once(
    aws: tuple[dict[str, Any], Cluster], room_s: float, apart_s: float
) -> None:
    """They get a machine after `room_s`, and one after the other is up, `apart_s` apart.

    Wrong: each pending pod is a failure per 120 s; and nodes that wait for the others are idle.
    """
    slow = [(room_s, 360.0 + index * apart_s) for index in range(8)]
    world = World(aws, {"g6e": 8, "g5-floor": 1})
    assert watch_for(world, Kubernetes(*slow), 660) == [{"g6e": 8, "g5-floor": 1}]
    assert (world.said, world.released) == ([], [])


def test_machines_that_need_six_minutes_each_are_bought_once_by_the_whole_controller() -> None:
    """SIMULATED time; nodes of another type can be had beside them.

    Wrong: what starts for two minutes has failed, and four small nodes are bought beside the seven.
    """
    kinds = ("big", "pair", "small")
    trace = [TraceEvent(0.0, "arrival", f"{kind}-{i}", kind) for kind in kinds for i in range(4)]
    job = Job.from_document(job_document(horizon_s=None, max_usd_per_hour=8.0))
    scenario = Scenario(job, CLUSTER, trace, 900.0, Costs(boot_s=360.0, process_start_s=5.0))
    found = TraceSimulation(scenario).run("local_first")
    assert found["steps"] > 0
    assert [round(machine["begin_s"]) for machine in found["machines"]] == [0] * 7


def test_a_pod_without_room_for_too_long_gives_way_to_other_nodes_with_the_reason(
    aws: tuple[dict[str, Any], Cluster],
) -> None:
    """Three of four have come: the plan that follows has them, and buys no GPU in their stead."""
    world = World(aws, {"g6e": 4, "g5-floor": 1})
    never = (1e9, 1e9)
    asked = watch_for(world, Kubernetes((9.0, 20.0), (9.0, 20.0), (9.0, 500.0), never), 600)
    assert len(asked) == 2
    assert asked[1]["g6e"] == 3
    (said,) = world.said
    assert f"no g6e can be had: Kubernetes has had no room for pod-3 for 8 minutes ({NO_ROOM})" in (
        said
    )


def starting(state: StartState, since: float, now: float) -> Any:
    document = {
        "cluster_name": "c",
        "provider": {"type": "aws", "region": "us-east-1"},
        "available_node_types": {
            "g6e": {"node_config": {"InstanceType": "g6e.12xlarge"}, "max_workers": 4}
        },
    }
    seen = seen_of(cluster_from_document(document), now)
    node = StartingNode("i-1", "g6e", state, since, "boots")
    return replace(seen, launches=Launches({}, starting=(node,), polled_at=now))


def test_patience_is_by_what_is_starting(aws: tuple[dict[str, Any], Cluster]) -> None:
    limits = {
        StartState.UNSCHEDULABLE: UNSCHEDULABLE_S,
        StartState.STUCK: STUCK_S,
        StartState.STARTING: START_S,
    }
    others = few(aws[0], p4d=0, g5=1)
    for state, limit_s in limits.items():
        for patience in (1.0, 3.0):
            for late_s, refused in ((-10.0, False), (10.0, True)):
                world = World(others, {"g6e": 4}, elastic={"patience": patience})
                now = patience * limit_s + late_s
                world.launches = starting(state, 0.0, now).launches
                world.look(now)
                assert bool(world.said) is refused, (state, patience, late_s)


def test_a_node_that_has_joined_since_the_poll_is_not_on_its_way() -> None:
    seen = starting(StartState.STARTING, 0.0, 100.0)
    assert len(on_their_way(seen, 1.0)) == 1
    (kind,) = seen_of_kind(seen)
    joined = replace(seen, nodes={"g6e-0": replace(kind, joined_at=101.0)})
    assert on_their_way(joined, 1.0) == []
    before = replace(seen, nodes={"g6e-0": replace(kind, joined_at=99.0)})
    assert len(on_their_way(before, 1.0)) == 1


def seen_of_kind(seen: Any) -> Any:
    document = yaml.safe_load(
        "{cluster_name: c, provider: {type: aws, region: us-east-1}, available_node_types:"
        " {g6e: {node_config: {InstanceType: g6e.12xlarge}, max_workers: 4}}}"
    )
    return seen_of(cluster_from_document(document), 0.0, g6e=1).nodes.values()
