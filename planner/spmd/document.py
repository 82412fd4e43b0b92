"""A stage's SPMD program as plans carry it: ratios of its workers, units of every axis,
instructions; strict JSON in and out.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planner.documents import check_keys, read_list, read_mapping
from planner.errors import ConfigError
from planner.spmd.costs import Shares, round_to_units
from planner.spmd.graph import Graph
from planner.spmd.layouts import CONVERSIONS, TensorLayout
from planner.spmd.plan import PlacedProgram
from planner.spmd.program import Instruction, Program
from planner.spmd.ratios import check_ratios, check_rounded

_KEYS = frozenset({"ratios", "units", "program"})
_LINE = re.compile(r"(\w+)(?:\[(\w+)\])? (\S+)(?: <- (\S.*))?")
_LAYOUT = re.compile(r"(.+):(?:(replicated|partial|factored)|sharded\((\d+)\))")


@dataclass(frozen=True, slots=True)
class StageProgram:
    """SPMD program of a stage, as plans carry it.

    ratios: a row for data, and perhaps one for parameters; one number per worker.
    units: for each cut axis, the units of each worker.
    instructions: lines, the same on every worker.
    """

    ratios: tuple[tuple[float, ...], ...]
    units: tuple[tuple[str, tuple[int, ...]], ...]
    instructions: tuple[str, ...]

    @classmethod
    def of(cls, placed: PlacedProgram) -> "StageProgram":
        units = tuple((axis.name, row) for axis, row in placed.units.items())
        return cls(
            placed.shares.ratios, units, tuple(_line(i) for i in placed.program.instructions)
        )

    @property
    def storage(self) -> dict[str, TensorLayout]:
        """Layout of each leaf as a worker holds it."""
        loads = (line for line in self.instructions if line.startswith("load "))
        parsed = [_parsed(line, "the plan") for line in loads]
        return {instruction.tensor: instruction.output for instruction in parsed}

    @property
    def is_whole(self) -> bool:
        """True if every worker holds the whole training state."""
        return all(
            layout.kind != "sharded" for name, layout in self.storage.items() if "." in name
        )  # inputs and constants have none

    def to_document(self) -> dict[str, Any]:
        return {
            "ratios": [list(row) for row in self.ratios],
            "units": {axis: list(lengths) for axis, lengths in self.units},
            "program": list(self.instructions),
        }

    @classmethod
    def from_document(cls, document: object, what: str) -> "StageProgram":
        """ConfigError names what is wrong. Whether it is a program of some model: `placed`."""
        spmd = read_mapping(document, what)
        check_keys(spmd, what, _KEYS, _KEYS)
        rows = []
        for row in read_list(spmd, "ratios", what):
            rows.append(tuple(map(float, _numbers(row, f"'ratios' of {what}", float))))
        units = read_mapping(spmd["units"], f"'units' of {what}")
        lines = read_list(spmd, "program", what)
        for line in lines:
            _parsed(line, what)
        lengths = []
        for axis, row in units.items():
            numbers = _numbers(row, f"units of axis '{axis}'", int)
            lengths.append((axis, tuple(map(int, numbers))))
        return cls(tuple(rows), tuple(lengths), tuple(lines))

    def check(self, workers: Sequence[str], what: str) -> None:
        """ConfigError unless there is a share for each worker, and the units are those that the
        ratios round to.
        """
        check_ratios(self.ratios, len(workers), what)
        for axis, lengths in self.units:
            if len(lengths) != len(workers) or all(
                lengths != round_to_units(row, sum(lengths)) for row in self.ratios
            ):
                raise ConfigError(
                    f"axis '{axis}' of {what} has units {list(lengths)}, which is not what its"
                    " ratios round to"
                )
        check_rounded(self.ratios, [lengths for _, lengths in self.units], workers)

    def placed(self, graph: Graph) -> PlacedProgram:
        """The program on a model's graph; ConfigError where it is none of it."""
        program = Program(tuple(_parsed(line, "the plan") for line in self.instructions))
        shares = Shares(graph, self.ratios)
        try:
            program.check(graph)
            placed = PlacedProgram(graph, program, shares)
            same = {axis.name: row for axis, row in placed.units.items()} == dict(self.units)
        except (AssertionError, KeyError) as error:
            raise ConfigError(
                f"the plan's program is none of this model at this microbatch: {error}"
            ) from None
        if not same:
            raise ConfigError("the plan's units are not those of this model's axes")
        return placed


def _line(instruction: Instruction) -> str:
    note = instruction.letter or instruction.variant
    head = f"{instruction.op}[{note}]" if note else instruction.op
    inputs = " ".join(f"{name}:{layout}" for name, layout in instruction.inputs)
    return f"{head} {instruction.tensor}:{instruction.output}" + (f" <- {inputs}" if inputs else "")


def _parsed(line: object, what: str) -> Instruction:
    found = _LINE.fullmatch(line) if isinstance(line, str) else None
    if found is None:
        raise ConfigError(
            f"{line!r} in 'program' of {what} is no instruction; one is written such as"
            " 'all_gather[padded] x:replicated <- x:sharded(0)'"
        )
    op, note, result, inputs = found.groups()
    if op not in ("load", "compute", *CONVERSIONS):
        raise ConfigError(f"'program' of {what} has the unknown instruction '{op}' in '{line}'")
    tensor, output = _property(result, what)
    letter, variant = (note or "", "") if op == "compute" else ("", note or "")
    return Instruction(
        op,
        tensor,
        tuple(_property(text, what) for text in (inputs or "").split()),
        output,
        letter,
        variant,
    )


def _property(text: str, what: str) -> tuple[str, TensorLayout]:
    found = _LAYOUT.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"'{text}' in 'program' of {what} must be a tensor and its layout such as"
            " 'x:sharded(0)'"
        )
    kind: Any = found[2]
    return found[1], TensorLayout(kind) if kind else TensorLayout("sharded", int(found[3]))


def _numbers(row: object, what: str, kind: type[int] | type[float]) -> list[float]:
    allowed = (int,) if kind is int else (int, float)
    if (
        not isinstance(row, list)
        or not row
        or not all(isinstance(x, allowed) and not isinstance(x, bool) and x >= 0 for x in row)
    ):
        raise ConfigError(
            f"{what} must be a list of {'whole ' if kind is int else ''}numbers, none below 0, not"
            f" {row!r}"
        )
    return row
