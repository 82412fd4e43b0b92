"""Measurement of this machine's device for a job: seconds of each layer and of the update.

The layers are embedding, one block of each kind, and head. The measured stages are those that
training runs (`autohet.runtime.models`), not stand-ins. On CUDA time is taken by events, on CPU by
the wall clock. Repeats follow each other without a wait between them, so that the host launches
ahead of the device, as in a run. `device_processes` measures tensor-parallel degrees above 1 and
links.
"""

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from autohet.runtime.groups.clock import EventClock, HostClock, StreamClock
from autohet.runtime.job import TrainingSection
from autohet.runtime.models.config_keys import with_layers
from autohet.runtime.models.family import COMPUTE_DTYPES
from autohet.runtime.models.layers.compilation import MAX_VARIANTS, reached_limit
from autohet.runtime.models.layers.tensor_parallel import TensorParallel
from autohet.runtime.models.registry import family_of
from autohet.runtime.models.stages.kernels import compile_blocks, wants_compiled
from autohet.runtime.models.stages.stage import StageModel, build_stage
from autohet.runtime.profiling.layer_update import FlatGradients
from planner.errors import ConfigError
from planner.inputs.profile import Measurement

_WARMUPS = 2
CLOCK_WARMUP_S = 0.5
"""Seconds in which an idle GPU reaches its full clock rate; an H200 idles at 345 MHz."""
ROW_PARAMETERS = 200_000_000
ROW_BLOCKS = 8
"""Limits of the longer row of small blocks that a GPU is measured with.

The host's work for each pass would otherwise count as the blocks' own; a run has it once for all
blocks.
"""


@dataclass(frozen=True)
class ProfileRequest:
    """Request for a measurement.

    blocks_at_once: blocks that run in a row, so that the host's launches overlap as in a run.
    compile_blocks: as `training.compile_blocks`.
    """

    model: str
    config: Any
    precision: str
    sequence_length: int
    microbatches: tuple[int, ...]
    device_type: str
    gpu_type: str
    repeats: int = 5
    blocks_at_once: int = 2
    compile_blocks: bool | Literal["auto"] = "auto"


@dataclass(frozen=True)
class OutOfMemory:
    """Failed measurement of a microbatch that did not fit; larger ones are not tried."""

    layer: str
    tp_degree: int
    microbatch_sequences: int


def measure_layers(
    request: ProfileRequest, tp: TensorParallel | None = None, index: int = 0
) -> Iterator[Measurement | OutOfMemory]:
    """Measure every layer and microbatch on one device (`index`), smallest microbatch first.

    With `tp` every rank of the group iterates at the same pace; rank 0 yields the group's results.
    """
    device = torch.device("cpu")
    if request.device_type == "cuda":
        device = torch.device(request.device_type, index)
    tp_degree = tp.degree if tp else 1

    _warm_up(device)
    kinds = block_kinds(request.config)
    if len(kinds) == 1:
        blocks = ["block"]
    else:
        blocks = [f"block:{kind[0]}" for kind in kinds]
    for layer in ["embedding", *blocks, "head"]:
        stage, count = build_layer_stage(request, layer, tp, device)
        gradients = FlatGradients(stage)
        update_s = _measure_update(request, gradients, device) / count
        for size in request.microbatches:
            measured = _measure_size(request, stage, layer, size, count, device)
            if measured is None:
                yield OutOfMemory(layer, tp_degree, size)
                break
            yield replace(measured, tp_degree=tp_degree, update_s=update_s)
        # Before the next stage is built: both together may not fit.
        del stage, gradients


def block_kinds(config: Any) -> list[list[int]]:
    """Return the blocks of each kind: those whose parameters have the same names and shapes.

    A model of dense blocks and blocks with experts has two kinds.
    """
    family = family_of(config)
    shapes: list[list[Any]] = [[] for _ in range(family.num_layers(config))]
    for spec in family.parameter_specs(config).values():
        if spec.layer >= 0:
            own_name = spec.name.removeprefix(f"{family.layers}.{spec.layer}.")
            shapes[spec.layer].append((own_name, spec.shape, spec.trainable))
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for layer, found in enumerate(shapes):
        kinds.setdefault(tuple(found), []).append(layer)
    return list(kinds.values())


def build_layer_stage(
    request: ProfileRequest, layer: str, tp: TensorParallel | None, device: torch.device
) -> tuple[StageModel, int]:
    """Build a stage with one kind of layer and random weights.

    Return it with its number of layers of that kind.
    """
    config = request.config
    first = 0
    blocks = 0
    if layer == "head":
        first = family_of(config).num_layers(config)
    elif layer != "embedding":
        # Between neighbours: with the first or last block a stage would have embedding or head,
        # whose time would count as the block's.
        index = int(layer.partition(":")[2] or 0)
        (kind,) = [each for each in block_kinds(request.config) if index in each]
        count = _blocks_in_row(request, kind[0], device)
        row = sorted(kind[each % len(kind)] for each in range(count))
        with_neighbours = [row[0], *row, row[-1]]
        config, first, blocks = with_layers(request.config, with_neighbours), 1, count

    dtype = COMPUTE_DTYPES[request.precision]
    stage = build_stage(config, range(first, first + blocks), tp, device, dtype)
    parameters = {
        name: torch.randn(shape) * 0.02 for name, shape in stage.weights.local_shapes().items()
    }
    stage.weights.load(parameters)
    if wants_compiled(request.compile_blocks, stage):
        compile_blocks(stage)
    return stage, max(1, blocks)


