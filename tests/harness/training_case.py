"""What a pool process does in a training case: build its part of a generation, train, be disturbed,
show its state.
"""

import functools
import itertools
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.distributed import TCPStore

from autohet.runtime.data import TokenDataset
from autohet.runtime.facts.layout import frozen_units, layout_of_plan
from autohet.runtime.groups import GenerationGroups, GlooGroup, Group, GroupTimeouts, PeerLost
from autohet.runtime.job import AdapterSection, ModelSection, TrainingSection
from autohet.runtime.messages import EvaluationRecord
from autohet.runtime.models.config import load_config
from autohet.runtime.models.family import COMPUTE_DTYPES
from autohet.runtime.models.initialization import initial_parameters
from autohet.runtime.models.parameter_spec import take_units
from autohet.runtime.models.quantized.weight import quantize
from autohet.runtime.models.registry import family_of, held_specs
from autohet.runtime.state.frozen import FrozenWeights, first_weights
from autohet.runtime.step.batches import Batches, EvaluationRows
from autohet.runtime.step.generation import TrainerHooks, TrainingSetup, WorkerGeneration
from autohet.runtime.step.loss_scale import FIRST_SCALE, LossScale
from autohet.runtime.step.step_commit import EvaluationEnded
from autohet.runtime.step.trainer import StageTrainer
from planner.plans.plan import Plan
from recovery.state.borrowed import BorrowedState
from recovery.state.layout import Layout
from tests.harness import toy_model  # noqa: F401
from tests.harness.deferred_group import DeferredGroup
from tests.harness.faulty_arithmetic import SOFTMAX, Fault, FaultyArithmetic
from tests.harness.waits import GROUP_TIMEOUT, GROUP_TIMEOUT_S, wait_until

CPU = torch.device("cpu")
BACK_ENDS: dict[str, type[Group]] = {"gloo": GlooGroup, "deferred": DeferredGroup}


@dataclass(frozen=True)
class Case:
    """One job: `model` is the job's config mapping, `plan` a plan's document, `training` the
    section's keys.
    """

    model: Mapping[str, Any]
    plan: Mapping[str, Any]
    training: Mapping[str, Any]
    steps: int
    seed: int = 7
    overlap: bool | None = None
    back_end: str = "gloo"
    """Or "deferred": CUDA's semantics (`tests.harness.deferred_group`)."""

    dropout: bool = True
    """False: the model's config has none, whatever `model` says."""

    vocabulary_multiple: int = 1
    dataset: str = ""
    """Directory of a built data set; empty: random tokens."""

    adapter: AdapterSection | None = None
    loss_scale: LossScale = FIRST_SCALE

    def config(self) -> Any:
        training = self.section() if "optimizer" in self.training else None
        return load_config(self.model_section(), training)

    def model_section(self) -> ModelSection:
        return ModelSection(
            config=dict(self.model),
            dropout=self.dropout,
            vocabulary_multiple=self.vocabulary_multiple,
            adapter=self.adapter,
        )

    def section(self) -> TrainingSection:
        # Trainers of a test may share a process, and an audit sets switches of the process.
        given: dict[str, Any] = {"audit_every": 0, **self.training}
        return TrainingSection(**given)


@dataclass
class Seat:
    """What a pool process keeps between tasks."""

    me: str = ""
    groups: GenerationGroups | None = None
    trainer: StageTrainer | None = None
    frozen: FrozenWeights | None = None
    frozen_of: tuple[Any, ...] = ()
    """Model, seed and precision that `frozen` is of: a pool's next case may have others."""

    losses: list[float] = field(default_factory=list)
    borrowed: BorrowedState | None = None
    """The state, from one update to the next: a snapshot may be reading it."""

    blocked: Any = None


SEAT = Seat()


def rows_of(case: Case) -> Any:
    """The case's data: random tokens, a function of (seed, step), cut as any batch function cuts
    them.
    """
    if case.dataset:
        return batches_of(case)
    vocabulary = int(case.model["vocab_size"])
    batch = case.training["global_batch_sequences"]
    length = case.training["sequence_length"]

    def rows(step: int, sequences: range) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * case.seed + step)
        tokens = torch.randint(0, vocabulary, (batch, length + 1), generator=generator)[
            sequences.start : sequences.stop
        ]
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return rows


@functools.cache
def open_dataset(path: str) -> TokenDataset:
    return TokenDataset(path)


def batches_of(case: Case) -> Batches:
    dataset = open_dataset(case.dataset)
    return Batches(dataset, case.seed, case.training["global_batch_sequences"], CPU)


