"""Tensor parallelism over real gloo processes equals the library's model in one process: loss and
gradients, unit by unit.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed import PrefixStore, Store

from autohet.runtime.groups import GlooGroup
from autohet.runtime.models.layers.linear_loss import CutVocabulary, cross_entropy_sum
from autohet.runtime.models.layers.tensor_parallel import TensorParallel
from autohet.runtime.models.registry import family_of
from planner.plans.plan import Recompute
from tests.harness.processes import ChildFailed, run_distributed
from tests.harness.tiny_models import (
    judge,
    random_parameters,
    run_chain,
    stage_chain,
    take,
    tiny_config,
    worst_error,
)

pytestmark = pytest.mark.multiprocess
TOLERANCE = 1e-5
CASES = {
    2: ["llama-grouped", "llama-biased-tied", "qwen2", "qwen3", "mistral", "gpt2", "gpt2-untied"],
    4: ["qwen3", "gpt2"],
}


def _group(rank: int, size: int, store: Store) -> GlooGroup:
    members = [f"worker-{index}" for index in range(size)]
    return GlooGroup(
        "tensor", members, members[rank], PrefixStore("test", store), torch.device("cpu"), 30.0
    )


def _every_case(rank: int, size: int, store: Store) -> dict[str, tuple[float, float]]:
    """Errors of loss and of gradients of this rank, by case."""
    tp = TensorParallel.even(_group(rank, size, store), rank, size)
    errors = {}
    for name in CASES[size]:
        for cut, recompute in (([3], "selective"), ([1, 2], "full")):
            errors[f"{name} {cut}"] = _errors(name, cut, recompute, tp)
    return errors


def _errors(
    name: str, cut: list[int], recompute: Recompute, tp: TensorParallel
) -> tuple[float, float]:
    config = tiny_config(name)
    specs = family_of(config).parameter_specs(config)
    parameters = random_parameters(config)
    _, loss, expected = judge(config, parameters)
    _, our_loss, ours = run_chain(config, stage_chain(config, parameters, cut, tp, recompute))
    for key, gradient in ours.items():
        if specs[key].partial_gradient:
            tp.group.all_reduce(gradient)
    wanted = {key: take(specs[key], gradient, tp.share) for key, gradient in expected.items()}
    return abs(our_loss - loss) / loss, worst_error(ours, wanted)


@pytest.mark.parametrize("degree", [2, 4])
def test_loss_and_gradients_equal_one_process(degree):
    for rank, errors in enumerate(run_distributed(_every_case, degree)):
        for case, (loss_error, gradient_error) in errors.items():
            assert loss_error < TOLERANCE, (rank, case)
            assert gradient_error < TOLERANCE, (rank, case)


def _head_loss(rank: int, size: int, store: Store) -> Any:
    """Loss and gradient of a head cut 3 + 8 of 11 rows, logits far beyond exp's range in fp32."""
    group = _group(rank, size, store)
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0)) * 200
    targets = torch.tensor([0, 10, -100, 2, 3])
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, targets, ignore_index=-100, reduction="sum")
    (expected * 3).backward()
    rows = slice(0, 3) if rank == 0 else slice(3, 11)
    local = logits[:, rows].clone().requires_grad_()
    loss = cross_entropy_sum(local, targets, CutVocabulary(group, size, rows.start, 11, 11))
    (loss * 3).backward()
    return loss.item(), expected.item(), (local.grad - whole.grad[:, rows]).abs().max().item()


def test_cross_entropy_over_an_uneven_cut_is_whole_and_stable():
    for loss, expected, gradient_error in run_distributed(_head_loss, 2):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert gradient_error < 1e-5


def _misbehave(rank: int, size: int, store: Store, how: str) -> None:
    if rank == 1 and how == "raise":
        raise KeyError("the cause")
    if rank == 1 and how == "die":
        import os

        os._exit(7)
    store.wait(["never"])


@pytest.mark.parametrize(("how", "says"), [("raise", "the cause"), ("die", "exit code 7")])
def test_the_harness_brings_failures_home_and_leaves_nobody(how, says):
    with pytest.raises(ChildFailed, match=says):
        run_distributed(_misbehave, 2, how)
