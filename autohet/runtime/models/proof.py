"""Proof that training a model here gives the library's results.

A short model of the same widths, cut at every layer, at TP 1, 2 and 4, gives the library's logits
and gradients within TOLERANCE.

Everything runs in this process on the CPU, with ranks in threads.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from autohet.runtime.models.config_keys import entries_by_layer, with_layers
from autohet.runtime.models.error_text import first_line
from autohet.runtime.models.family import Family
from autohet.runtime.models.layers.adapters import ADAPTER
from autohet.runtime.models.layers.dropout import dropout_of
from autohet.runtime.models.layers.experts import CORRECTION_BIAS, is_dense
from autohet.runtime.models.layers.tensor_parallel import TensorParallel
from autohet.runtime.models.parameter_spec import (
    PADDED,
    WHOLE,
    ParameterSpec,
    local_units,
    take_units,
)
from autohet.runtime.models.registry import family_of, stage_parameter_names
from autohet.runtime.models.stages.stage import StageModel, build_stage
from autohet.runtime.models.thread_group import run_ranks
from planner.errors import ConfigError
from planner.inputs.documents import Document
from planner.plans.plan import TensorShare

TOLERANCE = 1e-5
"""Largest allowed difference in a tensor, relative to its largest element; all in fp32."""
NEAR_ZERO = 1e-3
"""Smallest scale for errors of gradients, as a share of the model's largest gradient.

A bias of keys without positions, for example, has a gradient of mere noise.
"""
DEGREES = (1, 2, 4)
SEQUENCES = 2
LENGTH = 12
MAX_LAYERS = 4
MAX_ROWS = 256
"""Upper limit on the vocabulary and an MLP's inner width, which do not change the mathematics."""
MAX_BLOCK_PARAMETERS = 400_000_000
WEIGHT_SCALE = 0.2
"""Standard deviation of random weights of a tiny model; for wide models 1 / sqrt(width)."""


@dataclass(frozen=True)
class ProofCase:
    """Differences from the library's results for a single way to cut the model."""

    layers_by_stage: tuple[int, ...]
    tp_degree: int
    logits_error: float
    gradient_error: float
    worst_parameter: str

    @property
    def error(self) -> float:
        return max(self.logits_error, self.gradient_error)

    @property
    def passed(self) -> bool:
        return self.error <= TOLERANCE

    def to_document(self) -> Document:
        return {**asdict(self), "passed": self.passed}


