"""Compare attention's kernels with the library's eager modules, and measure them on a GPU.

On a CPU `python -m scripts.benchmarks.gpu.attentions` runs the kernels in Triton's interpreter,
which needs Triton and TRITON_INTERPRET=1, and records its results.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from autohet.runtime.models.layers import attention as dispatch
from autohet.runtime.models.layers.autograd import apply
from autohet.runtime.models.layers.chunked_attention import ChunkedAttention, Explicit
from autohet.runtime.models.layers.dropout import (
    ATTENTION_DROPOUT,
    AttentionDropout,
    DropoutRows,
    column_keys,
    dropout_mask,
    position_keys,
    row_keys,
)
from autohet.runtime.models.layers.pieces import piece_mask
from scripts.benchmarks.gpu.part import Failed, Machine
from scripts.benchmarks.provenance import provenance

RESULT = Path(__file__).parents[1] / "results" / "fused_attention.json"
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Largest errors, relative to the largest value of a result."""
LENGTHS = (2048, 8192)
REPEATS = 10


@dataclass(frozen=True)
class Case:
    """Attention of random states; pieces: rows hold several documents of random lengths."""

    batch: int = 1
    heads: int = 2
    key_heads: int = 2
    length: int = 77
    width: int = 32
    value_width: int = 32
    rate: float = 0.0
    softcap: float | None = None
    window: int | None = None
    pieces: bool = False
    sinks: bool = False


def cases(widths: tuple[int, ...], dtype: torch.dtype) -> list[Case]:
    """Return cases of all settings together, over widths, lengths, batches and groups of heads.

    Some rows have one token in fp32 alone: beside a sink, its gradients are differences of almost
    equal numbers, one of which has the output's rounding (1.5e-2 in bf16), as in FlashAttention.
    """
    found = []
    settings = itertools.product((0.0, 0.1), (None, 5.0), (None, 9), (False, True), (False, True))
    for index, (rate, softcap, window, pieces, sinks) in enumerate(settings):
        if softcap is not None and sinks:
            continue  # no model of the library has both
        length = (77, 64, 50, 1 if dtype == torch.float32 else 33)[index % 4]
        width = widths[index % len(widths)]
        case = Case(
            batch=2 if index % 4 else 1,
            heads=4,
            key_heads=(4, 2, 1)[index % 3],
            length=length if index % 8 else 130,
            width=width,
            value_width=width if index % 5 else max(16, width - 24),
            rate=rate,
            softcap=softcap,
            window=window,
            pieces=pieces,
            sinks=sinks,
        )
        found.append(case)
    return found


