"""After a run has gone back, what it had written beyond that step is another history: newer, whole,
and never used.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from autohet.control.planning.agent_gc import AgentGc
from autohet.control.planning.orders import OrderBuilder
from recovery.errors import NotRestorable
from recovery.state.holdings import Holding, Source
from recovery.state.layout import Layout, ShardId
from tests.driver.test_orders import A, C, begin, make_book, observe, plan_of, sources, standing

WHOLE = plan_of([(4, C)])
BACK_TO = 5


@dataclass
class GoneBack:
    """Generation 1 had come to step 8 when generation 2 had to begin from step 5."""

    book: OrderBuilder
    layout: Layout
    agent_gc: AgentGc


@pytest.fixture
def gone_back() -> GoneBack:
    book, agent_gc = make_book(), AgentGc()
    first = begin(book, plan_of([(4, A)]), "a")
    layout = first[A].layout
    found = {"b": [copy("b", BACK_TO, 1, layout)]}
    second = book.write(2, WHOLE, observe("b", "c", inventories=found), (C,))
    assert second.start_step == BACK_TO
    agent_gc.begin(first)
    agent_gc.begin(second.orders)
    return GoneBack(book, layout, agent_gc)


def copy(
    node: str,
    step: int,
    generation: int,
    layout: Layout,
    shards: Iterable[ShardId] | None = None,
    kind: str = "memory",
) -> Holding:
    held = layout.shards if shards is None else frozenset(shards)
    return Holding(Source(kind, node, f"{node}/0", step, generation), held)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_the_newer_step_of_the_history_that_was_left_is_not_gone_on_from(
    gone_back: GoneBack, kind: str
) -> None:
    book, layout = gone_back.book, gone_back.layout
    kept = {"a": [copy("a", 8, 1, layout, kind=kind)], "b": [copy("b", 6, 2, layout)]}
    written = book.write(3, WHOLE, observe("a", "b", "c", inventories=kept), (C,))
    assert written.start_step == 6
    assert sources(written, C) == {("memory", "b", "b/0"): len(layout.shards)}


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_halves_of_one_step_from_two_histories_are_no_state(gone_back: GoneBack, kind: str) -> None:
    book, layout = gone_back.book, gone_back.layout
    shards = sorted(layout.shards)
    half = len(shards) // 2
    mixed = {
        "a": [copy("a", 6, 1, layout, shards[:half], kind)],
        "b": [copy("b", 6, 2, layout, shards[half:])],
    }
    with pytest.raises(NotRestorable):
        book.write(3, WHOLE, observe("a", "b", "c", inventories=mixed), (C,))
    old = {"a": [*mixed["a"], copy("a", BACK_TO, 1, layout)], "b": mixed["b"]}
    assert book.write(3, WHOLE, observe("a", "b", "c", inventories=old), (C,)).start_step == BACK_TO


def test_a_live_worker_that_missed_the_way_back_is_no_source(gone_back: GoneBack) -> None:
    """It was cut off while the others went back, and says that it stands at step 8."""
    book, layout = gone_back.book, gone_back.layout
    kept = {"b": [copy("b", 6, 2, layout)]}
    seen = observe("a", "b", "c", reports=[standing(A, 1, 8)], inventories=kept)
    written = book.write(3, WHOLE, seen, (A, C))
    assert written.start_step == 6
    assert A not in written.orders


def test_what_a_leaving_node_is_to_hand_over_is_of_the_present_history(gone_back: GoneBack) -> None:
    layout = gone_back.layout
    kept = [copy("a", 8, 1, layout), copy("b", 6, 2, layout)]
    ((node, ((source, shards),)),) = gone_back.agent_gc.only_copies(kept, {"a", "b"}).items()
    assert (node, source.step, source.generation) == ("b", 6, 2)
    assert set(shards) == layout.shards
