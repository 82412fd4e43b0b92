"""Conversion of a plan to a layout: which worker holds which shards of the training state.

This is the one module where planner and recovery meet.

If the optimizer state of a layer is *sharded* (ZeRO-1, Rajbhandari et al. 2020, section 5.1;
`planner.plans.redundancy.sharded_layers`), only one worker keeps master and moments of a
(parameter, unit): its *owner*, one of those that compute with it. The other workers compute with
weights made from the owner's master before each step, which are no state. So a shard is the same in
every layout, with or without sharding, and snapshots, copies, checkpoints and restores do not
depend on sharding.

A matrix that Muon updates has one owner of all its units, whether its layer is sharded or not: its
update is a function of the whole matrix, and unlike GPUs would compute unlike bits of it. The owner
may lack some of the units among those that it computes with.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from transformers import PreTrainedConfig

from autohet.runtime.models.family import Family
from autohet.runtime.models.parameter_spec import EMBEDDING, HEAD, ParameterSpec, local_units
from autohet.runtime.models.quantized.weight import held_as
from autohet.runtime.models.registry import family_of, held_specs, stage_parameter_names
from autohet.runtime.spmd.layout import program_units
from planner.plans.muon import orthogonalization_flops
from planner.plans.plan import Plan, TensorShare
from planner.plans.redundancy import EMBEDDING as EMBEDDING_LAYER
from planner.plans.redundancy import HEAD as HEAD_LAYER
from planner.plans.redundancy import sharded_layers
from recovery.state.layout import Layout, ShardId, TensorSpec

STATE_KINDS = ("param", "exp_avg", "exp_avg_sq")
MUON_KINDS = STATE_KINDS[:2]
"""Kinds of state of a parameter that Muon updates: its master and its momentum."""
FROZEN = "frozen"
"""Kind of the weights that a run uses but does not train."""


def state_name(kind: str, parameter: str) -> str:
    return f"{kind}/{parameter}"


def state_kinds(spec: ParameterSpec) -> tuple[str, ...]:
    return MUON_KINDS if spec.uses_muon else STATE_KINDS


def parameter_name(state: str) -> str:
    """Return the parameter to which a tensor of state belongs."""
    return state.split("/", 1)[1]


def tensor_specs(config: PreTrainedConfig) -> dict[str, TensorSpec]:
    """Return every tensor of training state, by name.

    They are fp32 masters and moments of each trained parameter.
    """
    specs = family_of(config).parameter_specs(config)
    tensors = {}
    for kind in STATE_KINDS:
        for name, spec in specs.items():
            if spec.trainable and kind in state_kinds(spec):
                tensor = state_name(kind, name)
                tensors[tensor] = _tensor_spec(tensor, spec, "float32")
    return tensors


def _tensor_spec(name: str, spec: ParameterSpec, dtype: str) -> TensorSpec:
    """Return a tensor that is cut as the parameter that it belongs to."""
    return TensorSpec(name, spec.shape, dtype, spec.split_dim, spec.cuts)


def held_units(
    plan: Plan, config: PreTrainedConfig
) -> Iterator[tuple[str, str, ParameterSpec, tuple[int, ...]]]:
    """Yield (worker, parameter name, its spec, units held) for all trained parameters."""
    specs = family_of(config).parameter_specs(config)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            names = stage_parameter_names(config, stage.first_layer, stage.num_layers)
            trained = [name for name in names if specs[name].trainable]
            for rank, worker in enumerate(stage.workers):
                share = stage.share(rank)
                for name in trained:
                    spec = specs[name]
                    yield worker, name, spec, local_units(spec, share)


def frozen_units(
    plan: Plan, config: PreTrainedConfig, worker: str, *, with_first: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the units of untrained parameters that `worker` computes with, by `held_specs`' names.

    The result is empty if the plan does not have the worker. with_first: those of trained ones too,
    whose first values are frozen as DPO's reference.
    """
    specs = family_of(config).parameter_specs(config)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            if worker in stage.workers:
                share = stage.share(stage.workers.index(worker))
                names = stage_parameter_names(config, stage.first_layer, stage.num_layers)
                parts = [part for name in names for part in held_as(specs[name])]
                frozen = [part for part in parts if with_first or not part.trainable]
                return {part.name: local_units(part, share) for part in frozen}
    return {}


