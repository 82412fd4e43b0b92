"""One worker alone: what commits a step, what skips it, what stops the run, how a cut-off update
goes on.
"""

from contextvars import ContextVar
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed import HashStore

from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.groups import GenerationGroups, GroupTimeouts, Interrupted
from autohet.runtime.groups.gloo import GlooGroup
from autohet.runtime.messages import EvaluationRecord
from autohet.runtime.parallel.place import Place
from autohet.runtime.step.generation import NO_HOOKS, TrainerHooks, TrainingSetup, WorkerGeneration
from autohet.runtime.step.row_count import RowsDiffer, hashes_of
from autohet.runtime.step.step_commit import EvaluationEnded
from autohet.runtime.step.trainer import StageTrainer
from autohet.runtime.step.votes import Vote
from planner.plans.plan import Plan
from tests.harness.toy_model import TOY_CONFIG
from tests.harness.training_case import CPU, Case, local_state, rows_of

TRAINING = {
    "global_batch_sequences": 4,
    "sequence_length": 6,
    "steps": 10,
    "precision": "fp32",
    "learning_rate": 5e-2,
    "clip_norm": 0.5,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}


def plan_of(microbatches: int) -> dict[str, Any]:
    layers = [{"first_layer": 0, "num_layers": 0, "workers": ["w"]}]
    return {
        "version": 1,
        "model": "m",
        "global_batch_sequences": 4,
        "microbatch_sequences": 4 // microbatches,
        "sequence_length": 6,
        "pipelines": [{"num_microbatches": microbatches, "stages": layers}],
    }


def trainer_of(
    model: dict[str, Any],
    microbatches: int = 2,
    hooks: TrainerHooks = NO_HOOKS,
    **training: Any,
) -> tuple[StageTrainer, Any]:
    document = plan_of(microbatches)
    document["pipelines"][0]["stages"][0]["num_layers"] = model["num_hidden_layers"]
    case = Case(model, document, TRAINING | training, 4)
    plan, config = Plan.from_document(document), case.config()
    groups = GenerationGroups(HashStore(), 1, "w", CPU, GroupTimeouts(5.0, 5.0))
    state = local_state(case, layout_of_plan(plan, config), "w")
    generation = WorkerGeneration(plan, "w", groups, state)
    return StageTrainer(TrainingSetup(config, case.section(), CPU), generation, hooks), rows_of(
        case
    )


def copy_of(trainer: StageTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.state.items()}


def test_a_gradient_that_is_not_finite_skips_the_update_and_nothing_else() -> None:
    trainer, rows = trainer_of(LLAMA)
    trainer.train_step(rows)
    before = copy_of(trainer)
    name = "param/model.norm.weight"
    kept = trainer.state[name].clone()
    trainer.state[name].fill_(float("inf"))
    result = trainer.train_step(rows)
    assert result.skipped is not None
    assert (result.skipped.reason, result.skipped.parameters) == (
        "not_finite",
        ("model.norm.weight",),
    )
    assert result.skipped.loss_not_finite
    assert trainer.step == 2
    trainer.state[name].copy_(kept)
    assert all(torch.equal(tensor, before[each]) for each, tensor in trainer.state.items())
    assert trainer.train_step(rows).skipped is None
    assert not torch.equal(trainer.state[name], kept)


def test_targets_that_do_not_count_weigh_nothing() -> None:
    """Microbatches with unequal numbers of counted targets: the mean is over tokens, not over
    microbatches.
    """
    results = []
    for microbatches in (1, 4):
        trainer, rows = trainer_of(LLAMA, microbatches)

        def masked(step: int, sequences: range, rows: Any = rows) -> Any:
            tokens, targets = (tensor.clone() for tensor in rows(step, sequences))
            for index, sequence in enumerate(sequences):
                targets[index, : 2 * sequence] = -100
            return tokens, targets

        result = trainer.train_step(masked)
        assert result.tokens == 6 + 4 + 2 + 0
        results.append((result.loss, result.gradient_norm))
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_a_batch_without_counted_targets_is_a_step() -> None:
    trainer, rows = trainer_of(LLAMA)
    result = trainer.train_step(
        lambda step, sequences: (rows(step, sequences)[0], torch.full((len(sequences), 6), -100))
    )
    assert (result.tokens, result.loss, result.gradient_norm) == (0, 0.0, 0.0)
    assert trainer.step == 1
    assert all(bool(torch.isfinite(tensor).all()) for tensor in trainer.state.values())


