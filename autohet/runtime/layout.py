"""From a plan to a layout: which worker holds which shard of the training state. The one place
where planner and recovery meet.

Of a layer whose optimizer state is *sharded* (ZeRO-1, Rajbhandari et al. 2020, section 5.1;
`planner.redundancy.sharded_layers`), master and moments of a (parameter, unit) are kept by one of
those that compute with it, its *owner*. What the others compute with is made from the owner's
master before each step, and is no state. So a shard is the same in every layout, whatever is
sharded: snapshots, copies, checkpoints and restores need to know nothing of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from transformers import PreTrainedConfig

from autohet.runtime.models import family_of, local_units, stage_parameter_names
from autohet.runtime.models.family import EMBEDDING, HEAD, Family, ParameterSpec
from autohet.runtime.spmd.layout import program_units
from planner.plan import Plan, TensorShare
from planner.redundancy import EMBEDDING as EMBEDDING_LAYER
from planner.redundancy import HEAD as HEAD_LAYER
from planner.redundancy import sharded_layers
from recovery.state.layout import Layout, ShardId, TensorSpec

STATE_KINDS = ("param", "exp_avg", "exp_avg_sq")


def state_name(kind: str, parameter: str) -> str:
    return f"{kind}/{parameter}"


def parameter_name(state: str) -> str:
    """The parameter that a tensor of state belongs to."""
    return state.split("/", 1)[1]


def tensor_specs(config: PreTrainedConfig) -> dict[str, TensorSpec]:
    """Every tensor of training state: fp32 masters and Adam's two moments of what is trained."""
    specs = family_of(config).parameter_specs(config)
    return {
        state_name(kind, name): TensorSpec(
            state_name(kind, name), spec.shape, "float32", spec.split_dim, spec.cuts
        )
        for kind in STATE_KINDS
        for name, spec in specs.items()
        if spec.trainable
    }


def held_units(
    plan: Plan, config: PreTrainedConfig
) -> Iterator[tuple[str, str, ParameterSpec, tuple[int, ...]]]:
    """(worker, parameter name, its spec, units held) for all that is trained anywhere."""
    specs = family_of(config).parameter_specs(config)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            names = stage_parameter_names(config, stage.first_layer, stage.num_layers)
            trained = [name for name in names if specs[name].trainable]
            for rank, worker in enumerate(stage.workers):
                for name in trained:
                    yield worker, name, specs[name], local_units(specs[name], stage.share(rank))


def frozen_units(plan: Plan, config: PreTrainedConfig, worker: str) -> dict[str, tuple[int, ...]]:
    """Units of the parameters that `worker` computes with and nobody trains, by parameter; nothing
    where the plan does not have the worker.
    """
    specs = family_of(config).parameter_specs(config)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            if worker in stage.workers:
                share = stage.share(stage.workers.index(worker))
                names = stage_parameter_names(config, stage.first_layer, stage.num_layers)
                frozen = [name for name in names if not specs[name].trainable]
                return {name: local_units(specs[name], share) for name in frozen}
    return {}


def unit_holders(plan: Plan, config: PreTrainedConfig) -> dict[str, dict[int, tuple[str, ...]]]:
    """Parameter -> unit -> the workers that compute with it, sorted."""
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for worker, name, _, units in held_units(plan, config):
        for unit in units:
            found[name][unit].add(worker)
    return {
        name: {unit: tuple(sorted(held)) for unit, held in units.items()}
        for name, units in found.items()
    }


def unit_owners(
    plan: Plan, config: PreTrainedConfig, holders: Mapping[str, Mapping[int, tuple[str, ...]]]
) -> dict[tuple[str, int], str]:
    """The owner of each (parameter, unit) of sharded layers that several workers hold; of the
    others each holder keeps the state.

    holders: the plan's, of `unit_holders`. Of one set of holders each gets about as many scalars as
    the next, at most the largest unit more: largest first to whoever has the least (Graham 1969).
    Units stay whole: they are what state is stored and moved by.
    """
    family = family_of(config)
    specs, sharded = family.parameter_specs(config), sharded_layers(plan)
    by_holders: dict[tuple[str, ...], list[tuple[int, str, int]]] = defaultdict(list)
    for name, held in holders.items():
        if sharded.intersection(_layers_of(specs[name], family, config)):
            for unit, workers in held.items():
                if len(workers) > 1:
                    by_holders[workers].append((-unit_elements(specs[name], unit), name, unit))
    owners: dict[tuple[str, int], str] = {}
    for workers, units in by_holders.items():
        load = dict.fromkeys(workers, 0)
        for negative, name, unit in sorted(units):
            owner = min(workers, key=lambda worker: (load[worker], worker))
            load[owner] -= negative
            owners[name, unit] = owner
    return owners


def _layers_of(spec: ParameterSpec, family: Family, config: PreTrainedConfig) -> set[str]:
    """The planner's names of the layers that a parameter is part of; a tied embedding is the
    head's, too.
    """
    if spec.layer == EMBEDDING:
        tied = family.tied_head(config) and spec.name == f"{family.token_embedding}.weight"
        return {EMBEDDING_LAYER, HEAD_LAYER} if tied else {EMBEDDING_LAYER}
    return {HEAD_LAYER if spec.layer == HEAD else str(spec.layer)}


def unit_elements(spec: ParameterSpec, unit: int) -> int:
    """Scalars of one unit."""
    if spec.split_dim is None:
        return math.prod(spec.shape)
    return (
        math.prod(spec.shape)
        // spec.shape[spec.split_dim]
        * (spec.cuts[unit + 1] - spec.cuts[unit])
    )


def layout_of_plan(plan: Plan, config: PreTrainedConfig) -> Layout:
    """Which worker holds which shards under `plan`.

    Workers that hold the same share one set: pipelines are often alike.
    """
    specs = family_of(config).parameter_specs(config)
    if plan.spmd is not None:
        held = program_units(plan.spmd, plan.workers, specs)
        ids = {
            worker: [
                ShardId(state_name(kind, name), u) for name, u in units for kind in STATE_KINDS
            ]
            for worker, units in held.items()
        }
        return Layout(
            tensor_specs(config), {worker: frozenset(shards) for worker, shards in ids.items()}
        )
    owners = unit_owners(plan, config, unit_holders(plan, config)) if sharded_layers(plan) else {}
    known: dict[tuple[int, int, TensorShare], frozenset[ShardId]] = {}
    shards: dict[str, frozenset[ShardId]] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for rank, worker in enumerate(stage.workers):
                part = (stage.first_layer, stage.num_layers, stage.share(rank))
                if part not in known:
                    known[part] = _shards_of(specs, config, *part)
                shards[worker] = (
                    _without_others(known[part], owners, worker) if owners else known[part]
                )
    return Layout(tensor_specs(config), shards)


def _without_others(
    shards: frozenset[ShardId], owners: Mapping[tuple[str, int], str], worker: str
) -> frozenset[ShardId]:
    """What a worker keeps of what it computes with."""
    return frozenset(
        shard
        for shard in shards
        if owners.get((parameter_name(shard.tensor), shard.unit), worker) == worker
    )


def _shards_of(
    specs: Mapping[str, ParameterSpec],
    config: PreTrainedConfig,
    first_layer: int,
    num_layers: int,
    share: TensorShare,
) -> frozenset[ShardId]:
    """What one rank of such a stage computes with."""
    return frozenset(
        ShardId(state_name(kind, name), unit)
        for name in stage_parameter_names(config, first_layer, num_layers)
        if specs[name].trainable
        for unit in local_units(specs[name], share)
        for kind in STATE_KINDS
    )
