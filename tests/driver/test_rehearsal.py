"""Scripted events: what cannot happen is found before anything is started; what is overtaken by
another event is left out.
"""

from dataclasses import replace

import pytest

from autohet.control.script import Script
from autohet.control.values.observation import NodeView, Notice, Observation
from autohet.driver.emulated.rehearsal import Rehearsal, check_script
from autohet.driver.sources.simple import Scripted
from autohet.runtime.job import ScriptedEvent
from autohet.runtime.messages import Phase, WorkerReport
from planner.errors import ConfigError
from planner.inputs.cluster import Cluster, cluster_from_document
from planner.inputs.fleet import Node
from tests.harness.fake_job import fake_job
from tests.harness.local_fleet import cluster_document

FIRST = {"big": 1, "small": 2}


def cluster() -> Cluster:
    return cluster_from_document(cluster_document(**FIRST))


def event(
    at_step: int, kind: str, node: str | None = None, node_type: str | None = None
) -> ScriptedEvent:
    return ScriptedEvent(at_step=at_step, event=kind, node=node, node_type=node_type)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            [event(3, "death", "small-2")],
            ("death at step 3", "'small-2'", "big-0, small-0, small-1"),
        ),
        ([event(3, "notice", node_type="smal")], ("'smal'", "big, pair, small")),
        ([event(3, "arrival", node_type="H100")], ("arrival at step 3", "'H100'")),
        ([event(3, "arrival", node_type="head")], ("'head'",)),
        ([event(3, "death", node_type="pair")], ("'pair'",)),
        (
            [event(9, "notice", "big-0"), event(3, "death", "big-0")],
            ("notice at step 9", "'big-0'", "dies at step 3"),
        ),
        ([event(3, "arrival", "small-1", "small")], ("'small-1'", "another name")),
        ([event(n, "death", node_type="small") for n in (1, 2, 3)], ("death at step 3", "'small'")),
    ],
    ids=[
        "no node",
        "no type",
        "arriving type",
        "head",
        "none of it",
        "dead",
        "name taken",
        "too many",
    ],
)
def test_events_that_cannot_happen(script: list[ScriptedEvent], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        check_script(script, cluster(), FIRST, 40)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_events_of_nodes_that_arrive_in_time_can_happen() -> None:
    script = [
        event(9, "freeze", "pair-0"),
        event(5, "arrival", node_type="pair"),
        event(12, "death", "pair-0"),
    ]
    script += [
        event(20, "arrival", "pair-0", "pair"),
        event(21, "notice", "pair-0"),
        event(1, "death", node_type="small"),
    ]
    check_script(script, cluster(), FIRST, 40)


def test_on_a_real_cluster_only_notices_and_deaths_of_its_types() -> None:
    check_script(
        [event(3, "death", "small-7"), event(4, "notice", node_type="big")], cluster(), None, 40
    )
    check_script([event(3, "death", "whatever")], None, None, 40)
    for impossible in (
        event(3, "arrival", node_type="big"),
        event(3, "freeze", "big-0"),
        event(3, "death", "huge-0"),
    ):
        with pytest.raises(ConfigError, match="step 3"):
            check_script([impossible], cluster(), None, 40)


def script_of(*events: ScriptedEvent) -> Script:
    job = fake_job()
    return Script(replace(job, elastic=replace(job.elastic, script=events)))


def test_an_event_of_a_node_that_has_gone_meanwhile_is_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kind = next(kind for kind in cluster().node_types if kind.name == "small")
    seen = Observation(0.0, {"small-0": NodeView(Node("small-0", kind), 0.0)})
    events = [
        event(1, "notice", "small-1"),
        event(2, "death", node_type="big"),
        event(3, "notice", "small-0"),
    ]
    script = script_of(*events)
    scripted, killed = Scripted(), list[str]()
    rehearsal = Rehearsal(None, scripted, killed.extend, lambda: 0.0)
    for step in range(5):
        for due in script.due(step, seen, ["small-0/0"]):
            rehearsal.happen(due)
    assert list(scripted.by_node) == ["small-0"]
    assert "no small-1 is there" in caplog.text
    assert "no node of type big" in caplog.text
    assert killed == []


def test_one_event_at_a_time_befalls_a_node_of_its_type_that_trains() -> None:
    kind = next(kind for kind in cluster().node_types if kind.name == "small")
    nodes = {f"small-{index}": NodeView(Node(f"small-{index}", kind), 0.0) for index in range(3)}
    reports = {f"{name}/0": WorkerReport(f"{name}/0", 7, 1, Phase.TRAINING, 4, 1) for name in nodes}
    seen = Observation(0.0, nodes, {"small-1": Notice("small-1", "EC2", 0.0)}, reports)
    script = script_of(event(3, "freeze", node_type="small"), event(3, "death", "small-2"))
    members = ["small-0/0", "small-1/0"]
    assert script.due(2, seen, members) == []
    (freeze,) = script.due(4, seen, members)
    assert (freeze.node, freeze.there, dict(freeze.processes)) == (
        "small-0",
        True,
        {"small-0/0": 7},
    )
    assert [due.node for due in script.due(4, seen, members)] == ["small-2"]
    assert script.due(4, seen, members) == []
