"""Terms of a training loss beyond plain cross entropy."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LossTerms:
    """Weights of the loss terms; the loss of each counted target is:

        (1 - label_smoothing) * nll + label_smoothing * mean over the vocabulary of -log p
            + z_loss * (log of the sum of exponentials)^2

    label_smoothing: as in `torch.nn.functional.cross_entropy`. z_loss: as in PaLM (Chowdhery et
    al., 2022, section 5). router_balance: weight of the balance loss of each router
    (`experts.sequence_balance`), which is no part of the loss that is reported. counts_tokens:
    routers with a correction bias count the tokens of each expert. gradient_scale: factor of all
    gradients in a stage in fp16, with which the backward pass begins; terms whose gradients are
    computed ahead, or added on the way, take it from here.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    router_balance: float = 0.0
    counts_tokens: bool = False
    gradient_scale: float = 1.0


PLAIN = LossTerms()
"""Cross entropy alone, used in evaluation and in most training."""


@dataclass(frozen=True)
class AnswerLosses:
    """Cross entropy of each row's chosen and rejected answer, and of the chosen one's prompt.

    sums: fp32 [b, 2], over the answers' targets; counts: their numbers, int64 [b, 2]. prompt: fp32
    [b], over prompt_counts tokens; None where it was not asked for.
    """

    sums: Tensor
    counts: Tensor
    prompt: Tensor | None = None
    prompt_counts: Tensor | None = None
