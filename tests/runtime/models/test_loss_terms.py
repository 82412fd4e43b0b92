"""Label smoothing and z-loss against torch's own functions, in the fused head and cut along the
vocabulary.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autohet.runtime.models.layers import linear_loss
from autohet.runtime.models.layers.linear_loss import (
    CutVocabulary,
    HeadFactors,
    cross_entropy_sum,
    linear_cross_entropy_sum,
)
from autohet.runtime.models.layers.loss_terms import LossTerms
from autohet.runtime.models.thread_group import run_ranks

ROWS, WIDTH, VOCABULARY, PADDED = 12, 8, 20, 32
TERMS = [LossTerms(0.1, 0.0), LossTerms(0.0, 1e-2), LossTerms(0.3, 1e-2)]


def expected_sum(logits: Tensor, targets: Tensor, terms: LossTerms) -> Tensor:
    """torch's own cross entropy, and the square of torch's logsumexp."""
    total = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=terms.label_smoothing)
    squares = logits.logsumexp(-1).square()
    return total + terms.z_loss * squares[targets >= 0].sum()


def targets_with_gaps() -> Tensor:
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=torch.Generator().manual_seed(1))
    targets[3] = targets[7] = -100
    return targets


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("chunk_rows", [5, ROWS])
def test_the_fused_head_has_torchs_loss_and_gradients(
    monkeypatch: pytest.MonkeyPatch, chunk_rows: int, terms: LossTerms
) -> None:
    monkeypatch.setattr(linear_loss, "CHUNK_ELEMENTS", chunk_rows * PADDED)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()
    weight = torch.randn(PADDED, WIDTH, generator=generator).requires_grad_()
    targets = targets_with_gaps()
    found = linear_cross_entropy_sum(HeadFactors(hidden, weight), targets, VOCABULARY, terms)
    ours = torch.autograd.grad(3.0 * found, (hidden, weight))
    wanted = expected_sum((hidden @ weight.T)[:, :VOCABULARY], targets, terms)
    theirs = torch.autograd.grad(3.0 * wanted, (hidden, weight))
    torch.testing.assert_close(found.detach(), wanted.detach(), rtol=1e-6, atol=0)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_a_cut_vocabulary_has_torchs_loss_and_gradients(
    monkeypatch: pytest.MonkeyPatch, degree: int, terms: LossTerms
) -> None:
    """Of four ranks one has padding alone, and one has both."""
    monkeypatch.setattr(linear_loss, "CHUNK_ELEMENTS", 5 * VOCABULARY)
    logits = torch.randn(ROWS, PADDED, generator=torch.Generator().manual_seed(0)) * 5
    targets = targets_with_gaps()
    real = logits[:, :VOCABULARY].clone().requires_grad_()
    wanted = expected_sum(real, targets, terms)
    (gradient,) = torch.autograd.grad(3.0 * wanted, real)
    width = PADDED // degree

    def rank(tp: Any) -> tuple[Tensor, Tensor]:
        start = tp.rank * width
        part = logits[:, start : start + width].clone().requires_grad_()
        cut = CutVocabulary(tp.group, tp.degree, start, PADDED, VOCABULARY)
        loss = cross_entropy_sum(part, targets, cut, terms)
        return loss.detach(), torch.autograd.grad(3.0 * loss, part)[0]

    answers = run_ranks(degree, rank)
    for loss, _ in answers:
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=0)
    found = torch.cat([part for _, part in answers], -1)
    torch.testing.assert_close(found[:, :VOCABULARY], gradient, rtol=1e-5, atol=1e-5)
    assert not found[:, VOCABULARY:].any()
