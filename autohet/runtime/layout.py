"""From a plan to a layout: which worker holds which shard of the training state. The one place where planner and
recovery meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from transformers import PreTrainedConfig

from autohet.runtime.models import family_of, local_units, stage_parameter_names
from autohet.runtime.models.family import ParameterSpec
from planner.plan import Plan
from recovery.state.layout import Layout, ShardId, TensorSpec

STATE_KINDS = ("param", "exp_avg", "exp_avg_sq")


def state_name(kind: str, parameter: str) -> str:
    return f"{kind}/{parameter}"


def parameter_name(state: str) -> str:
    """The parameter that a tensor of state belongs to."""
    return state.split("/", 1)[1]


def tensor_specs(config: PreTrainedConfig) -> dict[str, TensorSpec]:
    """Every tensor of training state: fp32 masters and Adam's two moments."""
    specs = family_of(config).parameter_specs(config)
    return {
        state_name(kind, name): TensorSpec(state_name(kind, name), spec.shape, "float32", spec.split_dim, spec.cuts)
        for kind in STATE_KINDS
        for name, spec in specs.items()
    }


def held_units(plan: Plan, config: PreTrainedConfig) -> Iterator[tuple[str, str, ParameterSpec, tuple[int, ...]]]:
    """(worker, parameter name, its spec, units held) for all that the plan puts anywhere."""
    specs = family_of(config).parameter_specs(config)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            names = stage_parameter_names(config, stage.first_layer, stage.num_layers)
            for rank, worker in enumerate(stage.workers):
                for name in names:
                    yield worker, name, specs[name], local_units(specs[name], rank, stage.tp_degree)


def layout_of_plan(plan: Plan, config: PreTrainedConfig) -> Layout:
    """Which worker holds which shards under `plan`. Workers that hold the same share one set: pipelines are often alike."""
    specs = family_of(config).parameter_specs(config)
    known: dict[tuple[int, int, int, int], frozenset[ShardId]] = {}
    shards: dict[str, frozenset[ShardId]] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for rank, worker in enumerate(stage.workers):
                part = (stage.first_layer, stage.num_layers, rank, stage.tp_degree)
                if part not in known:
                    known[part] = _shards_of(specs, config, *part)
                shards[worker] = known[part]
    return Layout(tensor_specs(config), shards)


def _shards_of(
    specs: Mapping[str, ParameterSpec], config: PreTrainedConfig, first_layer: int, num_layers: int, rank: int, tp_degree: int
) -> frozenset[ShardId]:
    """What one rank of such a stage holds."""
    return frozenset(
        ShardId(state_name(kind, name), unit)
        for name in stage_parameter_names(config, first_layer, num_layers)
        for unit in local_units(specs[name], rank, tp_degree)
        for kind in STATE_KINDS
    )
