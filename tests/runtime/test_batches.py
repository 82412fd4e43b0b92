"""Batches that are read ahead are the batches, and the schedule's pattern is foreseen."""

from pathlib import Path

import pytest
import torch

from autohet.runtime.data import prepare_dataset
from autohet.runtime.job import DataSection
from autohet.runtime.step.batches import Batches


@pytest.fixture
def both(tmp_path: Path):
    (tmp_path / "a.txt").write_text("some text to be read\n" * 60)
    dataset = prepare_dataset(
        DataSection(source=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache")), 7
    )
    plain, ahead = (
        Batches(dataset, 3, 8, torch.device("cpu"), prefetch) for prefetch in (False, True)
    )
    yield plain, ahead
    ahead.close()
    ahead.close()


def equal(plain: Batches, ahead: Batches, step: int, part: range) -> None:
    for one, other in zip(plain(step, part), ahead(step, part), strict=True):
        assert torch.equal(one, other)


def test_every_part_but_those_of_the_first_step_is_foreseen(both) -> None:
    parts = [range(2, 4), range(4, 6), range(0, 2)]
    foreseen = 0
    for step in range(5):
        for part in parts:
            foreseen += (step, part) in both[1]._ahead
            equal(*both, step, part)
    # The second step's first part: nobody knew that the first step was over.
    assert foreseen == 4 * len(parts) - 1


def test_what_was_not_foreseen_is_read_all_the_same(both) -> None:
    """A plan that changes, a step that is run again, a job that goes back."""
    for step, part in [
        (0, range(2)),
        (1, range(2)),
        (1, range(2)),
        (7, range(4)),
        (2, range(1, 3)),
        (3, range(1, 3)),
        (0, range(2)),
    ]:
        equal(*both, step, part)
