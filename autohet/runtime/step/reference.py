"""Reference training of a job in one process: the library's whole model and torch's optimizers.

Tests compare an undisturbed run with it. It shares with the trainer only what defines the job: the
first weights, the sample order, the learning rate's formula.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from autohet.runtime.job import TrainingSection
from autohet.runtime.models.layers.adapters import (
    B_SUFFIX,
    adapter_of,
    is_adapter,
    peft_targets,
)
from autohet.runtime.models.layers.expert_adapters import in_peft_layout
from autohet.runtime.models.layers.experts import CORRECTION_BIAS, ROUTERS, STACKS
from autohet.runtime.models.layers.pieces import piece_mask, positions_of
from autohet.runtime.models.registry import family_of
from autohet.runtime.models.skeleton import skeleton
from autohet.runtime.state.optimizer import parameters_without_decay
from autohet.runtime.step.learning_rate import learning_rate, matrix_learning_rate

Rows = Callable[[int, range], tuple[Tensor, Tensor]]
Begins = Callable[[int, range], Tensor]
PREFIX = "base_model.model."
DEFAULT = ".default"
"""Ends of the names that peft gives to adapters."""


def reference_model(
    config: PreTrainedConfig, parameters: Iterator[tuple[str, Tensor]]
) -> PreTrainedModel:
    """Build the library's model with these parameters, without rows that pad a vocabulary."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config,
        attn_implementation=family_of(config).stock_attention,
        dtype=torch.float32,
        trust_remote_code=False,
    )
    named: dict[str, Tensor] = dict(model.named_parameters())
    named |= dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in parameters:
            own = named[name]
            own.copy_(tensor[: len(own)])
    return model


def peft_reference_model(config: PreTrainedConfig, parameters: Mapping[str, Tensor]) -> Any:
    """Build the library's model with these parameters and with peft's adapters (package `peft`)."""
    from peft import get_peft_model

    base = {name: tensor for name, tensor in parameters.items() if not is_adapter(name)}
    model = reference_model(config, iter(base.items()))
    adapted = get_peft_model(model, lora_config(config, model))
    with torch.no_grad():
        for name, tensor in named_adapters(adapted):
            value = parameters[name]
            if is_adapter(name):
                value = in_peft_layout(value, name.endswith(B_SUFFIX))
            own = [slice(size) for size in tensor.shape]
            tensor.copy_(value[tuple(own)])
    return adapted


def lora_config(config: PreTrainedConfig, model: PreTrainedModel) -> Any:
    """Return the config's adapter as a `peft.LoraConfig`."""
    from peft import LoraConfig

    adapter = adapter_of(config)
    assert adapter is not None
    family = family_of(config)
    ranks = family.adapter_ranks(adapter, skeleton(config))
    targets = peft_targets(ranks, model, adapter)
    first = model.get_submodule(targets["target_modules"][0]) if targets["target_modules"] else None
    ties = family.tied_head(config) and adapter.saves(f"{family.token_embedding}.weight")
    alpha: Any = adapter.alpha  # peft declares an int and takes any number
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=alpha,
        **targets,
        use_rslora=adapter.rslora,
        modules_to_save=list(adapter.modules_to_save) or None,
        ensure_weight_tying=ties,
        fan_in_fan_out=isinstance(first, Conv1D),
        lora_dropout=0.0,
    )


def named_adapters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (name as the runtime has it, parameter) of the matrices that peft trains.

    Those of stacks of experts have peft's layout.
    """
    for name, tensor in model.named_parameters():
        if tensor.requires_grad:
            path, lora, factor = name.partition(".lora_")
            stack = getattr(model.get_submodule(path), "parameter_name", None) if lora else None
            if stack in STACKS:
                path = f"{path.removesuffix('.base_layer')}.{stack}"
            yield _own_name(path + lora + factor), tensor


def _own_name(name: str) -> str:
    """Return the runtime's name of a parameter of peft's or the library's model."""
    inner = name.removeprefix(PREFIX).replace(".modules_to_save", "")
    return inner.replace(DEFAULT, "")


def train_reference(
    model: PreTrainedModel,
    training: TrainingSection,
    rows: Rows,
    steps: int,
    microbatch_sequences: int = 8,
    begins: Begins | None = None,
) -> Iterator[float]:
    """Train in place; yield each step's loss (mean over the targets of the global batch).

    On a GPU the update is one fused kernel.

    begins: function that returns the map of pieces of positions of a step, bool [b, S]; None: each
    row is one piece.
    """
    optimizer = adamw(model, training)
    muon = _ReferenceMuon(model, training)
    model.train()
    routers = _Routers(model)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(training, step)
        model.zero_grad()
        tokens, targets = rows(step, range(training.global_batch_sequences))
        num_targets = int((targets >= 0).sum())
        # On the device, and read once: the host need not wait for each microbatch.
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        for first in range(0, len(tokens), microbatch_sequences):
            places = range(first, min(first + microbatch_sequences, len(tokens)))
            part = tokens[places.start : places.stop]
            wanted = targets[places.start : places.stop]
            inputs: dict[str, Any] = {}
            if begins is not None:
                inputs = isolation_inputs(begins(step, places), tokens.device)
            routers.begin()
            logits = model(part, **inputs).logits.float()
            loss_sum = _loss_sum(logits.flatten(0, 1), wanted.flatten(), training)
            loss = loss_sum / num_targets
            total += loss.detach()
            if training.balance_weight > 0:
                balance = training.balance_weight * routers.balance_sum(part.shape[1])
                loss = loss + balance / num_targets
            loss.backward()
        if training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
        muon.step(matrix_learning_rate(training, step))
        optimizer.step()
        if training.router_balance == "bias":
            routers.move_biases(training.router_bias_speed)
        yield float(total)


