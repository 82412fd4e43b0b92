"""SIMULATED layout of a plan in few large shards.

Holders and bytes are as in the real layout. Parameters that are always held together (all that a
layer cuts alike, with the optimizer's two moments) are one tensor. A layer of Llama has 2 instead
of 27.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from transformers import PreTrainedConfig

from autohet.runtime.facts.layout import state_kinds, unit_elements
from autohet.runtime.models.parameter_spec import ParameterSpec, local_units
from autohet.runtime.models.registry import family_of, stage_parameter_names
from planner.plans.plan import Plan, TensorShare
from recovery.state.layout import Layout, ShardId, TensorSpec


@dataclass(frozen=True)
class _Bundle:
    """Parameters that are held together; `like` determines the units that a rank holds."""

    tensor: TensorSpec
    like: ParameterSpec


class CoarseLayouts:
    """Maps plans to layouts of one model.

    Ranks with the same state share one set of shards, in all layouts.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config = config
        self._tensors: dict[str, TensorSpec] = {}
        self._bundle_of: dict[str, _Bundle] = {}
        """Bundle of each trained parameter, by the parameter's name."""
        self._known: dict[tuple[int, int, TensorShare], frozenset[ShardId]] = {}
        """Shards of (first layer, number of layers, share of the tensors)."""

        together: dict[Hashable, list[ParameterSpec]] = {}
        for spec in family_of(config).parameter_specs(config).values():
            if spec.trainable:
                together.setdefault(_key(spec), []).append(spec)

        for specs in together.values():
            bundle = _bundle(specs)
            self._tensors[bundle.tensor.name] = bundle.tensor
            for spec in specs:
                self._bundle_of[spec.name] = bundle

    @property
    def num_bytes(self) -> int:
        """Bytes of the training state: those of a checkpoint."""
        return Layout(self._tensors, {}).num_bytes

    def __call__(self, plan: Plan) -> Layout:
        held = {}
        for pipeline in plan.pipelines:
            for stage in pipeline.stages:
                for rank, worker in enumerate(stage.workers):
                    share = stage.share(rank)
                    held[worker] = self._shards(stage.first_layer, stage.num_layers, share)

        # A layout lists its workers in the order of the plan, as the real one does.
        in_order = {worker: held[worker] for worker in plan.workers}
        return Layout(self._tensors, in_order)

    def _shards(self, first_layer: int, num_layers: int, share: TensorShare) -> frozenset[ShardId]:
        part = (first_layer, num_layers, share)
        if part not in self._known:
            names = stage_parameter_names(self._config, first_layer, num_layers)
            shards: set[ShardId] = set()
            for name in names:
                # Frozen parameters are in no bundle: they are no training state.
                bundle = self._bundle_of.get(name)
                if bundle is not None:
                    units = local_units(bundle.like, share)
                    shards.update(ShardId(bundle.tensor.name, unit) for unit in units)
            self._known[part] = frozenset(shards)
        return self._known[part]


def _key(spec: ParameterSpec) -> Hashable:
    """Return a key that is equal for parameters that every stage holds in the same units.

    Embedding and head have keys of their own, since a tied one is held twice.
    """
    if spec.layer < 0:
        return spec.name
    is_whole = spec.split_dim is None
    return (spec.layer, is_whole, spec.num_units, spec.groups)


def _bundle(specs: list[ParameterSpec]) -> _Bundle:
    like = specs[0]
    # Offset of each unit's first element, and the end of the last one.
    offsets = [0]
    for unit in range(like.num_units):
        elements = [len(state_kinds(spec)) * unit_elements(spec, unit) for spec in specs]
        offsets.append(offsets[-1] + sum(elements))

    shape = (offsets[-1],)
    if like.split_dim is None:
        tensor = TensorSpec(like.name, shape, "float32")
    else:
        tensor = TensorSpec(like.name, shape, "float32", 0, tuple(offsets))
    return _Bundle(tensor, like)
