"""Units of each parameter's state that the workers of an SPMD plan hold.

They are the units of pipelines, so that state moves between both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autohet.runtime.models.family import ParameterSpec
from planner.spmd.costs import round_to_units
from planner.spmd.document import StageProgram


def program_units(
    program: StageProgram, workers: Sequence[str], specs: Mapping[str, ParameterSpec]
) -> dict[str, list[tuple[str, int]]]:
    """Return worker -> (parameter name, unit) of all state that it holds."""
    storage = program.storage
    finest = min(
        (spec.num_units // spec.groups for spec in specs.values() if spec.split_dim is not None),
        default=1,
    )
    held: dict[str, list[tuple[str, int]]] = {worker: [] for worker in workers}
    for name, spec in specs.items():
        layout = storage[name]
        assert layout.kind != "sharded" or layout.dim == spec.split_dim, (
            f"{name} is not cut as its state: {layout}"
        )
        for rank, worker in enumerate(workers):
            units = (
                range(spec.num_units)
                if layout.kind != "sharded"
                else _units(program.ratios[-1], rank, spec, finest)
            )
            held[worker] += [(name, unit) for unit in units]
    return held


def _units(ratios: Sequence[float], rank: int, spec: ParameterSpec, finest: int) -> Sequence[int]:
    """Return the units within a rank's part.

    Parts are whole multiples of the finest slice into which every tensor can be cut.
    """
    assert spec.split_dim is not None
    size = spec.shape[spec.split_dim]
    lengths = round_to_units(ratios, finest)
    start, end = (sum(lengths[:last]) * size // finest for last in (rank, rank + 1))
    assert {start, end} <= {*spec.cuts}, (
        f"{spec.name}: a part from {start} to {end} cuts units apart"
    )
    cuts = spec.cuts
    units = range(spec.num_units)
    return tuple(unit for unit in units if start <= cuts[unit] and cuts[unit + 1] <= end)
