"""The seeded mutants (`scripts/benchmarks/quality/mutants.py`, which takes too long for here) still
change what they say they change.
"""

import ast
import functools
from collections import Counter
from pathlib import Path

import pytest
import yaml

from scripts.benchmarks.quality.mutant_patterns import PatternError, replace_statements

ROOT = Path(__file__).resolve().parents[2]

MUTANTS = yaml.safe_load((ROOT / "scripts/benchmarks/mutants.yaml").read_text())


@functools.cache
def dumped(text: str) -> str:
    return ast.dump(ast.parse(text))


def problem_of(mutant: dict[str, str]) -> str:
    """Return why a mutant is none any more; empty if it changes one place and its tests exist."""
    text = (ROOT / mutant["path"]).read_text()
    try:
        wrong = replace_statements(text, mutant["where"], mutant["old"], mutant["new"])
    except PatternError as error:
        return str(error)
    if ast.dump(ast.parse(wrong)) == dumped(text):
        return "it changes nothing"
    paths = [test.split("::")[0] for test in mutant["tests"] if "/" in test]
    return ", ".join(path for path in paths if not (ROOT / path).exists())


def test_every_mutant_changes_one_place_and_its_tests_are_there() -> None:
    problems = {mutant["name"]: problem_of(mutant) for mutant in MUTANTS}
    assert {name: problem for name, problem in problems.items() if problem} == {}


def test_every_mutant_has_a_name_of_its_own() -> None:
    assert set(Counter(mutant["name"] for mutant in MUTANTS).values()) == {1}


SOURCE = """
class Store:
    def put(self, name):
        # why
        if (name in self.names
                and self.open):
            raise KeyError(name)
        elif name:
            self.names.add(name)
"""


def test_pattern_ignores_formatting_and_keeps_an_open_body() -> None:
    wrong = replace_statements(
        SOURCE, "Store.put", "if name in self.names and self.open: ...", "if self.open: ..."
    )
    assert (  # noqa: PT018
        "if self.open:" in wrong
        and "raise KeyError(name)" in wrong
        and "self.names.add(name)" in wrong
    )


def test_pattern_reaches_an_elif() -> None:
    wrong = replace_statements(SOURCE, "Store.put", "if name: ...", "if False: ...")
    inner = ast.parse(wrong).body[0].body[0].body[0].orelse[0]  # type: ignore[attr-defined]
    assert (  # noqa: PT018
        ast.unparse(inner.test) == "False" and ast.unparse(inner.body[0]) == "self.names.add(name)"
    )


@pytest.mark.parametrize("old", ["if name not in self.names: ...", "raise KeyError()"])
def test_pattern_that_stands_nowhere_is_an_error(old: str) -> None:
    with pytest.raises(PatternError, match="0 places"):
        replace_statements(SOURCE, "Store.put", old, "pass")
