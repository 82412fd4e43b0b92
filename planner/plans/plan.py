"""Plan: pipelines, stages, placement and microbatches; strict JSON in and out (version 1)."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple, TypeVar, get_args

from planner.errors import ConfigError
from planner.inputs.documents import (
    Document,
    Json,
    check_keys,
    is_integer,
    read_bool,
    read_int,
    read_list,
    read_mapping,
    read_str,
)
from planner.spmd.document import StageProgram

VERSION = 1
_PLAN_KEYS = frozenset(
    {
        "version",
        "model",
        "global_batch_sequences",
        "microbatch_sequences",
        "sequence_length",
        "pipelines",
    }
)
_PIPELINE_KEYS = frozenset(
    {
        "num_microbatches",
        "microbatch_sequences",
        "last_microbatch_sequences",
        "in_flight",
        "stages",
    }
)
_STAGE_KEYS = frozenset({"first_layer", "num_layers", "workers"})
_OPTIONAL_STAGE_KEYS = (
    "recompute",
    "shard_optimizer",
    "tp_shares",
    "sequence_parallel",
    "offload_optimizer",
    "compute",
    "expert_dispatch",
    "spmd",
)
_NOT_BESIDE_SPMD = {
    "tp_shares": "a program has shares of its own",
    "sequence_parallel": "a program cuts sequences by rules of its own",
    "offload_optimizer": "programs keep their state on the GPU",
    "compute": "programs compute in the job's precision",
    "expert_dispatch": "programs cut experts by rules of their own",
}
"""Keys of a stage that a program excludes, and why."""
FINEST_TP_DEGREE = 8
"""Maximum number of parts into which tensor parallelism cuts a model.

If the model's heads allow fewer, it is the largest power of two that they allow.
"""
Recompute = Literal["none", "selective", "full", "offload"]
"""Recomputation of a block's activations in the backward pass.

none: all are kept. selective: the inner ones of attention and MLP are computed again. full: only
the block's input is kept. offload: the same, and the input waits in host memory.
"""
RECOMPUTE_CHOICES: tuple[Recompute, ...] = get_args(Recompute)
ComputeFormat = Literal["fp32", "bf16", "fp16", "fp8"]
"""Number format of a stage's matrix products and activations.

fp8: products in 8 bits, with activations and compute copies in bf16. Masters, moments and gradient
sums are fp32 in every format.
"""
COMPUTE_FORMATS: tuple[ComputeFormat, ...] = get_args(ComputeFormat)
ExpertDispatch = Literal["sum", "all_to_all"]
"""Way in which the tokens of a stage's group reach their experts.