def adamw(model: PreTrainedModel, training: TrainingSection) -> torch.optim.AdamW:
    """Return AdamW of a job, in two groups: with weight decay and without.

    It has all parameters but those of Muon.
    """
    specs = family_of(model.config).parameter_specs(model.config)
    undecayed = parameters_without_decay(training, specs)
    with_decay: list[Tensor] = []
    without_decay: list[Tensor] = []
    for name, tensor in model.named_parameters():
        own_name = _own_name(name)
        if own_name in specs and specs[own_name].uses_muon:
            continue
        if own_name in undecayed:
            without_decay.append(tensor)
        else:
            with_decay.append(tensor)
    groups: list[dict[str, Any]] = [
        {"params": with_decay},
        {"params": without_decay, "weight_decay": 0.0},
    ]
    first = next(model.parameters())
    return torch.optim.AdamW(
        groups,
        lr=training.learning_rate,
        betas=training.betas,
        eps=training.eps,
        weight_decay=training.weight_decay,
        fused=first.is_cuda or None,
    )


class _ReferenceMuon:
    """`torch.optim.Muon` over the matrices of a job; no-op unless its optimizer is Muon.

    A stack of experts is one tensor of the library: each expert's matrix is a view of it.
    """

    def __init__(self, model: PreTrainedModel, training: TrainingSection) -> None:
        specs = family_of(model.config).parameter_specs(model.config)
        undecayed = parameters_without_decay(training, specs)
        self._optimizers: list[tuple[Tensor, torch.optim.Muon]] = []
        for name, tensor in model.named_parameters():
            if name in specs and specs[name].uses_muon:
                optimizer = torch.optim.Muon(
                    list(_matrices_of(tensor.detach())),
                    weight_decay=0.0 if name in undecayed else training.weight_decay,
                    momentum=training.muon_momentum,
                    adjust_lr_fn=training.muon_adjust,
                )
                self._optimizers.append((tensor, optimizer))

    def step(self, rate: float) -> None:
        for tensor, optimizer in self._optimizers:
            (group,) = optimizer.param_groups
            group["lr"] = rate
            assert tensor.grad is not None
            for matrix, own in zip(group["params"], _matrices_of(tensor.grad), strict=True):
                matrix.grad = own
            optimizer.step()


def _matrices_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1, *tensor.shape[-2:])


def isolation_inputs(begins: Tensor, device: torch.device) -> dict[str, Any]:
    """Return the model's arguments that keep the pieces of rows apart.

    begins: map of pieces, bool [b, S].
    """
    mask = piece_mask(begins, None, device)
    positions = positions_of(begins).to(device)
    return {"attention_mask": mask, "position_ids": positions}


def loss_of_rows(model: PreTrainedModel, tokens: Tensor, targets: Tensor, begins: Tensor) -> Tensor:
    """Return the sum of cross entropy over the targets of rows [b, S] with these pieces."""
    inputs = isolation_inputs(begins, tokens.device)
    logits = model(tokens, **inputs).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def _loss_sum(logits: Tensor, targets: Tensor, training: TrainingSection) -> Tensor:
    """Return the sum of losses over the targets that count."""
    smoothing = training.label_smoothing
    total = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    if training.z_loss:
        counted = targets >= 0
        squares = logits.logsumexp(-1).square() * counted
        total = total + training.z_loss * squares.sum()
    return total


class _Routers:
    """Routers of a library's model: their last logits and choices, and counts of a step."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._passes: list[tuple[nn.Module, Tensor, Tensor]] = []
        self._counts: dict[nn.Module, Tensor] = {}
        for name, module in model.named_modules():
            if name.endswith(ROUTERS):
                module.register_forward_hook(self._record)

    def _record(self, router: nn.Module, args: Any, out: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, _, index = out
        self._passes.append((router, logits, index))
        counts = index.flatten().bincount(minlength=logits.shape[-1])
        self._counts[router] = self._counts.get(router, 0) + counts

    def begin(self) -> None:
        """Forget the passes of the last microbatch."""
        self._passes = []

    def balance_sum(self, length: int) -> Tensor:
        """Return the balance loss of all routers, summed over tokens of sequences of a length."""
        total = torch.zeros(())
        for router, all_logits, all_choices in self._passes:
            # The rows of a microbatch lie one after the other; each has a loss of its own.
            by_row = zip(all_logits.float().split(length), all_choices.split(length), strict=True)
            for logits, index in by_row:
                num_experts = logits.shape[-1]
                scores = logits.softmax(-1)
                if hasattr(router, CORRECTION_BIAS):
                    scores = F.normalize(logits.sigmoid(), p=1.0, dim=-1)
                chosen = F.one_hot(index, num_experts).sum(1)
                shares = chosen.float().mean(0) * num_experts / index.shape[1]
                balance = (shares * scores.mean(0)).sum()
                total = total.to(logits.device) + length * balance
        return total

    @torch.no_grad()
    def move_biases(self, speed: float) -> None:
        """Move each correction bias by the counts since the last call."""
        for router, counts in self._counts.items():
            bias: Any = getattr(router, CORRECTION_BIAS)
            mean = int(counts.sum()) / len(counts)
            for expert, count in enumerate(counts.tolist()):
                direction = (count < mean) - (count > mean)
                bias[expert] += speed * direction
        self._counts = {}
