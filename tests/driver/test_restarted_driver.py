"""A driver that is started again: it goes on from what nodes keep, as far as the journal proves it,
and mixes no histories.
"""

from collections.abc import Iterable

import pytest

from autohet.control.planning.orders import Book, OrderBuilder
from autohet.control.values.observation import CheckpointState
from autohet.simulate.fleet.manifest import SimulatedManifest
from recovery.state.ancestry import Ancestry, Descent
from recovery.state.holdings import Holding, Source
from recovery.state.layout import Layout, ShardId
from tests.driver.test_orders import A, C, begin, make_book, observe, plan_of, sources

WHOLE = plan_of([(4, C)])


@pytest.fixture(scope="module")
def layout() -> Layout:
    return begin(make_book(), plan_of([(4, A)]), "a")[A].layout


def copy(
    kind: str, step: int, generation: int, shards: Iterable[ShardId], node: str = "b"
) -> Holding:
    return Holding(Source(kind, node, f"{node}/0", step, generation), frozenset(shards))


def restart(
    layout: Layout,
    entries: Iterable[tuple[int, int | None, int]],
    committed: tuple[int, int] | None,
    *kept: Holding,
) -> tuple[OrderBuilder, Book]:
    """A new driver's first orders. `committed`: generation and step of the newest checkpoint."""
    known = Ancestry().followed_by(
        *(Descent(generation=g, parent=p, first_step=s) for g, p, s in entries)
    )
    state = CheckpointState(ancestry=known)
    if committed is not None:
        manifest = SimulatedManifest(committed[1], committed[0], layout.shards)
        state = CheckpointState(committed[1], "s3://here", manifest, ancestry=known)
    book = make_book()
    seen = observe("b", "c", inventories={"b": list(kept)}, checkpoint=state)
    return book, book.write(book.newest_generation(seen) + 1, WHOLE, seen, ())


def test_a_copy_of_an_abandoned_generation_is_not_mixed_with_the_manifest_of_the_same_step(
    layout: Layout,
) -> None:
    """Two drivers took the job up from step 8, and both came to step 12; only the second one's was
    committed.
    """
    half = sorted(layout.shards)[: len(layout.shards) // 2]
    _, book = restart(
        layout, [(1, None, 0), (2, 1, 8), (3, 1, 8)], (3, 12), copy("disk", 12, 2, half)
    )
    assert book.start_step == 12
    assert sources(book, C) == {("s3", "", "s3://here"): len(layout.shards)}


def test_host_memory_that_is_newer_than_the_manifest_is_gone_on_from(layout: Layout) -> None:
    _, book = restart(layout, [(1, None, 0)], (1, 8), copy("memory", 11, 1, layout.shards))
    assert book.start_step == 11
    assert sources(book, C) == {("memory", "b", "b/0"): len(layout.shards)}
    assert (book.descent.parent, book.descent.first_step, book.descent.generation) == (1, 11, 2)


def test_host_memory_serves_a_run_that_has_not_committed_anything(layout: Layout) -> None:
    _, book = restart(layout, [(1, None, 0)], None, copy("memory", 3, 1, layout.shards))
    assert book.start_step == 3


def test_what_no_entry_names_is_never_gone_on_from_and_its_number_is_not_used_again(
    layout: Layout,
) -> None:
    """A driver that could not reach the journal wrote it, or another run."""
    _, book = restart(layout, [(1, None, 0)], (1, 8), copy("memory", 11, 2, layout.shards))
    assert (book.start_step, book.descent.generation) == (8, 3)


def test_without_a_journal_the_checkpoint_alone_counts(layout: Layout) -> None:
    _, book = restart(
        layout, [], (4, 8), copy("disk", 8, 4, layout.shards), copy("memory", 9, 4, layout.shards)
    )
    assert book.start_step == 8
    assert sources(book, C) == {("s3", "", "s3://here"): len(layout.shards)}
    assert (book.descent.parent, book.descent.generation) == (None, 5)


def test_where_the_newest_history_is_nowhere_whole_the_best_of_the_others_is_taken_alone(
    layout: Layout,
) -> None:
    half = sorted(layout.shards)[: len(layout.shards) // 2]
    entries = [(1, None, 0), (2, 1, 5)]
    _, book = restart(
        layout, entries, None, copy("memory", 7, 2, half), copy("memory", 9, 1, layout.shards)
    )
    assert (book.start_step, book.descent.parent) == (9, 1)


def test_nothing_anywhere_is_a_first_start(layout: Layout) -> None:
    _, book = restart(layout, [(1, None, 0)], None, copy("memory", 3, 1, sorted(layout.shards)[:2]))
    assert (book.start_step, book.schedule, book.descent.parent) == (0, None, None)