def local_state(case: Case, layout: Layout, me: str) -> dict[str, torch.Tensor]:
    """This worker's slices of the first state: parameters from the seed, moments 0."""
    units = layout.units_of(me)
    names = [name.removeprefix("param/") for name in units if name.startswith("param/")]
    whole = dict(first_weights(case.model_section(), case.config(), names, case.seed))
    state = {}
    for name, mine in units.items():
        spec = layout.tensors[name]
        if not name.startswith("param/"):
            state[name] = torch.zeros(spec.local_shape(mine))
        else:
            tensor = whole[name.removeprefix("param/")]
            pieces = [tensor[spec.unit_slices(unit)] for unit in mine]
            state[name] = (
                tensor.clone() if spec.split_dim is None else torch.cat(pieces, spec.split_dim)
            )
    return state


def build(
    case: Case,
    me: str,
    port: int,
    generation: int,
    state: Any = None,
    step: int = 0,
) -> int:
    """Take a seat in a generation: groups, state, trainer. Returns when all are seated."""
    plan = Plan.from_document(case.plan)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=GROUP_TIMEOUT)
    limits = GroupTimeouts(GROUP_TIMEOUT_S, GROUP_TIMEOUT_S)
    SEAT.me = me
    SEAT.groups = GenerationGroups(store, generation, me, CPU, limits, BACK_ENDS[case.back_end])
    SEAT.groups.meet(plan.workers)
    config = case.config()
    held = local_state(case, layout_of_plan(plan, config), me) if state is None else state
    isolated = case.dataset and open_dataset(case.dataset).facts.isolated
    begins = batches_of(case).begins if isolated else None
    setup = TrainingSetup(config, case.section(), CPU, case.overlap, begins)
    frozen = hold_frozen(case, plan, me)
    assert SEAT.frozen is not None
    reload = SEAT.frozen.reload
    generation_part = WorkerGeneration(
        plan,
        me,
        SEAT.groups,
        held,
        step,
        frozen=frozen,
        reload_frozen=reload,
        loss_scale=case.loss_scale,
    )
    SEAT.trainer = StageTrainer(setup, generation_part, TrainerHooks(_hook, _check_borrowed_state))
    SEAT.losses = []
    SEAT.borrowed = None
    return generation


def hold_frozen(case: Case, plan: Plan, me: str) -> Mapping[str, torch.Tensor]:
    """What this worker computes with and nobody trains; it stays from generation to generation."""
    config = case.config()
    of = case.model_section(), case.seed, case.section().precision
    if SEAT.frozen is None or SEAT.frozen_of != of:
        SEAT.frozen_of = of
        dtype = COMPUTE_DTYPES[case.section().precision]
        SEAT.frozen = FrozenWeights(case.model_section(), config, case.seed, CPU, dtype)
    keeps_first = case.model_section().keeps_reference(case.section().objective)
    units = frozen_units(plan, config, me, with_first=keeps_first)
    SEAT.frozen.hold(units, threading.Event())
    return SEAT.frozen.tensors


def check_frozen(case: Case) -> int:
    """Frozen weights have the bits that the seed gives; returns their number. A stage of their
    format computes with them, another one with copies.
    """
    assert SEAT.frozen is not None
    assert SEAT.trainer is not None
    config = case.config()
    specs = held_specs(config)
    units = frozen_units(Plan.from_document(case.plan), config, SEAT.me)
    origin = family_of(config).parameter_specs(config)
    names = [name for name, spec in origin.items() if not spec.trainable]
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in initial_parameters(config, names, case.seed):
        is_quantized = origin[name].base_format is not None
        whole |= quantize(origin[name], tensor) if is_quantized else {name: tensor}
    used = dict(SEAT.trainer.stage.weights.places())
    for name in units:
        tensor = SEAT.frozen.tensors[name]
        drawn = take_units(specs[name], units[name], whole[name])
        assert torch.equal(tensor, drawn.to(tensor.dtype)), name
        module, kind = used[name][0]
        weight = getattr(module, kind)
        is_same = weight.data_ptr() == tensor.data_ptr()
        assert is_same == (weight.dtype == tensor.dtype), name
    return len(SEAT.frozen.tensors)


def forget_frozen() -> None:
    """Be a process that has just started."""
    SEAT.frozen = None


def _check_borrowed_state() -> None:
    assert SEAT.borrowed is None or not SEAT.borrowed.changed, (
        "the state was written to outside of an update"
    )


def train(case: Case, steps: int) -> list[tuple[float, float]]:
    """Train; losses and gradient norms by step. Nothing may write to the state but the updates."""
    assert SEAT.trainer is not None
    results = []
    with muon_in_fp32():
        for _ in range(steps):
            SEAT.borrowed = BorrowedState(SEAT.trainer.state)
            result = SEAT.trainer.train_step(rows_of(case))
            results.append((result.loss, result.gradient_norm))
    return results


