"""An exact decoder: every activation and gradient is a small integer, so that sums are bit-equal in
whatever order a fleet adds them.

Importing this module registers model type `exact_toy` with transformers and with the runtime, in
this process. Weights are real fp32 numbers that AdamW moves; the model sees them rounded to
integers, q(w) = clamp(round(8 w), -4, 4), and wraps what it computes back into a small range. Its
"gradients" are defined likewise (wrapped, token by token): deterministic, a sum over tokens, but no
derivative of the loss. All sums stay below 2^24 for global batches of up to 100,000 tokens, where
fp32 addition is exact. fp32 only.

Each layer has a `history` beside its weights, which nothing reads and whose gradient is zero:
`tests.harness.history` lets it tell by which generations its state was made.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from autohet.runtime.models.family import Family
from autohet.runtime.models.registry import FAMILIES, stage_parameter_names
from autohet.runtime.models.stages.stage_dropout import StageDropout
from autohet.runtime.models.stages.stage_spec import StageSpec
from planner.plans.plan import Recompute

TOY_CONFIG = {
    "model_type": "exact_toy",
    "vocab_size": 37,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "tie_word_embeddings": True,
}


class ExactConfig(PreTrainedConfig):
    model_type = "exact_toy"
    vocab_size: int = 37
    hidden_size: int = 16
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 4096
    history_size: int = 2
    """Elements of a layer's history: a million of them make 12 MB of state a layer, with both
    moments.
    """


class _Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.weight


class _Layer(nn.Module):
    def __init__(self, size: int, history_size: int) -> None:
        super().__init__()
        self.mix = nn.Linear(size, size, bias=False)
        self.back = nn.Linear(size, size, bias=False)
        self.norm = _Norm(size)
        self.history = _Norm(history_size)

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        return hidden + self.back(self.mix(self.norm(hidden)))


class _Decoder(nn.Module):
    def __init__(self, config: ExactConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            _Layer(config.hidden_size, config.history_size) for _ in range(config.num_hidden_layers)
        )
        self.norm = _Norm(config.hidden_size)


class ExactForCausalLM(PreTrainedModel):
    """Names and first weights of the parameters; computing is `ExactStage`'s."""

    config_class = ExactConfig
    _supports_sdpa = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: ExactConfig) -> None:
        super().__init__(config)
        self.model = _Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def _init_weights(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, 0.0, 0.3)
        if isinstance(module, _Layer):
            nn.init.zeros_(module.history.weight)


def quantise(weight: Tensor) -> Tensor:
    return (weight * 8).round().clamp(-4, 4)


def wrap(values: Tensor, reach: int) -> Tensor:
    """Integers to -reach..reach, modulo 2 reach + 1."""
    return torch.remainder(values + reach, 2 * reach + 1) - reach


def _sum(tensor: Tensor, tp: Any) -> Tensor:
    if tp is not None and tp.degree > 1:
        tensor = tensor.contiguous()
        tp.group.all_reduce(tensor)
    return tensor


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, mix: Tensor, back: Tensor, norm: Tensor, history: Tensor, tp: Any
    ) -> Tensor:
        inner = wrap(hidden @ quantise(mix).T, 4)
        ctx.tp = tp
        ctx.save_for_backward(hidden, inner, mix, back)
        ctx.history_shape = history.shape
        return wrap(hidden + _sum(inner @ quantise(back).T, tp) + quantise(norm), 8)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden, inner, mix, back = (tensor.flatten(0, -2) for tensor in ctx.saved_tensors)
        gradient = gradients[0].flatten(0, -2)
        to_inner = wrap(gradient @ quantise(back), 4)
        to_hidden = wrap(gradient + _sum(to_inner @ quantise(mix), ctx.tp), 8)
        weights = (
            to_inner.T @ hidden,
            gradient.T @ inner,
            gradient.sum(0),
            torch.zeros(ctx.history_shape, device=gradient.device),
        )
        return to_hidden.view(gradients[0].shape), *weights, None


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, start: int, tp: Any) -> Tensor:
        mine = (tokens >= start) & (tokens < start + weight.shape[0])
        rows = torch.where(mine, tokens - start, 0)
        ctx.save_for_backward(mine, rows)
        ctx.shape = weight.shape
        return _sum(quantise(weight)[rows] * mine.unsqueeze(-1), tp)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        mine, rows = ctx.saved_tensors
        gradient = torch.zeros(ctx.shape, device=gradients[0].device)
        gradient.index_add_(0, rows.flatten(), (gradients[0] * mine.unsqueeze(-1)).flatten(0, 1))
        return gradient, None, None, None