class Drawn:
    """States, settings and masks of a case."""

    def __init__(self, case: Case, dtype: torch.dtype, device: torch.device) -> None:
        self.case = case
        source = torch.Generator().manual_seed(case.length)

        def draw(heads: int, width: int) -> Tensor:
            # As projections leave them: [b, S, heads, d] in memory.
            states = torch.randn(case.batch, case.length, heads, width, generator=source)
            return states.to(device, dtype).transpose(1, 2)

        self.states = [
            draw(case.heads, case.width),
            draw(case.key_heads, case.width),
            draw(case.key_heads, case.value_width),
        ]
        if case.sinks:
            self.states.append(torch.randn(case.heads, generator=source).to(device, dtype))
        self.slope = draw(case.heads, case.value_width).transpose(1, 2)
        self.scale = case.width**-0.5
        dropout = None
        if case.rate:
            rows = row_keys(3, range(case.batch), case.length, device)
            heads = column_keys("a", torch.arange(case.heads, device=device))
            dropout = AttentionDropout(case.rate, DropoutRows(rows, rows), heads)
        self.explicit = Explicit(case.softcap, dropout, case.sinks)
        begins = torch.zeros(case.batch, case.length, dtype=torch.bool)
        if case.pieces:
            begins = torch.rand(begins.shape, generator=source) < 0.06
        begins[:, 0] = True
        self.mask = piece_mask(begins, case.window, device)
        self.first = None
        if case.pieces or case.window:
            self.first = self.mask[:, 0].int().argmax(-1).int()

    def results(self, attend: Any, dtype: torch.dtype) -> list[Tensor]:
        """Return output and gradients of a function of states and sinks, in fp64."""
        inputs = [each.detach().to(dtype).requires_grad_() for each in self.states]
        out = attend(*inputs, *[None] * (4 - len(inputs)))
        gradients = torch.autograd.grad(out, inputs, self.slope.to(dtype))
        return [each.detach().double() for each in (out, *gradients)]

    def fused(self, *states: Any) -> Tensor:
        """Compute the case by the kernels."""
        from autohet.runtime.models.layers.fused_attention import FusedAttention

        return apply(FusedAttention, *states, self.first, self.scale, self.explicit)

    def chunked(self, *states: Any) -> Tensor:
        """Compute the case by this project's chunks."""
        explicit = self.explicit or Explicit(1e9)
        return apply(ChunkedAttention, *states, self.mask, self.scale, explicit)

    def eager(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Compute the case by the library, which draws the bits of `AttentionDropout`."""
        library: Any = modeling_gemma2 if sinks is None else modeling_gpt_oss
        groups = self.case.heads // self.case.key_heads
        module: Any = SimpleNamespace(num_key_value_groups=groups, training=True, sinks=sinks)
        mask = torch.zeros(self.mask.shape, dtype=query.dtype, device=query.device)
        mask = mask.masked_fill(~self.mask, -torch.inf)

        def drop(weights: Tensor, p: float, training: bool) -> Tensor:
            dropout = self.explicit.dropout
            whole = slice(0, self.case.length)
            return weights if dropout is None else dropout.drop(weights, whole, whole)

        given: dict[str, Any] = {"scaling": self.scale, "softcap": self.case.softcap}
        with mock.patch.object(nn.functional, "dropout", drop):
            out, _ = library.eager_attention_forward(module, query, key, value, mask, **given)
        result: Tensor = out
        return result


def error_of(case: Case, dtype: torch.dtype, device: torch.device) -> float:
    """Return the largest error of the kernels' results, relative to each result's largest value.

    Raises ArithmeticError if two runs differ in a bit.
    """
    drawn = Drawn(case, dtype, device)
    found = drawn.results(drawn.fused, dtype)
    again = drawn.results(drawn.fused, dtype)
    if not all(map(torch.equal, found, again)):
        raise ArithmeticError(f"two runs differ: {case}")
    errors = []
    for judge in (drawn.eager, drawn.chunked):
        for one, other in zip(found, drawn.results(judge, torch.float64), strict=True):
            errors.append(float((one - other).abs().max() / other.abs().max().clamp(min=1e-3)))
    return max(errors)


def wrong_bits(rate: float, device: torch.device) -> int:
    """Count the weights that the kernels drop and `dropout_mask` keeps, or the reverse.

    Values are unit vectors, so that the output is the weights. Hashes at the first key have the
    upper half of the rate's limit, so that their lower half decides.
    """
    batch, heads, length = 2, 3, 128
    drawn = Drawn(Case(batch, heads, 1, length, 16, length, rate), torch.float32, device)
    drawn.states[0] *= 0.0
    drawn.states[2] = torch.eye(length, device=device).expand(batch, 1, length, length)
    columns = position_keys(length, device)
    rows = _tied_rows(torch.Size((batch, heads, length)), rate, int(columns[0])).to(device)
    with mock.patch.object(AttentionDropout, "query_keys", return_value=rows):
        weights = drawn.fused(*drawn.states, None).transpose(1, 2)
    wanted = dropout_mask(rows, columns, rate)
    seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return int(((weights == 0) != (wanted | ~seen)).sum())


def _tied_rows(shape: torch.Size, rate: float, column: int) -> Tensor:
    """Return row keys, int32, whose hashes with a column have the upper half of the limit.

    They are random in the other half. Each step of `lowbias32` but the last is undone.
    """
    bits = (1 << 32) - 1
    limit = round(rate * 2**32) ^ 1 << 31
    found = torch.randint(0, 1 << 16, shape, generator=torch.Generator().manual_seed(1))
    found |= limit >> 16 << 16
    found = found * pow(0x846CA68B, -1, 1 << 32) & bits
    found ^= (found >> 15) ^ (found >> 30)
    found = found * pow(0x7FEB352D, -1, 1 << 32) & bits
    column &= bits
    found ^= column ^ (column >> 16)
    found ^= found >> 16
    return (found - (found >> 31 << 32)).int()


def compare(device: torch.device, widths: tuple[int, ...], every: int = 1) -> dict[str, Any]:
    """Compare the cases, or one of `every`, and bits; Failed if an error is above its limit.

    Almost every case has kernels of its own, which take seconds to compile: one of 5 has each
    setting.
    """
    worst: dict[str, float] = {}
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for name, dtype in dtypes.items():
        usable = tuple(width for width in widths if width <= dispatch.FUSED[dtype][0])
        chosen = cases(usable, dtype)[::every]
        worst[name] = max(error_of(case, dtype, device) for case in chosen)
    figures: dict[str, Any] = {
        "cases": len(chosen),
        "widths": widths,
        "largest_error": worst,
        "wrong_bits": {rate: wrong_bits(rate, device) for rate in (0.05, 0.1, 0.5, 0.9)},
    }
    if any(worst[name] > LIMITS[dtype] for name, dtype in dtypes.items()):
        raise Failed("the kernels' results are not those of the library", figures)
    if any(figures["wrong_bits"].values()):
        raise Failed("the kernels drop other elements", figures)
    return figures


def run(machine: Machine) -> dict[str, Any]:
    """Compare the kernels on the device, then measure attention with and without dropout."""
    if machine.device_type != "cuda":
        return {"chunks": _seconds(machine, 64, 0.1)}
    figures = compare(machine.device, (64, 128), every=5)
    for length in LENGTHS:
        for width in (64, 128):
            figures[f"{length} tokens, width {width}"] = _measure(machine, length, width)
    return figures


def _measure(machine: Machine, length: int, width: int) -> dict[str, Any]:
    """Measure forward and backward of 2,048 columns, 8,192 tokens, in bf16."""
    found: dict[str, Any] = {
        "without_s": _seconds(machine, length, 0.0, width),
        "dropout_s": _seconds(machine, length, 0.1, width),
        "softcap_s": _seconds(machine, length, 0.0, width, softcap=50.0),
    }
    with mock.patch.object(dispatch, "_usable_kernels", return_value=None):
        found["dropout_by_chunks_s"] = _seconds(machine, length, 0.1, width)
    found["dropout_over_without"] = found["dropout_s"] / found["without_s"]
    return found


def _seconds(
    machine: Machine, length: int, rate: float, width: int = 64, softcap: float | None = None
) -> float:
    """Return the median seconds of an attention's forward and backward pass."""
    on_gpu = machine.device_type == "cuda"
    batch = 8192 // length if on_gpu else 1
    heads = 2048 // width if on_gpu else 1
    dtype = torch.bfloat16 if on_gpu else torch.float32
    case = Case(batch, heads, heads, length, width, width, rate, softcap)
    drawn = Drawn(case, dtype, machine.device)
    module = nn.Module()
    module.num_key_value_groups = 1  # type: ignore[assignment]
    module.is_causal = True  # type: ignore[assignment]
    if drawn.explicit.dropout is not None:
        setattr(module, ATTENTION_DROPOUT, drawn.explicit.dropout)
    inputs = [each.detach().requires_grad_() for each in drawn.states]
    seconds = []
    for _ in range(REPEATS if on_gpu else 1):
        torch.accelerator.synchronize() if on_gpu else None
        began = time.perf_counter()
        out, _ = dispatch.attention(module, *inputs, None, scaling=drawn.scale, softcap=softcap)
        torch.autograd.grad(out, inputs, drawn.slope)
        torch.accelerator.synchronize() if on_gpu else None
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:] or seconds)


def correct_bf16() -> None:
    """Let Triton's interpreter multiply bf16, and round to it, as a GPU does.

    That of Triton 3.7.1 takes the bits of factors for integers, and cuts off instead of rounding.
    """
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    multiply = builder.create_dot
    convert = builder.create_fp_trunc

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, left: Any, right: Any, *rest: Any) -> Any:
        return multiply(self, widened(left), widened(right), *rest)

    def create_fp_trunc(self: Any, source: Any, kind: Any) -> Any:
        if kind.scalar != tl.bfloat16:
            return convert(self, source, kind)
        rounded = torch.from_numpy(np.array(source.data)).bfloat16().view(torch.uint16)
        return interpreter.TensorHandle(rounded.numpy(), tl.bfloat16)

    builder.create_dot = create_dot
    builder.create_fp_trunc = create_fp_trunc


def main() -> None:
    """Record what the interpreter shows."""
    correct_bf16()
    figures = compare(torch.device("cpu"), (16, 32, 64, 80, 128, 192, 256))
    document = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    document |= provenance() | {"interpreted": figures}
    RESULT.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
