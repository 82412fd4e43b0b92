"""Export of stacks of experts as tensors of single experts, as released checkpoints have them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from autohet.runtime.models.layers.experts import ExpertNames
from autohet.runtime.state.export_adapter import ExportedWeights
from recovery.state.layout import TensorSpec


@dataclass(frozen=True)
class _Place:
    """Source of an exported tensor: rows of one expert of a stack, or a whole parameter."""

    name: str
    expert: int | None = None
    first_row: int = 0


def split_experts(weights: ExportedWeights, names: ExpertNames) -> ExportedWeights:
    """Return the weights with each expert's matrices as tensors of their own.

    Memory: one stack at a time, since its experts are read in order.
    """
    specs: dict[str, TensorSpec] = {}
    places: dict[str, _Place] = {}
    for name, spec in weights.specs.items():
        experts = names.matrices(name, spec.shape[0])
        if experts is None:
            specs[names.stored_name(name)] = spec
            places[names.stored_name(name)] = _Place(name)
            continue
        rows = spec.shape[1] // len(experts[0])
        for expert, parts in enumerate(experts):
            for number, part in enumerate(parts):
                specs[part] = TensorSpec(part, (rows, spec.shape[2]), spec.dtype)
                places[part] = _Place(name, expert, number * rows)

    def tensors(wanted: Sequence[str]) -> Iterator[Tensor]:
        name = None
        held = None
        for each in wanted:
            place = places[each]
            if place.name != name:
                name = place.name
                (held,) = weights.read([place.name])
            assert held is not None
            if place.expert is None:
                yield held
            else:
                yield held[place.expert].narrow(0, place.first_row, specs[each].shape[0])

    return ExportedWeights(specs, tensors)
