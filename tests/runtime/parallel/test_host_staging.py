"""Optimizer state in host memory: the same bits, device memory as predicted, moves back and forth.

Here host and device are one memory, so only the path of gradients and weights differs. `scripts/gpu
--only offload` runs it on a GPU.
"""

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from autohet.runtime.facts.layout import frozen_units, layout_of_plan
from autohet.runtime.groups import GenerationGroups, GroupTimeouts
from autohet.runtime.job import AdapterSection
from autohet.runtime.models.family import COMPUTE_DTYPES
from autohet.runtime.parallel import host_staging
from autohet.runtime.parallel.host_staging import HostStaging
from autohet.runtime.state.frozen import FrozenWeights
from autohet.runtime.step.generation import TrainingSetup, WorkerGeneration
from autohet.runtime.step.trainer import StageTrainer
from planner.plans.plan import Plan
from tests.harness.training_case import CPU, Case, local_state, rows_of

STEPS = 2
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
}
TRAINING = {
    "global_batch_sequences": 4,
    "sequence_length": 8,
    "steps": 10,
    "learning_rate": 0.01,
    "clip_norm": 0.5,
}
PLANS: dict[str, list[list[tuple[int, int, list[str]]]]] = {
    "alone": [[(0, 3, ["a"])]],
    "unequal pipelines": [[(0, 2, ["a", "b"]), (2, 1, ["c"])], [(0, 3, ["d"])]],
}


def case_of(
    name: str,
    *,
    offload: bool,
    shard: bool = False,
    precision: str = "fp32",
    adapter: AdapterSection | None = None,
) -> Case:
    pipelines = [
        {
            "num_microbatches": 4 // len(PLANS[name]),
            "stages": [
                {
                    "first_layer": first,
                    "num_layers": count,
                    "workers": workers,
                    "offload_optimizer": offload,
                    "shard_optimizer": shard,
                }
                for first, count, workers in stages
            ],
        }
        for stages in PLANS[name]
    ]
    plan = {
        "version": 1,
        "model": "m",
        "global_batch_sequences": 4,
        "microbatch_sequences": 1,
        "sequence_length": 8,
        "pipelines": pipelines,
    }
    return Case(MODEL, plan, {**TRAINING, "precision": precision}, STEPS, adapter=adapter)


def frozen_of(case: Case, plan: Plan, me: str) -> Mapping[str, torch.Tensor]:
    """What an adapter's worker computes with and nobody trains."""
    config, dtype = case.config(), COMPUTE_DTYPES[case.section().precision]
    weights = FrozenWeights(case.model_section(), config, case.seed, CPU, dtype)
    weights.hold(frozen_units(plan, config, me), threading.Event())
    return weights.tensors


