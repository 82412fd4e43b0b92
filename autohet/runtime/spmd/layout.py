"""Units of each parameter's state that the workers of an SPMD plan hold.

They are the units of pipelines, so that state moves between both.
"""

from collections.abc import Mapping, Sequence

from autohet.runtime.models.parameter_spec import ParameterSpec
from planner.spmd.costs import round_to_units
from planner.spmd.document import StageProgram


def program_units(
    program: StageProgram, workers: Sequence[str], specs: Mapping[str, ParameterSpec]
) -> dict[str, list[tuple[str, int]]]:
    """Return worker -> (parameter name, unit) of all state that it holds."""
    storage = program.storage
    finest = 1
    cut = [spec for spec in specs.values() if spec.split_dim is not None]
    if cut:
        finest = min(spec.num_units // spec.groups for spec in cut)
    held: dict[str, list[tuple[str, int]]] = {worker: [] for worker in workers}
    for name, spec in specs.items():
        layout = storage[name]
        assert layout.kind != "sharded" or layout.dim == spec.split_dim, (
            f"{name} is not cut as its state: {layout}"
        )
        for rank, worker in enumerate(workers):
            units: Sequence[int] = range(spec.num_units)
            if layout.kind == "sharded":
                # The last ratios are those by which weights are cut.
                units = _units(program.ratios[-1], rank, spec, finest)
            held[worker] += [(name, unit) for unit in units]
    return held


def _units(ratios: Sequence[float], rank: int, spec: ParameterSpec, finest: int) -> Sequence[int]:
    """Return the units within a rank's part.

    Parts are whole multiples of the finest slice into which every tensor can be cut.
    """
    assert spec.split_dim is not None
    size = spec.shape[spec.split_dim]
    lengths = round_to_units(ratios, finest)
    slices_before = sum(lengths[:rank])
    slices_with = slices_before + lengths[rank]
    start = slices_before * size // finest
    end = slices_with * size // finest
    cuts = spec.cuts
    assert {start, end} <= set(cuts), f"{spec.name}: a part from {start} to {end} cuts units apart"
    units = [
        unit for unit in range(spec.num_units) if start <= cuts[unit] and cuts[unit + 1] <= end
    ]
    return tuple(units)
