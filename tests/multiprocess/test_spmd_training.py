"""SPMD training on unequal shares against plain PyTorch in one process; a death in it:
tests/faults/test_deaths.py.
"""

import pytest

from tests.harness.processes import run_distributed
from tests.harness.spmd_training import one_process, train

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("experts", "llama"))]
)
def test_adam_steps_with_clipping_on_unequal_ratios_equal_one_process(name: str) -> None:
    losses, norms, _ = one_process(name, 6)
    assert min(norms) > 0.3  # clipping acts in every step
    for by_plan in run_distributed(train, 3, name, [None, 11, 12, 13], 6):
        for found_losses, found_norms, worst in by_plan:
            assert found_losses == pytest.approx(losses, rel=2e-5)
            assert found_norms == pytest.approx(norms, rel=2e-4)
            assert worst < 2e-4