def trained(case: Case) -> dict[str, tuple[list[float], dict[str, torch.Tensor]]]:
    """Worker -> its losses and its state after the steps; each worker is a thread."""
    plan, config, store = Plan.from_document(case.plan), case.config(), HashStore()
    layout = layout_of_plan(plan, config)
    states = {me: local_state(case, layout, me) for me in plan.workers}
    frozen = {me: frozen_of(case, plan, me) for me in plan.workers}
    found: dict[str, tuple[list[float], dict[str, torch.Tensor]]] = {}

    def work(me: str) -> None:
        groups = GenerationGroups(store, 1, me, CPU, GroupTimeouts(30.0, 30.0))
        groups.meet(plan.workers)
        trainer = StageTrainer(
            TrainingSetup(config, case.section(), CPU),
            WorkerGeneration(plan, me, groups, states[me], frozen=frozen[me]),
        )
        losses = [trainer.train_step(rows_of(case)).loss for _ in range(STEPS)]
        found[me] = losses, trainer.state

    threads = [threading.Thread(target=work, args=(me,), daemon=True) for me in plan.workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(found) == set(plan.workers)
    return found


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts of each stretch, and a rest."""
    whole = HostStaging.__init__

    def init(self: HostStaging, device: torch.device, staging_bytes: int = 25 * 64) -> None:
        whole(self, device, staging_bytes)

    monkeypatch.setattr(HostStaging, "__init__", init)


ADAPTER = AdapterSection(rank=4, alpha=8.0)


@pytest.mark.parametrize(
    ("name", "shard", "precision", "adapter"),
    [
        pytest.param("alone", False, "bf16", None, marks=pytest.mark.slow),
        pytest.param("unequal pipelines", False, "fp32", None, marks=pytest.mark.slow),
        ("unequal pipelines", True, "bf16", None),
        ("unequal pipelines", False, "bf16", ADAPTER),
        pytest.param("unequal pipelines", True, "fp32", ADAPTER, marks=pytest.mark.slow),
    ],
)
def test_weights_and_moments_have_the_bits_of_a_state_that_stays(
    name: str, shard: bool, precision: str, adapter: AdapterSection | None
) -> None:
    """Also of adapters, whose frozen weights have no state."""
    here, there = (
        trained(case_of(name, offload=offload, shard=shard, precision=precision, adapter=adapter))
        for offload in (False, True)
    )
    for worker, (losses, state) in here.items():
        assert losses == there[worker][0]
        assert len(set(losses)) == STEPS
        for key, tensor in state.items():
            assert torch.equal(tensor, there[worker][1][key]), (worker, key)


def test_what_is_computed_with_is_a_copy_on_the_device() -> None:
    """In fp32 too, where the masters themselves would do."""
    case = case_of("alone", offload=True)
    plan, config = Plan.from_document(case.plan), case.config()
    groups = GenerationGroups(HashStore(), 1, "a", CPU, GroupTimeouts(5.0, 5.0))
    state = local_state(case, layout_of_plan(plan, config), "a")
    trainer = StageTrainer(
        TrainingSetup(config, case.section(), CPU), WorkerGeneration(plan, "a", groups, state)
    )
    masters = {tensor.untyped_storage().data_ptr() for tensor in trainer.state.values()}
    used = {
        p.untyped_storage().data_ptr() for p in trainer.stage.weights.local_parameters().values()
    }
    assert masters.isdisjoint(used)


@pytest.mark.parametrize("num_elements", [0, 16, 80, 96, 1600, 1616])
def test_every_element_comes_down_once_and_in_order(num_elements: int) -> None:
    source = torch.arange(num_elements, dtype=torch.float32)
    seen = []
    for start, part in HostStaging(CPU, 5 * 64).down(source):
        assert start == sum(map(len, seen))
        seen.append(part.clone())
        part.zero_()  # the update scales it in place
    assert torch.equal(torch.cat([torch.empty(0), *seen]), source)
    assert torch.equal(source, torch.arange(num_elements, dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_go_up_in_the_type_that_is_computed_with(dtype: torch.dtype) -> None:
    source = torch.randn(7, 33)
    target = torch.empty(7, 33, dtype=dtype)
    HostStaging(CPU, 5 * 64).up(source, target)
    assert torch.equal(target, source.to(dtype))


def test_one_stage_that_says_so_speaks_for_the_plan() -> None:
    """Holders of a layer would part, were some updated here and others there."""
    plan = Plan.from_document(case_of("unequal pipelines", offload=False).plan)
    first, second = plan.pipelines
    stage = replace(second.stages[0], offload_optimizer=True)
    mixed = replace(plan, pipelines=(first, replace(second, stages=(stage,))))
    assert mixed.offloads
    assert not plan.offloads
    assert Plan.from_json(mixed.to_json()) == mixed
    assert host_staging.state_device(mixed, torch.device("cuda", 0)) == torch.device("cpu")
    assert host_staging.state_device(plan, torch.device("cuda", 0)).type == "cuda"


def test_a_program_keeps_its_state_on_the_device() -> None:
    from planner.errors import ConfigError

    document: dict[str, Any] = dict(case_of("alone", offload=True).plan)
    document["pipelines"][0]["stages"][0]["spmd"] = {}
    with pytest.raises(ConfigError, match=r"offload_optimizer.*spmd|spmd"):
        Plan.from_document(document)
