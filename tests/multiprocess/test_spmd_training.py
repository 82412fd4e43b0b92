"""SPMD training on unequal shares against plain PyTorch in one process; a death in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.processes import run_distributed
from tests.harness.spmd_training import one_process, run_with_a_death, train

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(200)]


@pytest.mark.parametrize("name", ["mlp", "experts", "llama"])
def test_adam_steps_with_clipping_on_unequal_ratios_equal_one_process(name: str) -> None:
    losses, norms, _ = one_process(name, 6)
    assert min(norms) > 0.3  # clipping acts in every step
    for by_plan in run_distributed(train, 3, name, [None, 11, 12, 13], 6, timeout_s=180):
        for found_losses, found_norms, worst in by_plan:
            assert found_losses == pytest.approx(losses, rel=2e-5)
            assert found_norms == pytest.approx(norms, rel=2e-4)
            assert worst < 2e-4


def test_a_death_takes_no_step_and_reads_nothing_from_durable_storage(tmp_path: Path) -> None:
    losses, _, _ = one_process("mlp", 6)
    found = run_with_a_death(tmp_path, 4, "mlp", 2, 3, 6)
    assert sorted(found) == [0, 1, 3]
    for of_rank, _ in found.values():
        assert of_rank == pytest.approx(losses, rel=2e-5)
    tiers = [tier for _, tier in found.values()]
    assert sum(tier["s3"] for tier in tiers) == 0
    assert sum(tier["peer"] + tier["memory"] for tier in tiers) > 0
