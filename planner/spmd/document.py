"""A stage's SPMD program as plans carry it: ratios of its workers, units of every axis,
instructions; strict JSON in and out.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planner.errors import ConfigError
from planner.inputs.documents import check_keys, is_integer, is_number, read_list, read_mapping
from planner.spmd.costs import Shares, round_to_units
from planner.spmd.graph import Graph
from planner.spmd.layouts import CONVERSIONS, TensorLayout, sharded
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
        units = tuple(placed.units_by_name.items())
        lines = [_line(instruction) for instruction in placed.program.instructions]
        return cls(placed.shares.ratios, units, tuple(lines))

    @property
    def storage(self) -> dict[str, TensorLayout]:
        """Layout of each leaf as a worker holds it."""
        found = {}
        for line in self.instructions:
            if line.startswith("load "):
                load = _parse(line, "the plan")
                found[load.tensor] = load.output
        return found

    @property
    def is_whole(self) -> bool:
        """True if every worker holds the whole training state."""
        for name, layout in self.storage.items():
            is_parameter = "." in name  # inputs and constants have none
            if is_parameter and layout.kind == "sharded":
                return False
        return True

    def to_document(self) -> dict[str, Any]:
        return {
            "ratios": [list(row) for row in self.ratios],
            "units": {axis: list(lengths) for axis, lengths in self.units},
            "program": list(self.instructions),
        }

    @classmethod
    def from_document(cls, document: object, what: str) -> "StageProgram":
        """ConfigError names what is wrong. Whether it is a program of some model: `place`."""
        spmd = read_mapping(document, what)
        check_keys(spmd, what, _KEYS, _KEYS)
        rows = []
        for row in read_list(spmd, "ratios", what):
            shares = _numbers(row, f"'ratios' of {what}", float)
            rows.append(tuple(map(float, shares)))
        units = read_mapping(spmd["units"], f"'units' of {what}")
        lines = read_list(spmd, "program", what)
        for line in lines:
            _parse(line, what)
        lengths = []
        for axis, row in units.items():
            numbers = _numbers(row, f"units of axis '{axis}'", int)
            lengths.append((axis, tuple(map(int, numbers))))
        return cls(tuple(rows), tuple(lengths), tuple(lines))

    def check(self, workers: Sequence[str], what: str) -> None:
        """Check that there is a share for each worker, and that the ratios round to the units.

        Raises:
            ConfigError: that is not so.
        """
        check_ratios(self.ratios, len(workers), what)
        units = []
        for axis, lengths in self.units:
            units.append(lengths)
            # the plan does not say which row of ratios cuts an axis, so either may
            rounded = [round_to_units(row, sum(lengths)) for row in self.ratios]
            if lengths not in rounded:
                raise ConfigError(
                    f"axis '{axis}' of {what} has units {list(lengths)}, which is not what its"
                    " ratios round to"
                )
        check_rounded(self.ratios, units, workers)

    def place(self, graph: Graph) -> PlacedProgram:
        """Return the program on a model's graph.

        Raises:
            ConfigError: it is no program of this graph.
        """
        instructions = [_parse(line, "the plan") for line in self.instructions]
        program = Program(tuple(instructions))
        shares = Shares(graph, self.ratios)
        try:
            program.check(graph)
            placed = PlacedProgram(graph, program, shares)
            units = placed.units_by_name
        except (AssertionError, KeyError) as error:
            raise ConfigError(
                f"the plan's program is none of this model at this microbatch: {error}"
            ) from None
        if units != dict(self.units):
            raise ConfigError("the plan's units are not those of this model's axes")
        return placed


def _line(instruction: Instruction) -> str:
    note = instruction.letter or instruction.variant
    head = instruction.op
    if note:
        head = f"{head}[{note}]"
    line = f"{head} {instruction.tensor}:{instruction.output}"
    if not instruction.inputs:
        return line
    inputs = " ".join(f"{name}:{layout}" for name, layout in instruction.inputs)
    return f"{line} <- {inputs}"


def _parse(line: object, what: str) -> Instruction:
    found = None
    if isinstance(line, str):
        found = _LINE.fullmatch(line)
    if found is None:
        raise ConfigError(
            f"{line!r} in 'program' of {what} is no instruction; one is written such as"
            " 'all_gather[padded] x:replicated <- x:sharded(0)'"
        )
    op, note, result, inputs = found.groups()
    if op not in ("load", "compute", *CONVERSIONS):
        raise ConfigError(f"'program' of {what} has the unknown instruction '{op}' in '{line}'")
    tensor, output = _property(result, what)
    letter = ""
    variant = ""
    if op == "compute":
        letter = note or ""
    else:
        variant = note or ""

    texts = inputs.split() if inputs else []
    properties = [_property(text, what) for text in texts]
    return Instruction(op, tensor, tuple(properties), output, letter, variant)


def _property(text: str, what: str) -> tuple[str, TensorLayout]:
    found = _LAYOUT.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"'{text}' in 'program' of {what} must be a tensor and its layout such as"
            " 'x:sharded(0)'"
        )
    name: str = found[1]
    kind: Any = found[2]
    if kind:
        return name, TensorLayout(kind)
    return name, sharded(int(found[3]))


def _numbers(row: object, what: str, kind: type[int] | type[float]) -> list[float]:
    """Return a row, checked to be a list of one or more numbers of a kind, none below 0.

    Raises:
        ConfigError: it is not.
    """
    names = "numbers"
    is_allowed = is_number
    if kind is int:
        names = "whole numbers"
        is_allowed = is_integer

    error = ConfigError(f"{what} must be a list of {names}, none below 0, not {row!r}")
    if not isinstance(row, list) or not row:
        raise error
    for value in row:
        # NaN is refused too, as it is not >= 0
        if not is_allowed(value) or not value >= 0:
            raise error
    return row