def frozen_layout(plan: Plan, config: PreTrainedConfig, dtype: torch.dtype) -> Layout:
    """Return the layout of the untrained parameters, which are no training state.

    Their names are `frozen/` and the parameter's. dtype: of all but those that are fp32 always.
    """
    tensors = {}
    for name, spec in held_specs(config).items():
        if not spec.trainable:
            tensor = state_name(FROZEN, name)
            stored = str(spec.compute_dtype(dtype)).removeprefix("torch.")
            tensors[tensor] = _tensor_spec(tensor, spec, stored)
    shards = {}
    for worker in plan.workers:
        held: set[ShardId] = set()
        for name, units in frozen_units(plan, config, worker).items():
            tensor = state_name(FROZEN, name)
            held.update(ShardId(tensor, unit) for unit in units)
        shards[worker] = frozenset(held)
    return Layout(tensors, shards)


def unit_holders(plan: Plan, config: PreTrainedConfig) -> dict[str, dict[int, tuple[str, ...]]]:
    """Return parameter -> unit -> the workers that compute with it, sorted."""
    found: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for worker, name, _, units in held_units(plan, config):
        for unit in units:
            found[name][unit].add(worker)
    holders: dict[str, dict[int, tuple[str, ...]]] = {}
    for name, by_unit in found.items():
        holders[name] = {unit: tuple(sorted(held)) for unit, held in by_unit.items()}
    return holders


def unit_owners(
    plan: Plan, config: PreTrainedConfig, holders: Mapping[str, Mapping[int, tuple[str, ...]]]
) -> dict[tuple[str, int], str]:
    """Return the owner of each (parameter, unit) of sharded layers that several workers hold.

    Muon's matrices have owners in all layers. Each holder of any other unit keeps its state.

    holders: the plan's, as `unit_holders` returns them. Within one set of holders, loads differ by
    at most the largest unit's scalars: the largest units go first to the holder with the least load
    (Graham 1969). Units stay whole, since state is stored and moved by units.
    """
    family = family_of(config)
    specs = family.parameter_specs(config)
    sharded = sharded_layers(plan)
    by_holders: dict[tuple[str, ...], list[tuple[int, str, int]]] = defaultdict(list)
    for name, held in holders.items():
        spec = specs[name]
        if spec.uses_muon or sharded.isdisjoint(_layers_of(spec, family, config)):
            continue
        for unit, workers in held.items():
            if len(workers) > 1:
                size = unit_elements(spec, unit)
                by_holders[workers].append((-size, name, unit))

    owners = _matrix_owners(plan, specs, holders)
    for workers, units in by_holders.items():
        load = dict.fromkeys(workers, 0)
        # Sizes are negative, so that the largest come first, and among equals the first names.
        for negative, name, unit in sorted(units):
            owner = min(workers, key=lambda worker: (load[worker], worker))
            load[owner] -= negative
            owners[name, unit] = owner
    return owners


def _matrix_owners(
    plan: Plan,
    specs: Mapping[str, ParameterSpec],
    holders: Mapping[str, Mapping[int, tuple[str, ...]]],
) -> dict[tuple[str, int], str]:
    """Return the owner of each (parameter, unit) of Muon's matrices that several workers hold.

    All units of a matrix have one owner; a unit of a stack holds whole matrices. The most expensive
    matrices go first, each to the holder that has the least to orthogonalize with it, relative to
    the share of the tensors that it computes with.
    """
    fractions: dict[str, float] = {}
    for stage in plan.stages:
        for rank, worker in enumerate(stage.workers):
            fractions[worker] = stage.share(rank).fraction
    matrices: list[tuple[float, str, list[int], list[str]]] = []
    for name, held in holders.items():
        spec = specs[name]
        if not spec.uses_muon:
            continue
        *stacked, rows, columns = spec.shape
        assert not stacked or spec.split_dim in (None, 0), f"{name} is cut inside its matrices"
        together = [[unit] for unit in held] if stacked else [list(held)]
        for units in together:
            workers = sorted(set().union(*(held[unit] for unit in units)))
            if len(workers) > 1:
                num_matrices = sum(unit_elements(spec, unit) for unit in units) / (rows * columns)
                flops = num_matrices * orthogonalization_flops(rows, columns)
                matrices.append((-flops, name, units, workers))

    owners: dict[tuple[str, int], str] = {}
    load: dict[str, float] = defaultdict(float)
    for negative, name, units, workers in sorted(matrices):
        ends = {worker: (load[worker] - negative) / fractions[worker] for worker in workers}
        owner = min(workers, key=lambda worker: (ends[worker], worker))
        load[owner] -= negative
        owners.update({(name, unit): owner for unit in units})
    return owners


