"""Rounds: at every moment all workers hold one step that each of them has, whatever the others'
copies are doing.
"""

from hypothesis import given
from hypothesis import strategies as st

from recovery.peers.replication_rounds import Rounds, Turns


def test_a_round_holds_its_step_and_the_complete_one_until_it_is_complete_itself() -> None:
    rounds = Rounds(every=1)
    assert rounds.snapshot(1)
    assert not rounds.snapshot(2), "one is open"
    rounds.record_vote(pending=True, failed=False)
    assert (rounds.open, rounds.complete, rounds.held) == (1, None, {1})
    rounds.record_vote(pending=False, failed=False)
    assert rounds.complete == 1
    assert rounds.snapshot(3)
    assert rounds.held == {1, 3}
    rounds.record_vote(pending=False, failed=True)
    assert (rounds.complete, rounds.held) == (1, {1}), "given up: the complete one stays"


def test_rounds_keep_their_distance_and_none_means_none() -> None:
    rounds = Rounds(every=10)
    opened = []
    for step in range(1, 40):
        rounds.record_vote(pending=False, failed=False)
        if rounds.snapshot(step):
            opened.append(step)
    assert opened == [1, 11, 21, 31]
    assert not any(Rounds(every=0).snapshot(step) for step in range(20))


@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60))
def test_the_complete_step_never_leaves_the_held_ones(
    every: int, votes: list[tuple[bool, bool]]
) -> None:
    rounds = Rounds(every)
    newest = -1
    for step, (pending, failed) in enumerate(votes):
        rounds.record_vote(pending=pending, failed=failed)
        rounds.snapshot(step)
        assert len(rounds.held) <= 2
        assert rounds.complete is None or rounds.complete in rounds.held
        assert rounds.complete is None or rounds.complete >= newest, "it only rises"
        newest = newest if rounds.complete is None else rounds.complete


def test_turns_keep_their_distance_and_what_is_owed_is_taken_once_nobody_writes() -> None:
    turns = Turns(4)
    assert [step for step in range(1, 13) if turns.take(step, writing=False)] == [4, 8, 12]
    assert [step for step in range(13, 31) if turns.take(step, writing=16 <= step <= 25)] == [
        26,
        28,
    ]


def test_what_is_owed_is_taken_at_a_step_that_is_evaluated() -> None:
    """A checkpoint of another step would have no loss, and never be among the best."""
    turns = Turns(4, unit=2)
    taken = [step for step in range(1, 20) if turns.take(step, writing=4 < step <= 8)]
    assert taken == [4, 10, 12, 16]
    turns = Turns(4, unit=4)
    # Storing takes longer than the distance of two checkpoints.
    writes_until = 0
    taken = []
    for step in range(1, 40):
        if turns.take(step, writing=step <= writes_until):
            taken.append(step)
            writes_until = step + 5
    assert taken == [4, 12, 20, 28, 36]


@given(st.integers(1, 7), st.lists(st.booleans(), max_size=60))
def test_no_turn_is_taken_while_anybody_writes_and_none_is_forgotten(
    every: int, writing: list[bool]
) -> None:
    turns, waited = Turns(every), False
    for step, busy in enumerate(writing, 1):
        waited = waited or step % every == 0
        assert turns.take(step, writing=busy) == (waited and not busy)
        waited = waited and busy
