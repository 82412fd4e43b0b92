"""A damaged checkpoint is found without a traceback, or its damage changes nothing that anybody
reads; and no older step is called the newest.
"""

import pytest

from tests.harness.checkpoint_damage import Judge, damages, sample, small_storage


def test_sampled_flips_truncations_and_extensions_are_found_or_harmless() -> None:
    storage = small_storage()
    judge = Judge(storage)
    for damage in sample(storage, 600):
        judge.judge(damage)
    found = {key for key in judge.outcomes if key.endswith("flip found")}
    assert {key.split(":")[0] for key in found} == {
        "journal",
        "manifest.json",
        ".metadata",
        "data",
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_flip_truncation_and_extension_is_found_or_harmless() -> None:
    """Recorded by scripts/benchmarks/recovery/checkpoint_damage.py."""
    storage = small_storage()
    judge = Judge(storage)
    for damage in damages(storage):
        judge.judge(damage)