@dataclass(frozen=True)
class ModelProof:
    """Results of all comparisons.

    `first_difference`: the first module, in order of execution, whose input or output differs from
    the library's; None if all agree. `dropouts`: rates of the config's dropouts by place, which
    were not compared.
    """

    model_type: str
    layers: int
    cases: tuple[ProofCase, ...]
    first_difference: str | None = None
    skipped_degrees: tuple[int, ...] = ()
    dropouts: Mapping[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(case.passed for case in self.cases)

    def to_document(self) -> Document:
        return {
            "model_type": self.model_type,
            "layers": self.layers,
            "tolerance": TOLERANCE,
            "passed": self.passed,
            "first_difference": self.first_difference,
            "skipped_tp_degrees": list(self.skipped_degrees),
            "unproved_dropouts": dict(self.dropouts),
            "cases": [case.to_document() for case in self.cases],
        }


@dataclass
class _Trace:
    """First input tensor and first output tensor of each module, in order of execution."""

    values: dict[str, Tensor] = field(default_factory=dict)

    def watch(self, module: nn.Module, path: str) -> None:
        def before(_: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            given = arguments[0] if arguments else named.get("hidden_states")
            self._note(f"the input of {path}", given)

        def after(_: nn.Module, arguments: Any, out: Any) -> None:
            first = out[0] if isinstance(out, tuple) else out
            self._note(f"the output of {path}", first)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)

    def _note(self, place: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            self.values.setdefault(place, value.detach().clone())


def short_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a short config of the same model: few layers, few tokens and narrow MLPs.

    Each of its layer types is among the layers; hidden size and heads stay.
    """
    short = with_layers(config, _layers_to_prove(config))
    short.vocab_size = min(int(config.vocab_size), MAX_ROWS)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        token = getattr(config, key, None)
        if isinstance(token, list):
            setattr(short, key, [each % short.vocab_size for each in token])
        elif isinstance(token, int):
            setattr(short, key, token % short.vocab_size)
    for key in ("intermediate_size", "moe_intermediate_size"):
        width = getattr(config, key, None)
        if isinstance(width, int):
            setattr(short, key, min(width, MAX_ROWS))
    if isinstance(getattr(config, "sliding_window", None), int):
        short.sliding_window = min(int(config.sliding_window), LENGTH // 2)
    # An adapter's frozen base is proved with gradients of its own.
    for key in (PADDED, ADAPTER):
        short.__dict__.pop(key, None)
    return short


def _layers_to_prove(config: PreTrainedConfig) -> list[int]:
    """Return the first layer of each kind, and others up to MAX_LAYERS, in ascending order."""
    total = int(config.num_hidden_layers)
    by_layer = entries_by_layer(config)
    chosen: dict[object, int] = {}
    for index in range(total):
        entries = [each[index] for each in by_layer.values()]
        kind = (is_dense(config, index), *entries)
        chosen.setdefault(kind, index)
    layers = set(chosen.values())
    for index in range(total):
        if len(layers) < MAX_LAYERS:
            layers.add(index)
    return sorted(layers)


def prove_model(config: PreTrainedConfig, degrees: Sequence[int] = DEGREES) -> ModelProof:
    """Compare a config's model, shortened, with the library's.

    Raises:
        ConfigError: the family does not fit the model's modules, or its blocks need inputs that no
        stage gives them.
    """
    try:
        return _prove(config, degrees)
    except (TypeError, LookupError, AttributeError, RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"model_type '{config.model_type}' cannot be cut into stages: {first_line(error)}; its"
            " blocks need more than hidden states, a mask and rotary tables"
        ) from error


def _prove(config: PreTrainedConfig, degrees: Sequence[int]) -> ModelProof:
    short = short_config(config)
    family = family_of(short)
    generator = torch.Generator().manual_seed(0)
    specs = family.parameter_specs(short)
    in_first_block = [spec for spec in specs.values() if spec.layer == 0]
    num_parameters = sum(math.prod(spec.shape) for spec in in_first_block)
    if num_parameters > MAX_BLOCK_PARAMETERS:
        raise ConfigError(
            f"a block of this model has {num_parameters} parameters, too many to prove on a CPU;"
            " give check-model a job with a smaller model of the same type"
        )
    scale = min(WEIGHT_SCALE, float(short.hidden_size) ** -0.5)
    parameters = {
        name: torch.randn(spec.shape, generator=generator) * scale for name, spec in specs.items()
    }
    expected, trace = _library(short, family, parameters)
    layers = family.num_layers(short)
    finest = family.max_tp_degree(short)
    cases: list[ProofCase] = []
    skipped: list[int] = []
    for degree in degrees:
        if finest % degree:
            skipped.append(degree)
            continue
        # One stage, two stages cut at each border, and a stage for each layer.
        cuts: list[tuple[int, ...]] = [(layers,)]
        cuts += [(first, layers - first) for first in range(1, layers)]
        if layers > 2:
            cuts.append((1,) * layers)
        for cut in cuts:
            cases.append(_compare(short, parameters, expected, cut, degree))
    difference = None
    if not all(case.passed for case in cases):
        difference = _first_difference(short, family, parameters, trace)
    # The library's masks depend on torch's generator, so both models run without dropout.
    return ModelProof(
        str(config.model_type),
        layers,
        tuple(cases),
        difference,
        tuple(skipped),
        dropout_of(short).by_place(),
    )


def require_proof(config: PreTrainedConfig) -> None:
    """Check that training gives the results of transformers.

    Raises:
        ConfigError: it does not, with the first module that differs; or its blocks cannot be run.
    """
    proof = prove_model(config)
    if proof.passed:
        return
    worst = max(proof.cases, key=lambda case: case.error)
    where = proof.first_difference or f"the gradient of {worst.worst_parameter}"
    raise ConfigError(
        f"model_type '{proof.model_type}' is not trained as transformers computes it: {where}"
        f" differs (logits by {worst.logits_error:.1e}, gradients by {worst.gradient_error:.1e} at"
        f" TP {worst.tp_degree}). Give the family the hook that it lacks; autohet check-model shows"
        " every case"
    )


@dataclass(frozen=True)
class _Result:
    logits: Tensor
    gradients: Mapping[str, Tensor]


def _batch(config: PreTrainedConfig) -> tuple[Tensor, Tensor]:
    """Return tokens and targets; the padding token occurs, and one target is ignored."""
    generator = torch.Generator().manual_seed(1)
    shape = (SEQUENCES, LENGTH + 1)
    tokens = torch.randint(0, int(config.vocab_size), shape, generator=generator)
    if isinstance(config.pad_token_id, int) and config.pad_token_id >= 0:
        tokens[0, 2] = config.pad_token_id
    targets = tokens[:, 1:].clone()
    targets[0, 3] = -100
    return tokens[:, :-1].contiguous(), targets


def _library(
    config: PreTrainedConfig, family: Family, parameters: Mapping[str, Tensor]
) -> tuple[_Result, _Trace]:
    """Run transformers' own model; return its results, and its modules' inputs and outputs."""
    model = AutoModelForCausalLM.from_config(
        copy.deepcopy(config),
        attn_implementation=family.stock_attention,
        dtype=torch.float32,
        trust_remote_code=False,
    )
    model.load_state_dict(dict(parameters), strict=False)
    trace = _Trace()
    for path, module in model.named_modules():
        if path and path != family.base:
            trace.watch(module, path)
    tokens, targets = _batch(config)
    logits = model(tokens, use_cache=False).logits
    F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    ).backward()
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
    # The library has these as buffers, which have no gradient; without counts ours is 0.
    for name, buffer in model.named_buffers():
        if name.endswith(CORRECTION_BIAS):
            gradients[name] = torch.zeros_like(buffer)
    return _Result(logits.detach(), gradients), trace


def _stages(
    config: PreTrainedConfig,
    parameters: Mapping[str, Tensor],
    cut: Sequence[int],
    tp: TensorParallel | None,
) -> list[StageModel]:
    specs = family_of(config).parameter_specs(config)
    share = WHOLE if tp is None else tp.share
    stages = []
    first = 0
    for num_layers in cut:
        layers = range(first, first + num_layers)
        stage = build_stage(config, layers, tp, torch.device("cpu"), torch.float32)
        weights: dict[str, Tensor] = {}
        for name in stage_parameter_names(config, first, num_layers):
            units = local_units(specs[name], share)
            weights[name] = take_units(specs[name], units, parameters[name])
        stage.weights.load(weights)
        stages.append(stage)
        first += num_layers
    return stages


def _compare(
    config: PreTrainedConfig,
    parameters: Mapping[str, Tensor],
    expected: _Result,
    cut: tuple[int, ...],
    degree: int,
) -> ProofCase:
    results: list[_Result] = run_ranks(degree, partial(_train, config, parameters, cut))
    logits = torch.cat([result.logits for result in results], -1)
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    floor = NEAR_ZERO * max(1.0, largest)
    errors: dict[str, float] = {}
    for name, spec in family_of(config).parameter_specs(config).items():
        if name in expected.gradients:
            gradient = _join(spec, name, results)
            errors[name] = _error(gradient, expected.gradients[name], floor)
    worst = max(errors, key=lambda name: errors[name])
    logits_error = _error(logits, expected.logits)
    return ProofCase(cut, degree, logits_error, errors[worst], worst)


def _train(
    config: PreTrainedConfig,
    parameters: Mapping[str, Tensor],
    cut: Sequence[int],
    tp: TensorParallel,
) -> _Result:
    """Return local logits, and this rank's gradients before gradient sync."""
    stages = _stages(config, parameters, cut, tp if tp.degree > 1 else None)
    tokens, targets = _batch(config)
    hidden = tokens
    borders = []
    for stage in stages:
        given = hidden if stage.spec.is_first else hidden.detach().requires_grad_()
        hidden = stage(given)
        borders.append((given, hidden))
    stages[-1].loss_sum(hidden, targets).backward()
    # Each stage begins with the gradient that the one after it has for its input.
    for index in reversed(range(len(borders) - 1)):
        _, output = borders[index]
        next_input, _ = borders[index + 1]
        output.backward(next_input.grad)

    gradients: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.weights.local_parameters().items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            # A tied embedding is on the first and on the last stage.
            if name in gradients:
                gradient = gradients[name] + gradient
            gradients[name] = gradient
    return _Result(hidden.detach(), gradients)


def _join(spec: ParameterSpec, name: str, results: Sequence[_Result]) -> Tensor:
    """Join the ranks' gradients to the whole gradient, as gradient sync sums them."""
    if spec.split_dim is None:
        if not spec.partial_gradient:
            return results[0].gradients[name]
        parts = [result.gradients[name] for result in results]
        return torch.stack(parts).sum(0)
    whole = torch.zeros(spec.shape)
    for rank, result in enumerate(results):
        share = TensorShare(rank, rank + 1, len(results))
        start = 0
        for unit in local_units(spec, share):
            size = spec.unit_length(unit)
            piece = result.gradients[name].narrow(spec.split_dim, start, size)
            # Several ranks may hold a unit of keys or values: their gradients add up.
            place = whole.narrow(spec.split_dim, spec.cuts[unit], size)
            place.add_(piece)
            start += size
    return whole


def _error(found: Tensor, expected: Tensor, floor: float = NEAR_ZERO) -> float:
    if found.shape != expected.shape:
        return float("inf")
    difference = (found - expected).abs().max()
    scale = expected.abs().max().clamp(min=floor)
    return float(difference / scale)


def _first_difference(
    config: PreTrainedConfig, family: Family, parameters: Mapping[str, Tensor], expected: _Trace
) -> str | None:
    """Find the first place where one stage on one rank has another value than the library.

    Places are in the library's order of execution.
    """
    (stage,) = _stages(config, parameters, (family.num_layers(config),), None)
    trace = _Trace()
    for ours, theirs in stage.paths.items():
        for path, module in stage.get_submodule(ours).named_modules():
            trace.watch(module, f"{theirs}.{path}" if path else theirs)
    tokens, _ = _batch(config)
    stage(tokens)
    for place, value in expected.values.items():
        found = trace.values.get(place)
        if found is not None and _error(found, value) > TOLERANCE:
            return place
    return None
