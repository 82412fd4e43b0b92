"""One worker that runs a job's model as an SPMD program: the steps, votes and state of a stage of
pipelines.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.groups import GenerationGroups, GroupTimeouts
from autohet.runtime.job.model import ModelSection
from autohet.runtime.models.config import load_config
from autohet.runtime.spmd.language_model import capture_decoder, capture_language_model
from autohet.runtime.spmd.trainer import SpmdTrainer
from autohet.runtime.state.state_source import local_slice
from autohet.runtime.step.generation import TrainingSetup, WorkerGeneration
from autohet.runtime.step.trainer import StageTrainer
from planner.plans.plan import Pipeline, Plan, Stage
from planner.spmd.costs import CostTable, Device, SpmdCluster, ring_collectives
from planner.spmd.document import StageProgram
from planner.spmd.plan import synthesize
from tests.harness.parity import ADAM_EPS
from tests.harness.tiny_models import CAPTURED, TINY
from tests.harness.training_case import CPU, Case, local_state, rows_of

TRAINING: dict[str, Any] = {
    "global_batch_sequences": 4,
    "sequence_length": 6,
    "steps": 10,
    "precision": "fp32",
    "learning_rate": 1e-2,
    "clip_norm": 0.5,
    "eps": ADAM_EPS,
}

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}


UNEVEN = (4e9, 1e9, 1e9)
IN_CI = frozenset({"gpt2", "glm4"})
"""Fused maps, rotary halves."""


def program_for(
    workers: int, speeds: tuple[float, ...], microbatch: int, model: Mapping[str, Any] = LLAMA
) -> StageProgram:
    config = load_config(ModelSection(config=dict(model), dropout=False))
    decoder = capture_decoder(config, microbatch, 6, torch.float32)
    devices = tuple(Device(f"d{n}", speed) for n, speed in enumerate(speeds))
    cluster = SpmdCluster(devices, ring_collectives(workers, 1e9, 1e-6))
    return StageProgram.of(synthesize(CostTable(decoder.graph, cluster), pinned=decoder.split_dims))


def plan_of(stage: Stage) -> Plan:
    return Plan("m", 4, 2, 6, (Pipeline((stage,), 2, 2),))


def test_two_microbatches_of_a_program_train_as_a_stage_does() -> None:
    plain = plan_of(Stage(0, 2, ("w",)))
    program = plan_of(replace(plain.pipelines[0].stages[0], spmd=program_for(1, (1e12,), 2)))
    case = Case(LLAMA, plain.to_document(), TRAINING, 3)
    config, found = case.config(), []
    for plan, kind in ((plain, StageTrainer), (program, SpmdTrainer)):
        state = local_state(case, layout_of_plan(plan, config), "w")
        generation = WorkerGeneration(
            plan, "w", GenerationGroups(HashStore(), 1, "w", CPU, GroupTimeouts(5.0, 5.0)), state
        )
        trainer = kind(TrainingSetup(config, case.section(), CPU), generation)
        results = [trainer.train_step(rows_of(case)) for _ in range(3)]
        found.append(
            (
                [(r.loss, r.gradient_norm, r.tokens) for r in results],
                trainer.state,
                trainer.last_vote,
            )
        )
    (stage, stage_state, stage_vote), (spmd, spmd_state, vote) = found
    assert torch.tensor(spmd) == pytest.approx(torch.tensor(stage), rel=1e-5)
    assert stage_state.keys() == spmd_state.keys()
    assert all(
        torch.allclose(stage_state[name], spmd_state[name], atol=1e-5) for name in stage_state
    )
    assert (vote[0], vote[1].members) == (stage_vote[0], 1)


@pytest.mark.parametrize(
    ("model", "speeds"),
    [
        pytest.param(LLAMA, UNEVEN, id="uneven"),
        pytest.param(LLAMA, (1e9, 1e9, 1e9), id="even"),
        *(
            pytest.param(
                TINY[name], UNEVEN, id=name, marks=() if name in IN_CI else pytest.mark.slow
            )
            for name in CAPTURED
        ),
    ],
)
def test_three_workers_on_their_shares_train_as_one_stage_does(
    model: Mapping[str, Any], speeds: tuple[float, ...]
) -> None:
    """Ranks are threads here; what is cut of the state, put together, is the one worker's."""
    workers = ("a", "b", "c")
    num_layers = load_config(ModelSection(config=dict(model))).num_hidden_layers
    plain = plan_of(Stage(0, num_layers, ("w",)))
    plan = plan_of(Stage(0, num_layers, workers, spmd=program_for(3, speeds, 2, model)))
    case = Case(model, plain.to_document(), TRAINING, 3, dropout=False)
    config, store = case.config(), HashStore()
    layout = layout_of_plan(plan, config)
    captured = capture_language_model(config, 2, 6, torch.float32)  # the exporter is for one thread
    assert plan.spmd is not None
    placed = plan.spmd.place(captured.graph)
    states = {me: local_state(case, layout, me) for me in workers}  # as is what draws them

    setup = TrainingSetup(config, case.section(), CPU)

    def life(me: str) -> SpmdTrainer:
        groups = GenerationGroups(store, 1, me, CPU, GroupTimeouts(60.0, 60.0))
        trainer = SpmdTrainer(
            setup, WorkerGeneration(plan, me, groups, states[me]), program=(captured, placed)
        )
        trainer.results = [trainer.train_step(rows_of(case)) for _ in range(2)]  # type: ignore[attr-defined]
        return trainer

    with ThreadPoolExecutor(3) as pool:
        trainers = list(pool.map(life, workers))
    alone = GenerationGroups(HashStore(), 1, "w", CPU, GroupTimeouts(5.0, 5.0))
    whole = local_state(case, layout_of_plan(plain, config), "w")
    stage = StageTrainer(setup, WorkerGeneration(plain, "w", alone, whole))
    wanted = [stage.train_step(rows_of(case)) for _ in range(2)]
    for trainer, me in zip(trainers, workers, strict=True):
        for found, result in zip(trainer.results, wanted, strict=True):  # type: ignore[attr-defined]
            assert (found.loss, found.gradient_norm) == pytest.approx(
                (result.loss, result.gradient_norm), rel=1e-5
            )
            assert found.tokens == result.tokens
        for name, units in layout.units_of(me).items():
            assert torch.allclose(
                trainer.state[name], local_slice(layout, name, units, whole[name]), atol=1e-5
            )


def test_state_of_a_program_lies_in_the_units_of_pipelines_whatever_the_shares() -> None:
    """Every unit of what is cut has one holder, of what is whole as many as there are workers."""
    program = program_for(3, (4e9, 1e9, 1e9), 2)
    plan = plan_of(Stage(0, 2, ("a", "b", "c"), spmd=program))
    config = Case(LLAMA, plan.to_document(), TRAINING, 1).config()
    layout, storage = layout_of_plan(plan, config), program.storage
    for name, spec in layout.tensors.items():
        kind = storage[name.split("/", 1)[1]].kind
        held = [unit for worker in plan.workers for unit in layout.units_of(worker).get(name, ())]
        times = 1 if kind == "sharded" else 3
        assert sorted(held) == sorted([*range(spec.num_units)] * times)
    assert {layout.kind for layout in storage.values()} >= {"sharded"}