def muon_in_fp32() -> AbstractContextManager[Any]:
    """Let `torch.optim.Muon` iterate in fp32 instead of bf16; nothing else uses this method."""
    return patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone)


def evaluate(case: Case, dataset: str, max_rows: int | None = None) -> tuple[float, int, int]:
    """Evaluate the live state on a data set: loss, targets, sequences."""
    assert SEAT.trainer is not None
    batch = case.training["global_batch_sequences"]
    rows = EvaluationRows(open_dataset(dataset), batch, CPU, max_rows)
    result = SEAT.trainer.evaluate(rows)
    assert isinstance(result, EvaluationRecord)
    return result.loss, result.tokens, result.sequences


def train_evaluating(case: Case, dataset: str, steps: int) -> list[float]:
    """Train, with an evaluation before each step and after the last; the losses of these."""
    losses = []
    for _ in range(steps):
        losses.append(evaluate(case, dataset)[0])
        train(case, 1)
    return [*losses, evaluate(case, dataset)[0]]


def ask_to_stop() -> None:
    assert SEAT.trainer is not None
    SEAT.trainer.voter.request_stop()


def evaluation_is_given_up(case: Case, dataset: str) -> bool:
    assert SEAT.trainer is not None
    batch = case.training["global_batch_sequences"]
    result = SEAT.trainer.evaluate(EvaluationRows(open_dataset(dataset), batch, CPU))
    return isinstance(result, EvaluationEnded)


def train_and_tell(case: Case, steps: int) -> list[tuple[float, float, tuple[Any, ...]]]:
    """Train; losses, gradient norms, and what of the replicas had parted, by step."""
    assert SEAT.trainer is not None
    results = [SEAT.trainer.train_step(rows_of(case)) for _ in range(steps)]
    return [(result.loss, result.gradient_norm, result.parted) for result in results]


def run_scaled(
    case: Case, me: str, port: int, generation: int
) -> tuple[list[tuple[float, int | None, bool]], dict[str, np.ndarray]]:
    """A whole case with stages in fp16: loss, exponent of the scale and whether weights changed, by
    step; and this worker's state.
    """
    build(case, me, port, generation)
    assert SEAT.trainer is not None
    results = []
    for _ in range(case.steps):
        result = SEAT.trainer.train_step(rows_of(case))
        scale = result.loss_scale
        results.append(
            (result.loss, None if scale is None else scale.exponent, result.skipped is None)
        )
    state = show_state()
    if case.adapter is not None:
        assert check_frozen(case) > 0
    leave()
    forget_frozen()
    return results, state


def flip_bit(tensor: str, element: int, bit: int) -> None:
    """One bit of this worker's copy of a tensor of state, and of what its stage computes with."""
    assert SEAT.trainer is not None
    SEAT.trainer.state[tensor].view(-1).view(torch.int32)[element] ^= 1 << bit
    SEAT.trainer.rebuild_derived({tensor})


def flip_frozen_bit(parameter: str, element: int, bit: int) -> None:
    """One bit of this worker's copy of a frozen weight."""
    assert SEAT.frozen is not None
    SEAT.frozen.tensors[parameter].view(-1).view(torch.int32)[element] ^= 1 << bit


def use_frozen() -> None:
    """Let the stage compute with the frozen weights as they are now, also where it has copies."""
    assert SEAT.frozen is not None
    assert SEAT.trainer is not None
    SEAT.trainer.stage.weights.renew_copies(SEAT.frozen.tensors)


def run_case(
    case: Case, me: str, port: int, generation: int
) -> tuple[list[tuple[float, float]], dict[str, np.ndarray]]:
    """A whole undisturbed case: what `train` returns, and this worker's state."""
    build(case, me, port, generation)
    results = train(case, case.steps)
    state = show_state()
    leave()
    forget_frozen()
    return results, state


def leave() -> None:
    """Drop the generation."""
    if SEAT.groups is not None:
        SEAT.groups.close()
    SEAT.groups = None
    SEAT.trainer = None


def show_state() -> dict[str, np.ndarray]:
    assert SEAT.trainer is not None
    return {name: tensor.numpy().copy() for name, tensor in SEAT.trainer.state.items()}


# disturbances
# ------------------------------------------------------------------------------

_HOLD: dict[str, Any] = {"phase": None, "step": -1, "reached": False}


def hold_at(phase: str, step: int) -> None:
    """From now on this worker stops when it enters `phase` of `step`, until `release`."""
    _HOLD.update(phase=phase, step=step, reached=False)


def wait_held() -> None:
    """Return when the worker stands where `hold_at` said."""
    wait_until(lambda: _HOLD["reached"], f"{_HOLD['phase']} of step {_HOLD['step']}")