def _layers_of(spec: ParameterSpec, family: Family, config: PreTrainedConfig) -> set[str]:
    """Return the planner's names of the layers that a parameter is part of.

    A tied embedding is part of the head, too.
    """
    if spec.layer == HEAD:
        return {HEAD_LAYER}
    if spec.layer != EMBEDDING:
        return {str(spec.layer)}
    is_tied = family.tied_head(config) and spec.name == f"{family.token_embedding}.weight"
    return {EMBEDDING_LAYER, HEAD_LAYER} if is_tied else {EMBEDDING_LAYER}


def unit_elements(spec: ParameterSpec, unit: int) -> int:
    """Return the number of scalars of one unit."""
    total = math.prod(spec.shape)
    if spec.split_dim is None:
        return total
    return total // spec.shape[spec.split_dim] * spec.unit_length(unit)


def layout_builder(config: PreTrainedConfig) -> Callable[[Plan], Layout]:
    """Return the function from a plan of this model to its layout.

    Imports the library's modules now, so that a decision imports nothing later.
    """
    family_of(config).parameter_specs(config)
    return partial(layout_of_plan, config=config)


def layout_of_plan(plan: Plan, config: PreTrainedConfig) -> Layout:
    """Return the layout of `plan`: the shards that each worker holds.

    Workers that hold the same shards share one set, since pipelines are often alike.
    """
    specs = family_of(config).parameter_specs(config)
    shards: dict[str, frozenset[ShardId]] = {}
    if plan.spmd is not None:
        held = program_units(plan.spmd, plan.workers, specs)
        for worker, units in held.items():
            own: set[ShardId] = set()
            for name, unit in units:
                own |= _shards_of_unit(specs[name], unit)
            shards[worker] = frozenset(own)
        return Layout(tensor_specs(config), shards)

    owners: dict[tuple[str, int], str] = {}
    if sharded_layers(plan) or any(spec.uses_muon for spec in specs.values()):
        owners = unit_owners(plan, config, unit_holders(plan, config))
    owned: dict[str, set[ShardId]] = defaultdict(set)
    for (name, unit), owner in owners.items():
        owned[owner] |= _shards_of_unit(specs[name], unit)
    known: dict[tuple[int, int, TensorShare], frozenset[ShardId]] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for rank, worker in enumerate(stage.workers):
                part = (stage.first_layer, stage.num_layers, stage.share(rank))
                if part not in known:
                    known[part] = _shards_of(specs, config, *part)
                shards[worker] = known[part]
                if owners:
                    kept = [each for each in known[part] if _unit_of(each) not in owners]
                    shards[worker] = frozenset(owned[worker].union(kept))
    return Layout(tensor_specs(config), shards)


def _shards_of_unit(spec: ParameterSpec, unit: int) -> set[ShardId]:
    """Return the shards of one unit of a trained parameter: its master and its moments."""
    return {ShardId(state_name(kind, spec.name), unit) for kind in state_kinds(spec)}


def _unit_of(shard: ShardId) -> tuple[str, int]:
    return parameter_name(shard.tensor), shard.unit


def _shards_of(
    specs: Mapping[str, ParameterSpec],
    config: PreTrainedConfig,
    first_layer: int,
    num_layers: int,
    share: TensorShare,
) -> frozenset[ShardId]:
    """Return the shards of the trained parameters that one rank of a stage computes with."""
    shards: set[ShardId] = set()
    for name in stage_parameter_names(config, first_layer, num_layers):
        spec = specs[name]
        if spec.trainable:
            for unit in local_units(spec, share):
                shards |= _shards_of_unit(spec, unit)
    return frozenset(shards)