sum: each rank computes its experts for all tokens, and a sum over the group adds their outputs.
all_to_all: each rank routes its part of the tokens and sends them to the owners of their experts.
"""
S = TypeVar("S", bound=str)
EXPERT_DISPATCHES: tuple[ExpertDispatch, ...] = get_args(ExpertDispatch)


class TensorShare(NamedTuple):
    """Slice of every cut tensor that one rank of a stage holds.

    The tensor has `of` equal parts; the rank holds those from `first` up to, not including, `end`.
    """

    first: int
    end: int
    of: int

    @property
    def fraction(self) -> float:
        return (self.end - self.first) / self.of

    def units(self, units: int) -> range:
        """Return the units that the slice overlaps if a tensor is cut into `units` units.

        If there are fewer units than parts, a unit counts as soon as the slice has some part of it.
        """
        first = self.first * units // self.of
        end = -(-self.end * units // self.of)  # rounded up
        return range(first, end)


@dataclass(frozen=True, slots=True)
class Stage:
    """Contiguous blocks on one tensor-parallel group.

    recompute: recomputation of its blocks. None: as the job says (`training.recompute`), which is
    also the meaning of a document without the field.
    shard_optimizer: master and moments of its layers are sharded: each worker keeps 1/|H| of a
    slice's, with H the workers of all pipelines that hold the slice (ZeRO-1, Rajbhandari et al.
    2020). It applies to all holders of such a layer, whatever their own stages say
    (`planner.plans.redundancy.sharded_layers`).
    tp_shares: number of parts of each worker, in order, of the tensors that tensor parallelism
    cuts. They add up to a power of two of at most FINEST_TP_DEGREE (2, 1, 1: half of the heads on
    the first of three). Empty: equal parts.
    spmd: program that its workers run on uneven shares, instead of equal slices.
    sequence_parallel: the workers of its tensor-parallel group have equal parts of the sequence in
    norms and residual sums.
    offload_optimizer: masters and moments are in host memory and are updated there (ZeRO-Offload,
    Ren et al. 2021). One stage says so for the whole plan: holders of a layer keep equal bits only
    if equal arithmetic updates them.
    expert_dispatch: way in which tokens reach the experts of its blocks. None: `sum`, which is also
    the meaning of a document without the field.
    """

    first_layer: int
    num_layers: int
    workers: tuple[str, ...]
    recompute: Recompute | None = None
    shard_optimizer: bool = False
    spmd: StageProgram | None = None
    tp_shares: tuple[int, ...] = ()
    sequence_parallel: bool = False
    offload_optimizer: bool = False
    compute: ComputeFormat | None = None
    expert_dispatch: ExpertDispatch | None = None

    @property
    def tp_degree(self) -> int:
        return len(self.workers)

    @property
    def num_parts(self) -> int:
        """Equal parts into which its tensors are cut: its TP degree, or the sum of its shares."""
        return sum(self.tp_shares) or len(self.workers)

    def share(self, rank: int) -> TensorShare:
        """Return the slice of each cut tensor that a rank holds."""
        if not self.tp_shares:
            return TensorShare(rank, rank + 1, len(self.workers))
        first = sum(self.tp_shares[:rank])
        return TensorShare(first, first + self.tp_shares[rank], self.num_parts)

    @property
    def end_layer(self) -> int:
        """Index just past the last block."""
        return self.first_layer + self.num_layers


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Pipeline of stages with one whole copy of the model.

    A step is `num_microbatches` microbatches of `microbatch_sequences` sequences.

    last_microbatch_sequences: sequences of the last one, where it is smaller; 0: it is like the
    others. most_in_flight: maximum number of microbatches of which each stage keeps activations at
    one time. Empty: 1F1B's numbers, one for the stage and one for each later one. Larger numbers
    let early stages work ahead (`planner.plans.in_flight`).
    """

    stages: tuple[Stage, ...]
    num_microbatches: int
    microbatch_sequences: int
    most_in_flight: tuple[int, ...] = ()
    last_microbatch_sequences: int = 0

    @property
    def num_sequences(self) -> int:
        whole = self.num_microbatches * self.microbatch_sequences
        last = self.last_microbatch_sequences
        return whole - self.microbatch_sequences + last if last else whole

    @property
    def sizes(self) -> list[int]:
        """Sequences of each microbatch."""
        size = self.microbatch_sequences
        last = self.last_microbatch_sequences or size
        return [*[size] * (self.num_microbatches - 1), last]

    @property
    def shape(self) -> str:
        """Human-readable microbatches."""
        last = self.last_microbatch_sequences
        more = f", the last of {last}" if last else ""
        return f"{self.num_microbatches} x {self.microbatch_sequences}{more}"

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(worker for stage in self.stages for worker in stage.workers)

    def stage_of(self, layer: int) -> Stage | None:
        """Return the stage that holds a block; None if no stage does."""
        for stage in self.stages:
            if stage.first_layer <= layer < stage.end_layer:
                return stage
        return None

    def in_flight(self, stage: int) -> int:
        """Return the maximum number of microbatches whose activations a stage keeps at once."""
        if self.most_in_flight:
            most = self.most_in_flight[stage]
        else:
            most = len(self.stages) - stage
        # a step of few microbatches cannot fill the pipeline
        return min(most, self.num_microbatches)


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole decision for one fleet.

    `microbatch_sequences` is the default of pipelines that name none.
    """

    model: str
    global_batch_sequences: int
    microbatch_sequences: int
    sequence_length: int
    pipelines: tuple[Pipeline, ...]

    @property
    def spmd(self) -> StageProgram | None:
        """The program of a plan of one stage that runs one."""
        return self.pipelines[0].stages[0].spmd

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Stages of all pipelines, in plan order."""
        return tuple(stage for pipeline in self.pipelines for stage in pipeline.stages)

    @property
    def first_stages(self) -> list[Stage]:
        """The first stage of each pipeline, which holds the embedding."""
        return [pipeline.stages[0] for pipeline in self.pipelines]

    @property
    def last_stages(self) -> list[Stage]:
        """The last stage of each pipeline, which holds the head."""
        return [pipeline.stages[-1] for pipeline in self.pipelines]

    @property
    def cuts(self) -> list[int]:
        """Sorted first layers of all stages: between two of them, layers lie on the same stages."""
        return sorted({stage.first_layer for stage in self.stages})

    @property
    def num_parts(self) -> int:
        """Maximum number of parts into which a stage cuts its tensors; 1 without stages."""
        return max((stage.num_parts for stage in self.stages), default=1)

    @property
    def depths(self) -> list[int]:
        """Numbers of stages that its pipelines have, ascending."""
        return sorted({len(pipeline.stages) for pipeline in self.pipelines})

    @property
    def tp_degrees(self) -> list[int]:
        """TP degrees of its stages, ascending."""
        return sorted({stage.tp_degree for stage in self.stages})

    @property
    def microbatch_sizes(self) -> list[int]:
        """Sequences that its pipelines have in a microbatch, ascending."""
        return sorted({pipeline.microbatch_sequences for pipeline in self.pipelines})

    @property
    def offloads(self) -> bool:
        """True if masters and moments are in host memory."""
        return any(stage.offload_optimizer for stage in self.stages)

    def with_offloading(self) -> "Plan":
        """Return the plan with masters and moments in host memory."""
        return self.map_stages(lambda stage: replace(stage, offload_optimizer=True))

    def map_pipelines(self, change: Callable[[Pipeline], Pipeline]) -> "Plan":
        """Return the plan with each pipeline changed; the plan itself if none is.

        Searches find what they know of stages by identity, so what is not changed stays the same.
        """
        pipelines = tuple(map(change, self.pipelines))
        return self if pipelines == self.pipelines else replace(self, pipelines=pipelines)

    def map_stages(self, change: Callable[[Stage], Stage]) -> "Plan":
        """Return the plan with each stage changed."""

        def change_all(pipeline: Pipeline) -> Pipeline:
            stages = tuple(map(change, pipeline.stages))
            return pipeline if stages == pipeline.stages else replace(pipeline, stages=stages)

        return self.map_pipelines(change_all)

    @property
    def workers(self) -> tuple[str, ...]:
        """Every worker, in plan order (pipeline, stage, TP rank)."""
        return tuple(chain.from_iterable(stage.workers for stage in self.stages))

    def to_document(self) -> Document:
        """The plan as the JSON document of the contract."""
        return {
            "version": VERSION,
            "model": self.model,
            "global_batch_sequences": self.global_batch_sequences,
            "microbatch_sequences": self.microbatch_sequences,
            "sequence_length": self.sequence_length,
            "pipelines": [self._pipeline_document(pipeline) for pipeline in self.pipelines],
        }

    def _pipeline_document(self, pipeline: Pipeline) -> Document:
        document: Document = {"num_microbatches": pipeline.num_microbatches}
        if pipeline.microbatch_sequences != self.microbatch_sequences:
            document["microbatch_sequences"] = pipeline.microbatch_sequences
        if pipeline.most_in_flight:
            document["in_flight"] = list(pipeline.most_in_flight)
        if pipeline.last_microbatch_sequences:
            document["last_microbatch_sequences"] = pipeline.last_microbatch_sequences
        document["stages"] = [_stage_document(stage) for stage in pipeline.stages]
        return document

    @classmethod
    def from_document(cls, document: object) -> "Plan":
        """Reads the contract's document; ConfigError names what is wrong.

        Whether the plan is whole: `check_plan`.
        """
        plan = read_mapping(document, "plan")
        check_keys(plan, "plan", _PLAN_KEYS, _PLAN_KEYS)
        if plan["version"] != VERSION:
            raise ConfigError(
                f"plan has version {plan['version']!r}; this program reads version {VERSION}"
            )
        microbatch = read_int(plan, "microbatch_sequences", "plan", 1)
        documents = read_list(plan, "pipelines", "plan")
        model = read_str(plan, "model", "plan")
        global_batch = read_int(plan, "global_batch_sequences", "plan", 1)
        sequence_length = read_int(plan, "sequence_length", "plan", 1)
        pipelines = [
            _read_pipeline(item, f"pipeline {index}", microbatch)
            for index, item in enumerate(documents)
        ]
        return cls(model, global_batch, microbatch, sequence_length, tuple(pipelines))

    def to_json(self) -> str:
        """The document as text, one key order for one plan."""
        return json.dumps(self.to_document())

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads `to_json`'s text; ConfigError where it is no JSON."""
        try:
            return cls.from_document(json.loads(text))
        except json.JSONDecodeError as error:
            raise ConfigError(f"the plan is not JSON: {error}") from None