class Misdealt(Place):
    """A place that takes other rows than the plan says, of equal number and length."""

    def sequences(self, microbatch: int) -> range:
        rows = super().sequences(microbatch)
        wrong = {"doubled": 0, "beyond": 4, "shifted": 1}[MISTAKE.get()]
        if MISTAKE.get() == "doubled":
            return super().sequences(wrong)
        return range(rows.start + wrong, rows.stop + wrong)


MISTAKE: ContextVar[str] = ContextVar("mistake")


@pytest.mark.parametrize("mistake", ["doubled", "beyond", "shifted"])
def test_a_step_of_other_rows_than_its_batch_has_does_not_happen(mistake: str) -> None:
    """The number of targets is right: only the positions tell."""
    trainer, rows = trainer_of(LLAMA)
    MISTAKE.set(mistake)
    place = trainer.place
    trainer.place = Misdealt(**{each.name: getattr(place, each.name) for each in fields(place)})
    before = copy_of(trainer)

    def any_rows(step: int, sequences: range) -> Any:
        return rows(step, range(len(sequences)))

    with pytest.raises(RowsDiffer, match="step 0 did not happen"):
        trainer.train_step(any_rows)
    assert (trainer.step, trainer.prepared, trainer.last_vote) == (0, None, None)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.state.items())
    trainer.place = place
    trainer.train_step(rows)
    assert trainer.step == 1


def test_phases_come_in_order_and_the_update_waits_for_the_snapshot() -> None:
    seen: list[str] = []
    hooks = TrainerHooks(
        on_phase=lambda phase, step: seen.append(phase), before_update=lambda: seen.append("wait")
    )
    trainer, rows = trainer_of(TOY_CONFIG, hooks=hooks)
    trainer.train_step(rows)
    assert seen == ["forward", "backward"] * 2 + ["gradient_sync", "vote", "apply", "wait"]


def test_a_stop_travels_in_the_vote() -> None:
    trainer, rows = trainer_of(TOY_CONFIG)
    votes = []
    for _ in range(2):
        trainer.train_step(rows)
        assert trainer.last_vote is not None
        votes.append(trainer.last_vote[1])
        trainer.voter.request_stop(checkpoint=True)
    assert [(vote.stops, vote.checkpoints) for vote in votes] == [(0, 0), (1, 1)]


def test_an_update_that_was_cut_off_goes_on_to_the_same_bits() -> None:
    plain, rows = trainer_of(TOY_CONFIG)
    plain.train_step(rows)
    cut = [True]

    def cut_off(phase: str, step: int) -> None:
        if phase == "apply" and cut:
            cut.clear()
            raise RuntimeError("cut off")

    trainer, rows = trainer_of(TOY_CONFIG, hooks=TrainerHooks(cut_off))
    before = copy_of(trainer)
    with pytest.raises(RuntimeError, match="cut off"):
        trainer.train_step(rows)
    assert (trainer.step, trainer.prepared) == (0, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state.items())
    trainer.apply_prepared()
    assert (trainer.step, trainer.prepared) == (1, None)
    assert all(torch.equal(tensor, plain.state[name]) for name, tensor in trainer.state.items())


def test_an_interrupt_ends_the_step_of_a_worker_that_waits_for_nobody() -> None:
    trainer, rows = trainer_of(TOY_CONFIG)
    before = copy_of(trainer)

    def interrupting(step: int, sequences: range) -> Any:
        trainer.groups.interrupt()
        return rows(step, sequences)

    with pytest.raises(Interrupted):
        trainer.train_step(interrupting)
    assert (trainer.step, trainer.prepared) == (0, None)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.state.items())


class DeviceClock:
    """A device's clock, of which only marks that the host has waited for may be read."""

    in_step_with_host = False

    def __init__(self) -> None:
        self.made = self.reached = 0

    def mark(self) -> int:
        self.made += 1
        return self.made

    def seconds(self, begin: int, end: int) -> float:
        assert end <= self.reached, "reading this mark would hold up the host"
        return float(end - begin)


