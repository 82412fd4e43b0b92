"""Every error of recovery's own crosses a process and says what happened."""

import pickle

import pytest

from recovery import errors
from recovery.state.holdings import Source
from recovery.state.layout import ShardId

SHARD = ShardId("param/layers.0.w", 3)
SOURCE = Source("memory", "n0", "n0/0", 5)
CASES = [
    errors.ShardUnavailable(SHARD, "n0", "gone"),
    errors.ShardCorrupt(SHARD, "n0", "checksum"),
    errors.PeerTimeout("n0:1", "reading", 2.0),
    errors.PeerUnreachable("n0:1", "refused"),
    errors.PeerRefused("n0:1", "token"),
    errors.SnapshotError("/dev/shm/x", "no space"),
    errors.SnapshotUncommitted("/dev/shm/x", "at work"),
    errors.Cancelled("s3://bucket/step"),
    errors.RestoreError("n0/0", ("a", "b", "c", "d", "e", "f"), ((SOURCE, SHARD),)),
    errors.NotRestorable(4, (SHARD,)),
    errors.NotRestorable(None, ()),
]


@pytest.mark.parametrize("error", CASES, ids=lambda error: type(error).__name__)
def test_pickles_with_all_that_it_says(error: errors.RecoveryError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_no_error_is_forgotten_here() -> None:
    defined = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert defined - {errors.RecoveryError} == {type(error) for error in CASES}


def test_long_lists_are_cut() -> None:
    assert str(CASES[8]) == "n0/0 cannot restore its state: a; b; c; d; e (and 1 more)"
    assert "param/layers.0.w[3]" in str(CASES[9])


def test_builtin_handlers_catch_them() -> None:
    assert isinstance(CASES[2], TimeoutError)
    assert isinstance(CASES[3], ConnectionError)
    assert isinstance(CASES[4], PermissionError)
