"""Compile attention's kernels for GPUs that are not there; record memory and spilled registers.

`python -m scripts.benchmarks.gpu.attention_builds` needs Triton, and no GPU. It adds to the record
of `attentions`.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from autohet.runtime.models.layers import attention, fused_attention
from autohet.runtime.models.layers.chunked_attention import Explicit
from autohet.runtime.models.layers.dropout import AttentionDropout, DropoutRows
from scripts.benchmarks.gpu.attentions import RESULT

PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTHS = ((32, 32), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256))
FORMS = ("causal", "dropout", "window", "all")
LENGTH = 256


class Target:
    """Driver of a GPU that is not there."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


class Builder:
    """Stands for a kernel, and compiles instead of launching."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.built: Any = None

    def __getitem__(self, grid: Any) -> Any:
        def build(*arguments: Any, **options: Any) -> None:
            self.built = self.kernel.warmup(*arguments, grid=grid, **options)

        return build


def build(form: str, dtype: torch.dtype, widths: tuple[int, int], part: str) -> dict[str, Any]:
    """Compile one kernel for the active target; return its shared memory and registers."""
    batch, heads, key_heads = 2, 4, 2
    length = LENGTH - 6 if form == "window" else LENGTH  # no multiple of 16

    def states(num_heads: int, width: int) -> Tensor:
        return torch.empty(batch, length, num_heads, width, dtype=dtype)

    words = torch.zeros(batch, heads, length, dtype=torch.int32)
    dropout = None
    if form in ("dropout", "all"):
        dropout = AttentionDropout(0.1, DropoutRows(words[:, 0]), words[0, :, 0])
    softcap = 50.0 if form == "all" else None
    has_sinks = form == "all"
    first = words[:, 0].contiguous() if form in ("window", "all") else None
    tensors: list[Any] = [states(heads, widths[0])]
    tensors += [states(key_heads, width) for width in widths]
    tensors += [states(heads, widths[1]), words.float()]
    tensors += [torch.empty(heads, dtype=dtype) if has_sinks else None, first, first]
    tensors += [None, None] if dropout is None else [words, words[0, 0]]
    if part == "forward":
        tensors += [None] * 5
    else:
        tensors += [states(heads, widths[1]), words.float(), *tensors[:3]]
    name = "_by_keys" if part == "keys" else "_by_queries"
    builder = Builder(getattr(fused_attention, name))
    with mock.patch.object(fused_attention, name, builder):
        fused_attention._run(builder, tensors, 0.1, Explicit(softcap, dropout, has_sinks))
    text = builder.built.asm["ptx"]
    return {"shared_bytes": builder.built.metadata.shared, **_registers(text)}


def _registers(text: str) -> dict[str, Any]:
    found = re.search(r"\.target (\w+)", text)
    assert found is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(text)
        file.flush()
        command = [str(PTXAS), "-v", f"--gpu-name={found[1]}", file.name, "-o", "/dev/null"]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    spilled = re.search(r"(\d+) bytes spill stores", told)
    used = re.search(r"Used (\d+) registers", told)
    assert spilled is not None
    assert used is not None
    return {"registers": int(used[1]), "spilled_bytes": int(spilled[1])}


def builds(capability: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each kernel that is compiled for a target, by format, width and form."""
    driver.set_active(Target(capability))
    for name, dtype in DTYPES.items():
        for widths in WIDTHS:
            if max(widths) > attention.FUSED[dtype][0]:
                continue
            # fp16 has the registers of bf16.
            for form in FORMS[3:] if dtype == torch.float16 else FORMS:
                for part in ("forward", "queries", "keys"):
                    found = build(form, dtype, widths, part)
                    yield f"{name}, {widths[0]}/{widths[1]}, {form}, {part}", found


def main() -> None:
    """Record the largest figures by target, format and width, and what spills most."""
    figures: dict[str, Any] = {"triton": triton.__version__}
    for capability in (80, 90):
        by_width: dict[str, dict[str, Any]] = {}
        for name, found in builds(capability):
            key = ", ".join(name.split(", ")[:2])
            worst = by_width.setdefault(key, dict.fromkeys(found, 0) | {"kernels": 0})
            for each, value in found.items():
                worst[each] = max(worst[each], value)
            worst["kernels"] += 1
            print(capability, name, found, flush=True)
        figures[f"sm_{capability}"] = by_width
    document = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    RESULT.write_text(json.dumps(document | {"compiled": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
