"""Which gradients are summed over whom: layer by layer, over pipelines that are cut differently and may have unequal
TP degrees."""

from dataclasses import dataclass

from planner.cost.parameters import CostParameters
from planner.model_spec import ModelSpec
from planner.plan import Pipeline, Plan, Stage


@dataclass(frozen=True, slots=True)
class SyncJob:
    """One all-reduce of `num_bytes` over `members` (worker names, each once); `tied`: the shared embedding's own."""

    members: tuple[str, ...]
    num_bytes: float
    tied: bool = False


def sync_jobs(plan: Plan, spec: ModelSpec, parameters: CostParameters) -> tuple[SyncJob, ...]:
    """All-reduces of a step, bucketed by equal holder sets, in order of their first layer; groups of one worker are
    left out.

    A tensor is cut into U units, U the largest TP degree of the plan; a worker of a stage of TP degree t holds U / t
    of them.
    """
    units = max(stage.tp_degree for pipeline in plan.pipelines for stage in pipeline.stages)
    width = parameters.sync_bytes_per_parameter
    union = spec.tied_embeddings and parameters.tied_sync == "union"
    bytes_by_members: dict[tuple[str, ...], float] = {}
    entries = (spec.embedding, *spec.blocks, spec.head)
    for first, last in _runs(plan, spec.num_layers):
        replicated = sum(entry.replicated_parameters for entry in entries[first : last + 1])
        count = sum(entry.parameters for entry in entries[first : last + 1]) - replicated
        if first == 0 and union:
            count -= spec.tied_parameters
        if last == spec.num_layers + 1 and spec.tied_embeddings and not union and len(plan.pipelines[0].stages) > 1:
            count += spec.tied_parameters
        stages = [_stage_of(pipeline, first, spec.num_layers) for pipeline in plan.pipelines]
        _add(bytes_by_members, stages, units, count * width, replicated * width)
    jobs = [SyncJob(m, b) for m, b in bytes_by_members.items() if len(m) > 1 and b > 0]
    return tuple(jobs + _tied_jobs(plan, spec, units, width, union))


def _runs(plan: Plan, num_layers: int) -> list[tuple[int, int]]:
    """(first, last) entries that lie on the same stages everywhere; the embedding and the head are runs of their own."""
    starts = sorted({stage.first_layer + 1 for pipeline in plan.pipelines for stage in pipeline.stages})
    ends = [start - 1 for start in starts[1:]] + [num_layers]
    return [(0, 0), *zip(starts, ends, strict=True), (num_layers + 1, num_layers + 1)]


def _add(
    found: dict[tuple[str, ...], float], stages: list[Stage], units: int, split_bytes: float, replicated_bytes: float
) -> None:
    for unit in range(units):
        members = tuple(dict.fromkeys(stage.workers[unit * stage.tp_degree // units] for stage in stages))
        found[members] = found.get(members, 0.0) + (split_bytes + replicated_bytes) / units


def _tied_jobs(plan: Plan, spec: ModelSpec, units: int, width: float, union: bool) -> list[SyncJob]:
    if not spec.tied_embeddings:
        return []
    found: dict[tuple[str, ...], float] = {}
    ends = [(p.stages[0], p.stages[-1]) for p in plan.pipelines]
    groups = [[stage for pair in ends for stage in pair]] if union else [list(pair) for pair in ends]
    for stages in groups:
        _add(found, stages, units, spec.tied_parameters * width, 0.0)
    return [SyncJob(members, num_bytes, tied=True) for members, num_bytes in found.items() if len(members) > 1]


def _stage_of(pipeline: Pipeline, layer: int, num_layers: int) -> Stage:
    """The stage that holds entry `layer` (0 the embedding, 1.. the blocks, num_layers + 1 the head)."""
    if layer == 0:
        return pipeline.stages[0]
    if layer == num_layers + 1:
        return pipeline.stages[-1]
    return next(s for s in pipeline.stages if s.first_layer <= layer - 1 < s.end_layer)