def release() -> None:
    _HOLD.update(phase=None)


def _hook(phase: str, step: int) -> None:
    if _HOLD["phase"] == phase and _HOLD["step"] == step:
        _HOLD["reached"] = True
        wait_until(lambda: _HOLD["phase"] != phase, f"the release from {phase}")


def interrupt() -> None:
    """Interrupt the trainer's generation from another thread."""
    assert SEAT.groups is not None
    SEAT.groups.interrupt()


def progress() -> tuple[int, int | None, Any, str]:
    """(committed step, prepared step, last vote, phase)."""
    trainer = SEAT.trainer
    assert trainer is not None
    return trainer.step, trainer.prepared, trainer.last_vote, trainer.phase


def roll_forward(vote: Any) -> int:
    """Apply the prepared step with another survivor's vote (None: with one's own)."""
    assert SEAT.trainer is not None
    with muon_in_fp32():
        SEAT.trainer.apply_prepared(vote)
    return SEAT.trainer.step


def take_over_state() -> dict[str, torch.Tensor]:
    """The live state, for the next generation in this process."""
    assert SEAT.trainer is not None
    return SEAT.trainer.state


def rebuild(case: Case, me: str, port: int, generation: int) -> int:
    """A new generation in this process, on the state that it has."""
    assert SEAT.trainer is not None
    state = SEAT.trainer.state
    step = SEAT.trainer.step
    leave()
    return build(case, me, port, generation, state=state, step=step)


def lose_vote_at(step: int) -> None:
    """At `step` this worker contributes to the vote but is cut off before it sees the result."""
    trainer = SEAT.trainer
    assert trainer is not None
    world = trainer.voter.world
    whole = world.wait_on_host

    def cut_off(work: Any) -> None:
        whole(work)
        if trainer.step == step and trainer.phase == "vote":
            world.wait_on_host = whole  # type: ignore[method-assign]
            raise PeerLost("cut off by the test")

    world.wait_on_host = cut_off  # type: ignore[method-assign]


# faults of a device
# ------------------------------------------------------------------------------


def run_audited(
    case: Case, me: str, port: int, generation: int, faults: Mapping[str, str]
) -> tuple[list[tuple[float, tuple[Any, ...], Any]], dict[str, np.ndarray]]:
    """A whole case in which workers have faults (by name, see `_at_fault`): loss, parted replicas
    and audit by step, and this worker's state.
    """
    build(case, me, port, generation)
    trainer = SEAT.trainer
    assert trainer is not None
    fault = faults.get(me, "")
    found = []
    with _at_fault(trainer, fault):
        for step in range(case.steps):
            if fault == "update" and step == 1:
                flip_bit("param/model.layers.1.mlp.up_proj.weight", 1, 12)
            result = trainer.train_step(rows_of(case))
            found.append((result.loss, result.parted, result.audit))
    state = show_state()
    leave()
    forget_frozen()
    return found, state


def _at_fault(trainer: StageTrainer, fault: str) -> AbstractContextManager[Any]:
    """Give a trainer a fault: its device has wrong "products", "softmax" or "exponents" in it, its
    copy of the "sum" of gradients or its "addend" a wrong bit, a "message" that it sends a
    flipped bit on its way, what it takes from a "border" wrong values; it has no "memory" for
    audits.
    """
    if fault == "products":
        return FaultyArithmetic(Fault(rate=1e-3, bit=0))
    if fault == "exponents":
        return FaultyArithmetic(Fault(operators=SOFTMAX, rate=0.3, bit=24))
    if fault == "softmax":
        return FaultyArithmetic(Fault(operators=SOFTMAX, rate=1e-1))
    if fault == "memory":
        assert trainer.audit is not None
        trainer.audit.run = lambda step: None  # type: ignore[method-assign]
    sync = trainer.gradient_sync
    finish = sync.finish

    def disturbed() -> torch.Tensor:
        for flat in sync.flats.values():
            if fault == "addend":
                flat += 1.0
        out = finish()
        for flat in sync.flats.values():
            if fault == "sum":
                flat += 1.0
        return out

    if fault in ("sum", "addend"):
        sync.finish = disturbed  # type: ignore[method-assign]
    if fault == "message":
        group = trainer._executor.borders.forward[0]
        send = group.send
        calls = itertools.count()

        def flipped(part: torch.Tensor, *rest: Any) -> Any:
            if next(calls) == 2:
                part = part.clone()
                part.view(torch.int32).view(-1)[5] ^= 1 << 31
            return send(part, *rest)

        group.send = flipped  # type: ignore[method-assign]
    if fault == "border":
        through = trainer.stage._through_blocks
        trainer.stage._through_blocks = lambda x, begins: through(x + 1e-3, begins)
    return nullcontext()