def _stage_document(stage: Stage) -> Document:
    document: Document = {
        "first_layer": stage.first_layer,
        "num_layers": stage.num_layers,
        "workers": list(stage.workers),
    }
    # fields with their default are left out
    for key in _OPTIONAL_STAGE_KEYS:
        value = getattr(stage, key)
        if value:
            document[key] = list(value) if key == "tp_shares" else value
    if stage.spmd is not None:
        document["spmd"] = stage.spmd.to_document()
    return document


def _read_pipeline(document: object, what: str, microbatch_sequences: int) -> Pipeline:
    pipeline = read_mapping(document, what)
    check_keys(pipeline, what, _PIPELINE_KEYS, frozenset({"num_microbatches", "stages"}))
    if "microbatch_sequences" in pipeline:
        microbatch_sequences = read_int(pipeline, "microbatch_sequences", what, 1)
    last = 0
    if "last_microbatch_sequences" in pipeline:
        last = read_int(pipeline, "last_microbatch_sequences", what, 1)
        if last >= microbatch_sequences:
            raise ConfigError(
                f"'last_microbatch_sequences' of {what} is {last}; it must be less than"
                f" microbatch_sequences, {microbatch_sequences}, or left out"
            )
    stages = [
        _read_stage(item, f"stage {index} of {what}")
        for index, item in enumerate(read_list(pipeline, "stages", what))
    ]
    return Pipeline(
        stages=tuple(stages),
        num_microbatches=read_int(pipeline, "num_microbatches", what, 1),
        microbatch_sequences=microbatch_sequences,
        most_in_flight=_read_in_flight(pipeline, what) if "in_flight" in pipeline else (),
        last_microbatch_sequences=last,
    )


