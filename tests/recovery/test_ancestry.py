"""Which copies are of one history: neither their steps nor the order of generations says it."""

import pytest

from recovery.state.ancestry import Ancestry, Descent


def ancestry(*entries: tuple[int, int | None, int]) -> Ancestry:
    return Ancestry().followed_by(
        *(Descent(generation=g, parent=p, first_step=s) for g, p, s in entries)
    )


LINE = ancestry((1, None, 0), (2, 1, 10), (3, 2, 14))
FORKED = ancestry((1, None, 0), (2, 1, 10), (3, 1, 8), (4, 3, 20))


@pytest.mark.parametrize(
    ("generation", "step", "belongs"),
    [
        (1, 10, True),
        (1, 11, False),
        (2, 11, True),
        (2, 14, True),
        (2, 15, False),
        (3, 99, True),
        (7, 3, False),
    ],
)
def test_of_each_generation_what_the_next_one_went_on_from(
    generation: int, step: int, belongs: bool
) -> None:
    assert LINE.contains(3, generation, step) is belongs


@pytest.mark.parametrize(
    ("generation", "step", "belongs"),
    [(2, 9, False), (2, 12, False), (1, 8, True), (1, 9, False), (3, 20, True)],
)
def test_a_generation_beside_the_line_is_never_of_it(
    generation: int, step: int, belongs: bool
) -> None:
    """Another driver took the job up from step 8: what generation 2 had written is older by number,
    and another's.
    """
    assert FORKED.contains(4, generation, step) is belongs


def test_a_line_that_goes_back_twice_keeps_the_lowest_step() -> None:
    assert not ancestry((1, None, 0), (2, 1, 10), (3, 2, 6)).contains(3, 1, 8)


def test_entries_that_are_damaged_lead_into_no_circle() -> None:
    circle = ancestry((1, 2, 0), (2, 2, 5))
    assert not circle.contains(2, 1, 0)
    assert not circle.contains(1, 2, 0)


def test_what_is_older_than_the_journal_is_contradicted_only_by_a_line_that_began_before_it() -> (
    None
):
    assert ancestry((5, None, 12)).begins_after(5, 12)
    assert not ancestry((5, None, 12)).begins_after(5, 13)
    assert Ancestry().newest is None


def test_a_generation_named_ahead_that_nobody_began_hides_no_later_step_of_its_parent() -> None:
    ahead = Descent(generation=2, parent=1, first_step=9, ahead=True)
    line = Ancestry().followed_by(Descent(generation=1, parent=None, first_step=0), ahead)
    assert line.contains(2, 1, 14), "its workers trained on"
    # The next one begins where they have come to.
    line = line.followed_by(Descent(generation=3, parent=2, first_step=14))
    assert line.contains(3, 1, 14)
    assert not line.contains(3, 1, 15)
