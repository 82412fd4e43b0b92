"""Notices of several sources about one node become one."""

import pytest

from autohet.control.values.observation import Notice
from autohet.driver.sources.merge import NoticeMerger, merge_notices
from autohet.driver.sources.protocol import WatchedNode
from autohet.driver.sources.simple import RayDrains, Scripted

EC2 = Notice("n", "EC2 instance metadata: terminate", 10.0, 130.0)
DRAIN = Notice("n", "Ray is draining it", 11.0, 90.0)


def test_the_earliest_deadline_counts_and_the_first_sight_stays() -> None:
    assert merge_notices(None, [EC2, DRAIN]) == DRAIN
    assert merge_notices(EC2, [EC2, DRAIN]) == Notice("n", DRAIN.source, 10.0, 90.0)
    assert merge_notices(None, [Notice("n", "no deadline", 5.0), EC2]) == EC2


def test_later_news_updates_earlier_and_noise_does_not() -> None:
    sooner = Notice("n", EC2.source, 20.0, 60.0)
    assert merge_notices(EC2, [sooner]) == Notice("n", EC2.source, 10.0, 60.0)
    later = Notice("n", EC2.source, 20.0, 600.0)
    assert merge_notices(EC2, [later]) == Notice("n", EC2.source, 10.0, 600.0)
    assert merge_notices(EC2, [Notice("n", "Ray is draining it", 20.0, 129.5)]) is EC2
    assert merge_notices(EC2, []) is EC2
    assert merge_notices(EC2, [Notice("n", "Ray is draining it", 20.0)]) is EC2, (
        "who names no deadline contradicts none"
    )
    assert merge_notices(None, []) is None
    assert merge_notices(
        Notice("n", "no deadline", 5.0), [Notice("n", "no deadline", 6.0)]
    ) == Notice("n", "no deadline", 5.0)


def test_a_risk_stands_while_it_is_said_and_not_beside_a_departure() -> None:
    source = Scripted()
    board, nodes = NoticeMerger([source]), [WatchedNode("n", "r")]
    source.by_node["n"] = Notice("n", "rebalance", 1.0, risk=True)
    board.look(nodes, 1.0)
    assert board.departures == {}
    source.by_node["n"] = Notice("n", "rebalance", 2.0, risk=True)
    board.look(nodes, 2.0)
    assert board.risks["n"].seen_at == 1.0
    source.by_node["n"] = EC2
    board.look(nodes, 3.0)
    assert (board.risks, board.departures) == ({}, {"n": EC2})
    source.by_node.clear()
    board.look(nodes, 4.0)
    assert board.departures == {"n": EC2}, "silence withdraws nothing"
    board.look([], 5.0)
    assert board.departures == {}, "the node is gone"


def test_a_source_that_breaks_takes_no_other_with_it() -> None:
    class Broken(Scripted):
        def notices(self, nodes: object, now: float) -> list[Notice]:
            raise KeyError("anything")

    source = Scripted()
    source.by_node["n"] = EC2
    board = NoticeMerger([Broken(), source])
    board.look([WatchedNode("n", "r")], 0.0)
    assert board.departures == {"n": EC2}


def test_drains_that_cannot_be_read_stay_known() -> None:
    """Wrong: a node that Ray drains already is drained again, with another deadline."""
    answers = iter([{"ray-1": 60.0}])
    drains = RayDrains(lambda: next(answers))
    drains.notices([], 10.0)
    with pytest.raises(StopIteration):
        drains.notices([], 11.0)
    assert drains.known == {"ray-1": 70.0}