def _read_in_flight(pipeline: Json, what: str) -> tuple[int, ...]:
    numbers = read_list(pipeline, "in_flight", what)
    if not all(map(is_integer, numbers)):
        raise ConfigError(f"'in_flight' of {what} must be whole numbers, one for each stage")
    return tuple(numbers)


def _read_stage(document: object, what: str) -> Stage:
    stage: Json = read_mapping(document, what)
    check_keys(stage, what, _STAGE_KEYS.union(_OPTIONAL_STAGE_KEYS), _STAGE_KEYS)
    workers = read_list(stage, "workers", what)
    if not all(isinstance(worker, str) and worker for worker in workers):
        raise ConfigError(f"'workers' of {what} must be worker names such as 'node-0/1'")
    program = None
    if "spmd" in stage:
        for key, why in _NOT_BESIDE_SPMD.items():
            if stage.get(key):
                raise ConfigError(f"{what} has '{key}' and 'spmd'; {why}: drop '{key}'")
        program = StageProgram.from_document(stage["spmd"], f"'spmd' of {what}")
    return Stage(
        first_layer=read_int(stage, "first_layer", what, 0),
        num_layers=read_int(stage, "num_layers", what, 0),
        workers=tuple(workers),
        recompute=_read_choice(stage, "recompute", RECOMPUTE_CHOICES, what),
        shard_optimizer=_read_flag(stage, "shard_optimizer", what),
        spmd=program,
        tp_shares=_read_tp_shares(stage, len(workers), what),
        sequence_parallel=_read_sequence_parallel(stage, len(workers), what),
        offload_optimizer=_read_flag(stage, "offload_optimizer", what),
        compute=_read_choice(stage, "compute", COMPUTE_FORMATS, what),
        expert_dispatch=_read_choice(stage, "expert_dispatch", EXPERT_DISPATCHES, what),
    )


def _read_flag(stage: Json, key: str, what: str) -> bool:
    return key in stage and read_bool(stage, key, what)


def _read_sequence_parallel(stage: Json, num_workers: int, what: str) -> bool:
    if not _read_flag(stage, "sequence_parallel", what):
        return False
    if stage.get("recompute") == "selective":
        raise ConfigError(
            f"{what} has 'sequence_parallel' and 'recompute: selective'; drop one of them"
        )
    return num_workers > 1


def _read_tp_shares(stage: Json, num_workers: int, what: str) -> tuple[int, ...]:
    if "tp_shares" not in stage:
        return ()
    shares = read_list(stage, "tp_shares", what)
    are_counts = all(is_integer(share) and share > 0 for share in shares)
    if not are_counts or len(shares) != num_workers or FINEST_TP_DEGREE % sum(shares):
        raise ConfigError(
            f"'tp_shares' of {what} is {shares}; it must be a positive whole number for each of its"
            f" {num_workers} workers, which add up to a power of two of at most {FINEST_TP_DEGREE},"
            " such as [2, 1, 1]"
        )
    are_equal = len(set(shares)) == 1
    return () if are_equal else tuple(shares)


def _read_choice(stage: Json, key: str, choices: Sequence[S], what: str) -> S | None:
    """Return the choice that a key of a stage names; None if the stage has no such key."""
    if key not in stage:
        return None
    value = read_str(stage, key, what)
    for choice in choices:
        if value == choice:
            return choice
    raise ConfigError(f"'{key}' of {what} is '{value}'; expected one of {', '.join(choices)}")
