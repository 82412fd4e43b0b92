"""`autohet simulate --policies sky,one_region`: the supervisor of regions along a trace."""

from dataclasses import replace

import pytest

from autohet.runtime.job import Job
from autohet.simulate.regions import RegionWalk, Stay, only, regions_of, stay_seconds
from autohet.simulate.simulation import Scenario, TraceSimulation
from autohet.simulate.spot_trace import TraceEvent
from planner.errors import ConfigError
from planner.inputs.cluster import Cluster
from planner.inputs.fleet import NodeType
from planner.inputs.zones import ZoneLink, ZoneTable
from tests.driver.test_simulation import job_document

EAST, WEST = "us-east-1", "us-west-2"
ZONES = ZoneTable((((EAST, WEST), ZoneLink(1e9, 0.06, 0.02)),))
KIND = NodeType("east", "A10G", 1, 24 << 30, 1e10, 1e9, usd_per_hour=1.0, spot=True, max_nodes=2)
KINDS = {
    "east": replace(KIND, zone="us-east-1a"),
    "west": replace(KIND, name="west", zone="us-west-2b"),
}
CLUSTER = Cluster("regions", tuple(KINDS.values()), zones=ZONES)
PATIENCE_S = 600.0
GB = 10**9


def event(time_s: float, kind: str, node: str, gone_s: float = 0.0) -> TraceEvent:
    node_type = node.rpartition("-")[0]
    return TraceEvent(time_s, kind, node, node_type, gone_s or time_s)  # type: ignore[arg-type]


TRACE = (
    event(0.0, "arrival", "east-0"),
    event(0.0, "arrival", "west-0"),
    event(3000.0, "notice", "east-0", 3120.0),
    event(3120.0, "death", "east-0"),
    event(3800.0, "arrival", "west-1"),
    event(5000.0, "arrival", "east-1"),
)


def walk(**changes: object) -> RegionWalk:
    given = RegionWalk(
        TRACE,
        KINDS,
        ZONES,
        gpus_needed=1,
        patience_s=PATIENCE_S,
        checkpoint_bytes=100 * GB,
        end_s=9000.0,
    )
    return replace(given, **changes)  # type: ignore[arg-type]


def test_a_starved_region_is_left_after_the_jobs_patience() -> None:
    stays, (move,) = walk().stays()
    assert 3120.0 + PATIENCE_S <= move.at_s <= 3120.0 + PATIENCE_S + 60.0
    assert (move.source, move.target, move.copy_s) == (EAST, WEST, 100.0)
    assert move.usd == pytest.approx(2.0)
    assert stays == [Stay(EAST, 0.0, move.at_s), Stay(WEST, move.at_s + 100.0, 9000.0)]
    assert sum(stay_seconds(stays).values()) == pytest.approx(8900.0)


def test_only_nodes_of_the_present_region_are_had() -> None:
    """Wrong: a region's nodes are there before its checkpoint is, or those of both are paid for."""
    stays, (move,) = walk().stays()
    begun_s = move.at_s + move.copy_s
    seen = [(each.time_s, each.kind, each.node) for each in walk().events(stays)]
    assert seen == [
        (0.0, "arrival", "east-0"),
        (3000.0, "notice", "east-0"),
        (3120.0, "death", "east-0"),
        (begun_s, "arrival", "west-0"),
        (begun_s, "arrival", "west-1"),
    ]


def test_nodes_that_a_move_leaves_behind_are_terminated() -> None:
    """With two GPUs needed, the one that is left does not train and ends with the region."""
    trace = (event(0.0, "arrival", "east-0"), event(0.0, "arrival", "west-0"))
    needy = walk(trace=trace, gpus_needed=2)
    stays, moves = needy.stays()
    (death,) = [
        each
        for each in needy.events(stays)
        if each.kind == "death" and each.time_s == moves[0].at_s
    ]
    assert death.node == "east-0"


def test_a_trace_of_one_region_has_no_policy_of_regions() -> None:
    with pytest.raises(ConfigError, match="one region"):
        regions_of({"east": KINDS["east"]})
    with pytest.raises(ConfigError, match="whose region is unknown"):
        regions_of({"east": replace(KIND, zone="here")})
    with pytest.raises(ConfigError, match="no link between them"):
        walk(zones=ZoneTable()).stays()


def test_events_of_one_region() -> None:
    assert {each.node for each in only(TRACE, regions_of(KINDS), WEST)} == {"west-0", "west-1"}


@pytest.mark.thorough
def test_regions_train_more_than_the_best_of_them_alone() -> None:
    """East trains the first hour, west the second: both together train nearly both hours."""
    trace = (
        event(0.0, "arrival", "east-0"),
        event(3600.0, "death", "east-0"),
        event(3600.0, "arrival", "west-0"),
    )
    document = job_document(min_pipelines=1)
    document["elastic"] |= {"region_patience_s": 60.0}
    simulation = TraceSimulation(Scenario(Job.from_document(document), CLUSTER, trace, 7200.0))
    sky, alone = simulation.run("sky"), simulation.run("one_region")
    assert [(move["source"], move["target"]) for move in sky["moves"]] == [(EAST, WEST)]
    assert 1.6 < sky["tokens"] / alone["tokens"] < 2.0
    assert [each["region"] for each in alone["regions"]] == [EAST, WEST]
    assert sky["usd_by_use"]["between_regions"] == pytest.approx(sky["moves"][0]["usd"])
    assert sky["usd_in_all"] == pytest.approx(sum(sky["usd_by_use"].values()))
    assert sky["usd"] == pytest.approx(2.0, rel=0.05)
