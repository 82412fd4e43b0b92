"""GPU types from what NVML and PyTorch say of a device: its name, memory and multiprocessors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from planner.inputs.catalogue import canonical_gpu_type, read_rows

_MAKERS = {"NVIDIA", "GEFORCE", "TESLA", "GRID"}
"""Words at a name's begin that tell no device from another."""
_WORDS_LEFT_OUT = {"GENERATION", "EDITION", "GPU", "WITH", "DESIGN"}
_MIG = re.compile(r"\s+MIG\s+(?P<profile>\d+(?:c\.\d+)?g\.\d+gb\S*)$", re.IGNORECASE)
_WHOLE_CARD = 0.9
"""Drivers switch off up to a tenth of some cards' multiprocessors; fewer are a slice."""


@dataclass(frozen=True)
class _Row:
    """Row of data/gpu_names.csv."""

    pattern: re.Pattern[str]
    memory_gib: float | None
    multiprocessors: int
    gpu_type: str


@cache
def _rows() -> tuple[_Row, ...]:
    return tuple(map(_parse_row, read_rows("gpu_names.csv")))


def _parse_row(row: Mapping[str, str]) -> _Row:
    memory_gib = row["memory_gib"]
    return _Row(
        re.compile(row["pattern"], re.IGNORECASE),
        float(memory_gib) if memory_gib else None,
        int(row["multiprocessors"]),
        row["gpu_type"],
    )


def identify_gpu(name: str, memory_bytes: int, multiprocessors: int | None = None) -> str:
    """Return the catalogue's type of a device, or a type of its own for one it does not know.

    A MIG slice or another part of a card is a type of its own: it has not the card's speed.
    A device that the catalogue does not know keeps all words that tell it from others.
    """
    profile = _MIG.search(name)
    if profile:
        whole_name = name[: profile.start()]
        # a slice's memory does not tell which card it is of
        memory_gib = None
    else:
        whole_name = name
        memory_gib = memory_bytes / 2**30
    words = whole_name.replace("(TM)", "").split()
    while len(words) > 1 and words[0].upper() in _MAKERS:
        words.pop(0)
    model = " ".join(words)
    row = _row_of(model, memory_gib, whole_name)
    gpu_type = canonical_gpu_type(row.gpu_type if row else _join_words(model))

    if profile:
        return f"{gpu_type}-MIG-{profile['profile'].lower()}"
    if row is None or multiprocessors is None:
        return gpu_type
    is_whole = multiprocessors >= _WHOLE_CARD * row.multiprocessors
    return gpu_type if is_whole else f"{gpu_type}-{multiprocessors}SM"


def _row_of(model: str, memory_gib: float | None, name: str) -> _Row | None:
    """Return the matching row whose memory is nearest.

    memory_gib: None for a slice, whose card is known by its name alone.
    """
    matching: list[_Row] = []
    for row in _rows():
        # the first pattern that matches; its rows differ in memory
        is_same_pattern = not matching or row.pattern == matching[0].pattern
        if is_same_pattern and row.pattern.fullmatch(model):
            matching.append(row)
    if not matching:
        return None
    if memory_gib is None:
        said = re.search(r"(\d+)\s*GB?\b", name)
        memory_gib = float(said[1]) if said else matching[-1].memory_gib
    wanted = memory_gib or 0.0
    return min(matching, key=lambda row: abs((row.memory_gib or 0.0) - wanted))


def _join_words(model: str) -> str:
    """Join the distinguishing words of a model's name by hyphens."""
    kept = []
    for word in re.split(r"[\s/]+", model):
        bare = word.strip("()")
        if bare and bare.upper() not in _WORDS_LEFT_OUT:
            kept.append(bare)
    return "-".join(kept)