class _Loss(torch.autograd.Function):
    """Sum over tokens of (wrap(q(E[target]) . (h + q(norm))) - 3)^2."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, norm: Tensor, weight: Tensor, targets: Tensor, start: int, tp: Any
    ) -> Tensor:
        counted = targets >= 0
        mine = (targets >= start) & (targets < start + weight.shape[0])
        rows = torch.where(mine, targets - start, 0)
        final = wrap(hidden + quantise(norm), 8)
        score = _sum((quantise(weight)[rows] * final).sum(-1) * mine, tp)
        error = (wrap(score, 4) - 3) * counted
        ctx.tp = tp
        ctx.save_for_backward(final, weight, mine, rows, error)
        return (error * error).sum()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        final, weight, mine, rows, error = ctx.saved_tensors
        gradient = torch.zeros(weight.shape, device=weight.device)
        held = (error * mine).unsqueeze(-1)
        gradient.index_add_(0, rows.flatten(), (held * final).flatten(0, 1))
        to_hidden = wrap(_sum(held * quantise(weight)[rows], ctx.tp), 8)
        return to_hidden, to_hidden.flatten(0, 1).sum(0), gradient, None, None, None


EMBEDDING_TABLE = "model.embed_tokens"


class ExactWeights:
    """Parameters of an exact stage by name, with the interface of `StageWeights`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._parameters: dict[str, nn.Parameter] = {}

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        assert all(tensor.dtype == torch.float32 for tensor in parameters.values()), (
            "the exact model is fp32 only"
        )
        self._parameters = {name: nn.Parameter(parameters[name].detach()) for name in self._names}

    def local_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._parameters)


class ExactStage(nn.Module):
    """The runtime's stage interface (see `autohet.runtime.models.stages.stage.StageModel`); the
    last stage's "logits" are its hidden states.
    """

    def __init__(self, spec: StageSpec) -> None:
        super().__init__()
        self.spec = spec
        self.dropout = StageDropout(spec)
        layers = spec.layers
        self.weights = ExactWeights(stage_parameter_names(spec.config, layers.start, len(layers)))
        is_tied = spec.family.tied_head(spec.config)
        self.head = EMBEDDING_TABLE if is_tied else "lm_head"

    def forward(self, x: Tensor) -> Tensor:
        held = self.weights.local_parameters()
        tp = self.spec.tp
        if self.spec.is_first:
            start = self.spec.first_token(EMBEDDING_TABLE)
            x = _Embed.apply(held[f"{EMBEDDING_TABLE}.weight"], x, start, tp)
        for layer in self.spec.layers:
            path = f"model.layers.{layer}"
            weights = [held[f"{path}.{name}.weight"] for name in ("mix", "back", "norm", "history")]
            x = _Block.apply(x, *weights, tp)
        return x

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.loss_sum(self(x), targets)

    def loss_sum(self, logits: Tensor, targets: Tensor) -> Tensor:
        held = self.weights.local_parameters()
        return _Loss.apply(
            logits,
            held["model.norm.weight"],
            held[f"{self.head}.weight"],
            targets,
            self.spec.first_token(self.head),
            self.spec.tp,
        )


class ExactFamily(Family):
    def build_stage(
        self,
        config: Any,
        layers: range,
        tp: Any,
        device: torch.device,
        dtype: torch.dtype,
        recompute: Recompute = "none",
    ) -> ExactStage:
        assert dtype == torch.float32, "the exact model is fp32 only"
        return ExactStage(StageSpec(self, config, layers, tp, device, dtype))


FAMILY = ExactFamily(
    "exact_toy",
    rotary=None,
    tp_plan={"model.layers.*.mix": "colwise", "model.layers.*.back": "rowwise"},
    dropouts={},
)

if "exact_toy" not in FAMILIES:
    AutoConfig.register("exact_toy", ExactConfig)
    AutoModelForCausalLM.register(ExactConfig, ExactForCausalLM)
    FAMILIES["exact_toy"] = FAMILY
