"""SIMULATED layout of a plan in few large shards.

Holders and bytes are as in the real layout. Parameters that are always held together (all that a
layer cuts alike, with the optimizer's two moments) are one tensor. A layer of Llama has 2 instead
of 27.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from itertools import accumulate

from transformers import PreTrainedConfig

from autohet.runtime.layout import STATE_KINDS, unit_elements
from autohet.runtime.models import family_of, local_units, stage_parameter_names
from autohet.runtime.models.family import ParameterSpec
from planner.plan import Plan, TensorShare
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
        together: dict[Hashable, list[ParameterSpec]] = {}
        specs = family_of(config).parameter_specs(config)
        self._trained = frozenset(name for name, spec in specs.items() if spec.trainable)
        for spec in (specs[name] for name in specs if name in self._trained):
            together.setdefault(_key(spec), []).append(spec)
        bundles = [_bundle(specs) for specs in together.values()]
        self._tensors = {bundle.tensor.name: bundle.tensor for bundle in bundles}
        names = zip(together.values(), bundles, strict=True)
        self._bundle_of = {spec.name: bundle for specs, bundle in names for spec in specs}
        self._known: dict[tuple[int, int, TensorShare], frozenset[ShardId]] = {}

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
        return Layout(self._tensors, {worker: held[worker] for worker in plan.workers})

    def _shards(self, first_layer: int, num_layers: int, share: TensorShare) -> frozenset[ShardId]:
        part = (first_layer, num_layers, share)
        if part not in self._known:
            names = stage_parameter_names(self._config, first_layer, num_layers)
            shards: set[ShardId] = set()
            for name in names:
                if name in self._trained:
                    bundle = self._bundle_of[name]
                    units = local_units(bundle.like, share)
                    shards.update(ShardId(bundle.tensor.name, unit) for unit in units)
            self._known[part] = frozenset(shards)
        return self._known[part]


def _key(spec: ParameterSpec) -> Hashable:
    """Return a key that is equal for parameters that every stage holds in the same units.

    Embedding and head have keys of their own, since a tied one is held twice.
    """
    return (
        (spec.layer, spec.split_dim is None, spec.num_units, spec.groups)
        if spec.layer >= 0
        else spec.name
    )


def _bundle(specs: list[ParameterSpec]) -> _Bundle:
    like = specs[0]
    sizes = [
        len(STATE_KINDS) * sum(unit_elements(spec, unit) for spec in specs)
        for unit in range(like.num_units)
    ]
    if like.split_dim is None:
        return _Bundle(TensorSpec(like.name, (sum(sizes),), "float32"), like)
    return _Bundle(
        TensorSpec(like.name, (sum(sizes),), "float32", 0, (0, *accumulate(sizes))), like
    )
