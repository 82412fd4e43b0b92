"""The seeded mutants (`scripts/benchmarks/mutants.py`, which takes too long for here) still change what they say they change."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = yaml.safe_load((ROOT / "scripts/benchmarks/mutants.yaml").read_text())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant["name"])
def test_a_mutant_changes_one_place_and_its_tests_are_there(mutant: dict[str, str]) -> None:
    assert (ROOT / mutant["path"]).read_text().count(mutant["old"]) == 1
    assert mutant["new"] != mutant["old"]
    for test in mutant["tests"]:
        if "/" in test:
            assert (ROOT / test.split("::")[0]).exists()


def test_every_mutant_has_a_name_of_its_own() -> None:
    assert set(Counter(mutant["name"] for mutant in MUTANTS).values()) == {1}
