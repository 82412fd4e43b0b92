"""Description of a stage: its layers of a model, and its share of each of their parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import PreTrainedConfig

from autohet.runtime.models.family import Family
from autohet.runtime.models.layers.tensor_parallel import TensorParallel
from autohet.runtime.models.parameter_spec import WHOLE, ParameterSpec, local_units
from autohet.runtime.models.registry import held_specs
from planner.plans.plan import TensorShare


@dataclass(frozen=True)
class StageSpec:
    """Layers of a model that one worker computes, and its share of them; without weights.

    layers: the stage's blocks by their index in the model; the embedding comes with the first
    block, final norm and head with the last. tp: this rank of the stage's tensor-parallel group;
    None: the stage has one rank. dtype: what the stage computes in.
    """

    family: Family
    config: PreTrainedConfig
    layers: range
    tp: TensorParallel | None
    device: torch.device
    dtype: torch.dtype

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.family.num_layers(self.config)

    @property
    def tp_degree(self) -> int:
        return 1 if self.tp is None else self.tp.degree

    @property
    def share(self) -> TensorShare:
        return WHOLE if self.tp is None else self.tp.share

    @property
    def sequence_parts(self) -> int:
        """Equal parts of the sequence that the ranks have between cut parts."""
        if self.tp is None or not self.tp.cuts_sequence:
            return 1
        return self.tp.degree

    @cached_property
    def parameters(self) -> Mapping[str, ParameterSpec]:
        """Parameters of the whole model, by checkpoint name, and parts of quantized ones."""
        return {**self.family.parameter_specs(self.config), **held_specs(self.config)}

    def block_path(self, index: int) -> str:
        """Return the path of block `index` of this stage in the library's model."""
        return f"{self.family.layers}.{self.layers[index]}"

    def units(self, name: str) -> tuple[int, ...]:
        """Return the units of a parameter that this rank holds."""
        return local_units(self.parameters[name], self.share)

    def first_token(self, path: str) -> int:
        """Return the first row of the vocabulary that this rank holds of the table at `path`."""
        name = f"{path}.weight"
        first_unit = self.units(name)[0]
        return self.parameters[name].cuts[first_unit]