def test_the_updates_time_is_the_devices_and_the_host_never_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wrong: the host's clock around the launches."""
    clock = DeviceClock()
    monkeypatch.setattr(GlooGroup, "clock", clock)
    trainer, rows = trainer_of(LLAMA)
    world = trainer.voter.world
    wait = world.wait_on_host

    def waited(work: Any) -> None:
        wait(work)
        clock.reached = clock.made

    world.wait_on_host = waited  # type: ignore[method-assign]
    seconds = [trainer.train_step(rows).parts_s["optimizer"] for _ in range(3)]
    assert seconds == [0.0, 1.0, 1.0]


def test_gradients_that_are_not_finite_are_named_where_all_weights_are() -> None:
    trainer, rows = trainer_of(LLAMA)
    name = "model.layers.0.mlp.down_proj.weight"
    parameter = trainer.stage.weights.local_parameters()[name]
    parameter.register_hook(lambda gradient: gradient * float("nan"))
    skipped = trainer.train_step(rows).skipped
    assert skipped is not None
    assert (skipped.parameters, skipped.gradients) == ((), (name,))
    assert not skipped.loss_not_finite


@pytest.mark.parametrize(
    ("training", "reason"),
    [
        ({"skip_steps": ((1, 2),)}, "requested"),
        ({"skip_gradient_norm_above": 1e-9}, "gradient_norm"),
    ],
)
def test_data_that_is_to_be_skipped_changes_nothing(training: dict[str, Any], reason: str) -> None:
    trainer, rows = trainer_of(LLAMA, **training)
    if reason == "requested":
        assert trainer.train_step(rows).skipped is None
    before = copy_of(trainer)
    for _ in range(2):
        result = trainer.train_step(rows)
        assert result.skipped is not None
        assert result.skipped.reason == reason
    assert all(torch.equal(tensor, before[each]) for each, tensor in trainer.state.items())
    if reason == "requested":
        assert trainer.train_step(rows).skipped is None


def test_a_survivor_that_rolls_forward_skips_the_step_too() -> None:
    trainer, _ = trainer_of(LLAMA, skip_gradient_norm_above=1e-9)
    before = copy_of(trainer)
    trainer.prepared = 0
    vote = Vote(squared_norm=1.0, loss_sum=1.0, tokens=4, members=1)
    assert not trainer.apply_prepared(vote)
    assert trainer.step == 1
    assert all(torch.equal(tensor, before[each]) for each, tensor in trainer.state.items())


class SixRows:
    """Evaluation rows that fill one global batch of four and half of another."""

    num_batches, num_rows, isolated = 2, 6, False

    def num_in_batch(self, index: int) -> int:
        return (4, 2)[index]

    def batch(self, index: int, sequences: range) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 37, (4, 7), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[0, : 3 * index] = -100
        targets[self.num_in_batch(index) :] = -100
        part = slice(sequences.start, sequences.stop)
        return tokens[part, :-1].contiguous(), targets[part]


@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_an_evaluation_is_a_plain_loss_and_leaves_no_trace(microbatches: int) -> None:
    evaluated, rows = trainer_of(LLAMA, microbatches, label_smoothing=0.2)
    undisturbed, _ = trainer_of(LLAMA, microbatches, label_smoothing=0.2)
    held_out: Any = SixRows()
    for _ in range(2):
        result = evaluated.evaluate(held_out)
        assert isinstance(result, EvaluationRecord)
        assert (result.step, result.sequences, result.tokens) == (evaluated.step, 6, 33)
        total = 0.0
        with torch.no_grad():
            for index in range(2):
                tokens, targets = held_out.batch(index, range(4))
                logits = evaluated.stage(tokens).flatten(0, 1)
                total += float(F.cross_entropy(logits, targets.flatten(), reduction="sum"))
        assert result.loss == pytest.approx(total / 33, rel=1e-6)
        assert evaluated.train_step(rows) is not None
        undisturbed.train_step(rows)
    for name, tensor in undisturbed.state.items():
        assert torch.equal(evaluated.state[name], tensor), name
    evaluated.voter.request_stop(checkpoint=True)
    assert evaluated.evaluate(held_out) == EvaluationEnded(checkpoint=True)


def test_sums_of_row_hashes_tell_batches_apart() -> None:
    """Wrong: a sum of the positions themselves, which 0 + 3 and 1 + 2 share."""
    hashes = [hashes_of(number + 1) - hashes_of(number) for number in range(2000)]
    assert len(set(hashes)) == 2000
    assert max(hashes) < 2**32
    assert hashes[0] + hashes[3] != hashes[1] + hashes[2]