def _warm_up(device: torch.device) -> None:
    """Compute until an idle GPU has reached the clock rate of training."""
    if device.type != "cuda":
        return
    ends_at = time.monotonic() + CLOCK_WARMUP_S
    square = torch.randn(2048, 2048, device=device)
    while time.monotonic() < ends_at:
        for _ in range(20):
            square @ square
        torch.cuda.synchronize(device)


def _blocks_in_row(request: ProfileRequest, layer: int, device: torch.device) -> int:
    if device.type != "cuda":
        return request.blocks_at_once

    num_parameters = 0
    for spec in family_of(request.config).parameter_specs(request.config).values():
        if spec.layer == layer:
            num_parameters += math.prod(spec.shape)
    fitting = ROW_PARAMETERS // max(1, num_parameters)
    return max(request.blocks_at_once, min(ROW_BLOCKS, fitting))


def _measure_size(
    request: ProfileRequest,
    stage: StageModel,
    layer: str,
    size: int,
    count: int,
    device: torch.device,
) -> Measurement | None:
    """Measure one microbatch size; return None if it does not fit.

    Raises:
        ConfigError: it ran uncompiled though blocks are compiled.
    """
    try:
        forward, backward, peak = _time_both(request, stage, layer, size, device)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
    if reached_limit():
        raise ConfigError(
            f"a microbatch of {size} sequences ran uncompiled, after {MAX_VARIANTS} compiled"
            " variants of a function; measure fewer --microbatches at once"
        )
    return Measurement(
        model=request.model,
        gpu_type=request.gpu_type,
        dtype=request.precision,
        tp_degree=1,
        sequence_length=request.sequence_length,
        microbatch_sequences=size,
        layer=layer,
        forward_s=forward / count,
        backward_s=backward / count,
        peak_activation_bytes=peak / count if peak is not None else None,
        source="autohet profile",
    )


def _time_both(
    request: ProfileRequest, stage: StageModel, layer: str, size: int, device: torch.device
) -> tuple[float, float, float | None]:
    """Return the median seconds of forward and of backward, and bytes kept between them (CUDA)."""
    inputs, targets = _inputs(request, layer, size, device)
    if stage.dropout.drops:
        stage.dropout.draw(0, range(size))
    is_head = layer == "head"
    upstream = None if is_head else torch.ones_like(stage(inputs))
    on_cuda = device.type == "cuda"
    kept: list[int] = []

    def forward() -> Tensor:
        before = torch.cuda.memory_allocated(device) if on_cuda else 0
        out: Tensor = stage.loss(inputs, targets) if is_head else stage(inputs)
        if on_cuda:
            kept.append(torch.cuda.memory_allocated(device) - before)
        return out

    clock = _clock(device)
    marks = []
    for _ in range(_WARMUPS + request.repeats):
        begin = clock.mark()
        out = forward()
        between = clock.mark()
        out.backward(upstream)
        marks.append((begin, between, clock.mark()))
        inputs.grad = None
        del out
    _wait_for(device)

    measured = marks[_WARMUPS:]
    forward_s = statistics.median(clock.seconds(begin, between) for begin, between, _ in measured)
    backward_s = statistics.median(clock.seconds(between, end) for _, between, end in measured)
    if not on_cuda:
        return forward_s, backward_s, None
    return forward_s, backward_s, float(statistics.median(kept))


def _inputs(
    request: ProfileRequest, layer: str, size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    shape = (size, request.sequence_length)
    tokens = torch.randint(0, request.config.vocab_size, shape, device=device)
    if layer == "embedding":
        return tokens, tokens
    hidden = torch.randn(
        (*shape, request.config.hidden_size), device=device, dtype=COMPUTE_DTYPES[request.precision]
    )
    return hidden.requires_grad_(), tokens


def _measure_update(
    request: ProfileRequest, gradients: FlatGradients, device: torch.device
) -> float:
    """Return the median seconds of one update of the stage's masters and moments."""
    settings = TrainingSection(global_batch_sequences=1, sequence_length=request.sequence_length)
    update = gradients.prepare_update(settings)
    clock = _clock(device)
    marks = []
    for _ in range(_WARMUPS + request.repeats):
        begin = clock.mark()
        update()
        marks.append((begin, clock.mark()))
    _wait_for(device)
    return statistics.median(clock.seconds(begin, end) for begin, end in marks[_WARMUPS:])


def _clock(device: torch.device) -> StreamClock:
    return EventClock() if device.type == "cuda" else HostClock()


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
