"""Which cases of a grid run in CI; the others are marked slow."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def one_of_each(cases: Iterable[Sequence[Any]]) -> list[Any]:
    """Leave one case of each first value unmarked, at another place of its list for each value."""
    by_first: dict[Any, list[Sequence[Any]]] = {}
    for case in cases:
        by_first.setdefault(case[0], []).append(case)
    found = []
    for number, group in enumerate(by_first.values()):
        for index, case in enumerate(group):
            found.append(_param(case, in_ci=index == number % len(group)))
    return found


def every_third(cases: Iterable[Any]) -> list[Any]:
    """Leave each third case unmarked, from the first."""
    return [_param((case,), in_ci=index % 3 == 0) for index, case in enumerate(cases)]


def first_two(cases: Iterable[Any]) -> list[Any]:
    """Leave the first two cases unmarked."""
    return [_param((case,), in_ci=index < 2) for index, case in enumerate(cases)]


def _param(case: Sequence[Any], *, in_ci: bool) -> Any:
    return pytest.param(*case, marks=() if in_ci else pytest.mark.slow)
