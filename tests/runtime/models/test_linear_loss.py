"""Head and loss in one equal the library's two steps, and never hold all logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autohet.runtime.models.layers import linear_loss
from autohet.runtime.models.layers.linear_loss import (
    CutVocabulary,
    HeadFactors,
    linear_cross_entropy_sum,
)
from autohet.runtime.models.layers.logits import UNCHANGED, LogitAdjustment
from autohet.runtime.models.layers.loss_terms import PLAIN, LossTerms
from autohet.runtime.models.stages.stage import build_stage
from autohet.runtime.models.thread_group import run_ranks
from tests.harness.live_memory import LiveMemory
from tests.harness.tiny_models import tiny_config

CPU = torch.device("cpu")
ROWS, WIDTH, VOCABULARY, PADDED = 24, 16, 50, 64


def inputs_of(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(2, ROWS // 2, WIDTH, dtype=dtype).requires_grad_()
    weight = torch.randn(PADDED, WIDTH, dtype=dtype).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (2, ROWS // 2))
    targets[0, 3] = targets[1, 0] = -100
    return hidden, weight, targets


@pytest.mark.parametrize("chunk_rows", [1, 7, ROWS, 1000])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_loss_and_gradients_are_the_librarys(
    monkeypatch: pytest.MonkeyPatch, chunk_rows: int, dtype: torch.dtype, tolerance: float
) -> None:
    monkeypatch.setattr(linear_loss, "CHUNK_ELEMENTS", chunk_rows * PADDED)
    hidden, weight, targets = inputs_of(dtype)
    found = linear_cross_entropy_sum(HeadFactors(hidden, weight), targets, VOCABULARY)
    assert found.dtype == torch.float32
    (3.0 * found).backward()
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
    logits = (exact[0] @ exact[1].T)[..., :VOCABULARY]
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    (3.0 * expected).backward()
    assert abs(found.item() - expected.item()) <= tolerance * expected.item()
    for ours, theirs in zip((hidden, weight), exact, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        largest = float(theirs.grad.abs().max())
        assert float((ours.grad - theirs.grad).abs().max()) <= tolerance * largest
    assert not weight.grad[VOCABULARY:].any(), "rows that pad the vocabulary learn nothing"


@pytest.mark.parametrize("trains_weight", [False, True])
@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
def test_gradients_of_an_adapted_head_are_exact(
    monkeypatch: pytest.MonkeyPatch, chunk_rows: int, trains_weight: bool
) -> None:
    """Wrong: a chunk's update is left out of the logits, or its gradient out of the sum."""
    monkeypatch.setattr(linear_loss, "CHUNK_ELEMENTS", chunk_rows * PADDED)
    hidden, weight, targets = inputs_of(torch.float32)
    weight.requires_grad_(trains_weight)
    low = torch.randn(2, ROWS // 2, 3).requires_grad_()
    update = torch.randn(PADDED, 3).requires_grad_()
    factors = HeadFactors(hidden, weight, low, update)
    (3.0 * linear_cross_entropy_sum(factors, targets, VOCABULARY)).backward()
    ours = [each.grad for each in (hidden, weight, low, update)]
    exact = [each.detach().double().requires_grad_() for each in (hidden, weight, low, update)]
    logits = (exact[0] @ exact[1].T + exact[2] @ exact[3].T)[..., :VOCABULARY]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    (3.0 * loss).backward()
    assert (ours[1] is not None) == trains_weight
    for found, each in zip(ours, exact, strict=True):
        if found is not None:
            assert each.grad is not None
            torch.testing.assert_close(found.double(), each.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("chunk_rows", [1, 16])
def test_chunks_of_a_weights_gradient_add_up_in_fp32(
    monkeypatch: pytest.MonkeyPatch, chunk_rows: int, parts: int
) -> None:
    """Wrong: sums in bf16, which lose most of what the last of 2,048 positions add."""
    monkeypatch.setattr(linear_loss, "CHUNK_ELEMENTS", chunk_rows * PADDED // parts)
    torch.manual_seed(0)
    hidden = (1.0 + torch.randn(2048, WIDTH)).bfloat16()
    weight = (0.3 * torch.randn(PADDED, WIDTH)).bfloat16()
    targets = torch.randint(0, PADDED, (len(hidden),))
    logits = (hidden @ weight.T).double().requires_grad_()
    F.cross_entropy(logits, targets, reduction="sum").backward()
    assert logits.grad is not None
    exact = logits.grad.T @ hidden.double()

    def rank(tp: Any) -> Tensor:
        part = weight.chunk(parts)[tp.rank].clone().requires_grad_()
        cut = CutVocabulary(tp.group, parts, len(part) * tp.rank, PADDED, PADDED)
        loss = linear_cross_entropy_sum(
            HeadFactors(hidden, part), targets, cut if parts > 1 else PADDED
        )
        (gradient,) = torch.autograd.grad(loss, (part,))
        return gradient

    found = torch.cat(run_ranks(parts, rank)).double()
    errors = (found - exact).norm(dim=1) / exact.norm(dim=1)
    assert float(errors.max()) <= 5e-3


@pytest.mark.parametrize("parts", [1, 2])
def test_a_scale_keeps_small_gradients_in_fp16(parts: int) -> None:
    """Each of 8,192 tokens has a probability near 1e-4, and most a gradient below fp16's least
    normal number; what the backward pass gives is scaled as its root says.
    """
    vocabulary, scale = 8192, 1024.0
    hidden = 0.1 * torch.randn(3, WIDTH).half()
    weight = 0.1 * torch.randn(vocabulary, WIDTH).half()
    targets = torch.randint(0, vocabulary, (3,))
    exact = weight.double().requires_grad_()
    F.cross_entropy(hidden.double() @ exact.T, targets, reduction="sum").backward()
    assert exact.grad is not None

    def rank(tp: Any) -> Tensor:
        part = weight.chunk(parts)[tp.rank].clone().requires_grad_()
        size = vocabulary // parts
        cut = CutVocabulary(tp.group, parts, size * tp.rank, vocabulary, vocabulary)
        terms = LossTerms(gradient_scale=scale)
        loss = linear_cross_entropy_sum(
            HeadFactors(hidden, part), targets, cut if parts > 1 else vocabulary, terms
        )
        (gradient,) = torch.autograd.grad(loss, (part,), torch.tensor(scale))
        return gradient

    found = torch.cat(run_ranks(parts, rank)).double() / scale
    assert float((found - exact.grad).abs().max()) <= 1e-3 * float(exact.grad.abs().max())
    others = exact.grad.abs() < 1e-5
    error = float((found - exact.grad)[others].norm() / exact.grad[others].norm())
    assert error <= 1e-3, "without the scale it is 1e-2"


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out


def test_a_stage_never_holds_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "CHUNK_ELEMENTS", 1)
    config = tiny_config("llama", vocab_size=4096)
    stage = build_stage(config, range(3, 3), None, CPU, torch.float32)
    parameters = {name: torch.randn(shape) for name, shape in stage.weights.local_shapes().items()}
    stage.weights.load(parameters)
    hidden = torch.randn(4, 16, int(config.hidden_size)).requires_grad_()
    targets = torch.randint(0, 4096, (4, 16))
    with LargestTensor() as largest:
        stage.loss(hidden, targets).backward()
    assert largest.elements <= 4096 * int(config.hidden_size) < 4096 * targets.numel()
    twin = hidden.detach().clone().requires_grad_()
    whole = stage.loss_sum(stage(twin), targets)
    whole.backward()
    assert torch.allclose(stage.loss(hidden, targets), whole, rtol=1e-5)
    assert torch.allclose(hidden.grad, twin.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
@pytest.mark.parametrize(
    ("terms", "adjustment"),
    [
        (PLAIN, UNCHANGED),
        (LossTerms(label_smoothing=0.1, z_loss=1e-2), UNCHANGED),
        (LossTerms(label_smoothing=0.1, z_loss=1e-2), LogitAdjustment(0.5, 1.5, 2.0)),
    ],
)
@pytest.mark.parametrize("rows", [(32, 32), (48, 16), (16, 16, 32), (60, 4)])
def test_a_vocabulary_that_is_cut_gives_the_loss_and_gradients_of_a_whole_one(
    monkeypatch: pytest.MonkeyPatch,
    chunk_rows: int,
    rows: tuple[int, ...],
    terms: LossTerms,
    adjustment: LogitAdjustment,
) -> None:
    """Ranks of unequal rows take as many positions at a time; the last may have padding alone."""
    monkeypatch.setattr(linear_loss, "CHUNK_ELEMENTS", chunk_rows * PADDED // len(rows))
    hidden, weight, targets = inputs_of(torch.float32)
    whole = linear_cross_entropy_sum(
        HeadFactors(hidden, weight), targets, VOCABULARY, terms, adjustment
    )
    (3.0 * whole).backward()
    starts = [sum(rows[:rank]) for rank in range(len(rows))]

    def rank(tp: Any) -> tuple[Tensor, Tensor, Tensor]:
        start = starts[tp.rank]
        part = weight.detach()[start : start + rows[tp.rank]].clone().requires_grad_()
        own = hidden.detach().clone().requires_grad_()
        cut = CutVocabulary(tp.group, tp.degree, start, PADDED, VOCABULARY)
        loss = linear_cross_entropy_sum(HeadFactors(own, part), targets, cut, terms, adjustment)
        of_hidden, of_weight = torch.autograd.grad(3.0 * loss, (own, part))
        return loss.detach(), of_hidden, of_weight

    answers = run_ranks(len(rows), rank)
    assert hidden.grad is not None
    assert weight.grad is not None
    for loss, _, _ in answers:
        torch.testing.assert_close(loss, whole.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(sum(each[1] for each in answers), hidden.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        torch.cat([each[2] for each in answers]), weight.grad, rtol=1e-5, atol=1e-5
    )


def test_a_rank_of_a_group_never_holds_all_of_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "CHUNK_ELEMENTS", 2 * PADDED)
    hidden, weight, targets = inputs_of(torch.float32)

    def rank(tp: Any) -> int:
        part = weight.detach().chunk(2)[tp.rank].clone().requires_grad_()
        cut = CutVocabulary(tp.group, 2, 32 * tp.rank, PADDED, VOCABULARY)
        with LargestTensor() as seen:
            linear_cross_entropy_sum(HeadFactors(hidden.detach(), part), targets, cut)
        return seen.elements

    assert max(run_ranks(2, rank)) < ROWS * 32


def test_evaluation_computes_no_gradient_of_the_head() -> None:
    """Wrong: the product with the size of the head is computed again for a gradient nobody asks."""
    weight = torch.nn.Parameter(torch.randn(600, 80))
    hidden, targets = torch.randn(2, 5, 80), torch.randint(0, 600, (2, 5))
    expected = linear_cross_entropy_sum(HeadFactors(hidden, weight), targets, 600)
    with torch.no_grad(), LiveMemory([weight]) as memory:
        found = linear_cross_entropy_sum(HeadFactors(hidden, weight), targets, 600)
    assert found.item() == expected.item()
    assert memory.peak_bytes < weight.nbytes
