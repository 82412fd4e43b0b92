"""The loss in chunks of rows: PyTorch's value and gradient, and never the whole logits in fp32."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autohet.runtime.models.layers import linear_loss
from autohet.runtime.models.layers.linear_loss import CutVocabulary, cross_entropy_sum
from autohet.runtime.models.thread_group import run_ranks

ROWS, VOCABULARY = 40, 96


class LargestFp32(TorchDispatchMode):
    """The most elements that any fp32 tensor has had."""

    elements = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32:
                self.elements = max(self.elements, leaf.numel())
        return out


def case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    targets = torch.randint(0, VOCABULARY, (2, ROWS // 2))
    targets[0, 3] = targets[1, 7] = -100
    return (4 * torch.randn(2, ROWS // 2, VOCABULARY)).to(dtype).requires_grad_(), targets


@pytest.mark.parametrize("chunk", [1, 7 * VOCABULARY, 1 << 24])
@pytest.mark.parametrize("degree", [1, 2])
def test_value_and_gradient_are_pytorchs(
    monkeypatch: pytest.MonkeyPatch, chunk: int, degree: int
) -> None:
    monkeypatch.setattr(linear_loss, "CHUNK_ELEMENTS", chunk)
    logits, targets = case(torch.float32)
    wanted = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    (gradient,) = torch.autograd.grad(3 * wanted, logits)
    width = VOCABULARY // degree

    def rank(tp: Any) -> tuple[torch.Tensor, torch.Tensor]:
        part = (
            logits.detach()[..., tp.rank * width : (tp.rank + 1) * width]
            .contiguous()
            .requires_grad_()
        )
        cut = CutVocabulary(tp.group, degree, tp.rank * width, VOCABULARY, VOCABULARY)
        loss = cross_entropy_sum(part, targets, cut)
        return loss.detach(), torch.autograd.grad(3 * loss, part)[0]

    answers = run_ranks(degree, rank)
    for loss, _ in answers:
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        torch.cat([part for _, part in answers], -1), gradient, rtol=1e-5, atol=1e-6
    )


def test_bf16_logits_are_never_whole_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_loss, "CHUNK_ELEMENTS", 5 * VOCABULARY)
    logits, targets = case(torch.bfloat16)
    with LargestFp32() as seen:
        cross_entropy_sum(logits, targets, VOCABULARY).backward()
    assert seen.elements <= 5 * VOCABULARY
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_columns_that_pad_the_vocabulary_count_nothing(degree: int) -> None:
    """Twice as many columns, whose logits are the largest: half of the ranks have no token of their
    own.
    """
    logits, targets = case(torch.float32)
    wanted = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    (gradient,) = torch.autograd.grad(3 * wanted, logits)
    padded = torch.cat([logits.detach(), torch.full_like(logits, 99.0)], -1)
    width = padded.shape[-1] // degree

    def rank(tp: Any) -> tuple[torch.Tensor, torch.Tensor]:
        start = tp.rank * width
        part = padded[..., start : start + width].contiguous().requires_grad_()
        cut = CutVocabulary(tp.group, degree, start, padded.shape[-1], VOCABULARY)
        loss = cross_entropy_sum(part, targets, cut)
        return loss.detach(), torch.autograd.grad(3 * loss, part)[0]

    answers = run_ranks(degree, rank)
    for loss, _ in answers:
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=0)
    found = torch.cat([part for _, part in answers], -1)
    torch.testing.assert_close(found[..., :VOCABULARY], gradient, rtol=1e-5, atol=1e-6)
    assert not found[..., VOCABULARY:].any()
