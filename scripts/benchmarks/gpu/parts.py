"""The parts of `scripts/gpu`, in the order of what a second on a GPU is worth there.

A part is named by module and function, so that what one part lacks on a machine ends that part
alone.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.benchmarks.gpu.part import Failed, GpuPart, Machine

ROOT = Path(__file__).parents[3]
TESTS = {
    "elastic": "tests/faults/test_matrix.py",
    "families": "tests/runtime/models/test_on_gpu.py",
    "state_tests": "tests/recovery",
}
PARTS = {
    "vote_flag": GpuPart("the vote's pinned copy is read by the stream", 40.0, "probes.vote_flag"),
    "streams": GpuPart("snapshots share no stream with communicators", 30.0, "probes.streams"),
    "predicted_1b": GpuPart(
        "predicted step and peak memory of 1 B beside measured ones", 80.0, "measures.predicted_1b"
    ),
    "attention": GpuPart(
        "attention's kernels beside the library's modules; seconds with and without dropout",
        200.0,
        "attentions.run",
    ),
    "step_large": GpuPart("a step of 3 B beside plain loops", 130.0, "steps.large"),
    "snapshots": GpuPart(
        "a snapshot of 1 B to host memory after each step, and back", 160.0, "measures.snapshots"
    ),
    "elastic": GpuPart(
        "a fleet on this GPU is struck: no step lost, every bit right", 200.0, "parts.elastic"
    ),
    "predicted": GpuPart(
        "predicted step and peak memory of 0.3 B beside measured ones", 60.0, "measures.predicted"
    ),
    "predicted_3b": GpuPart(
        "predicted step and peak memory of 3 B beside measured ones", 90.0, "measures.predicted_3b"
    ),
    "families": GpuPart("tiny models of every family beside the CPU", 90.0, "parts.test_families"),
    "formats": GpuPart("1 B in bf16, fp16 and fp8: seconds and losses", 110.0, "formats.run"),
    "offload": GpuPart("optimizer state of 1 B in host memory: its price", 80.0, "offloads.run"),
    "parity": GpuPart(
        "losses in fp32 and bf16 beside plain fp32 on the CPU", 60.0, "measures.parity"
    ),
    "ranks": GpuPart(
        "four NCCL ranks on one GPU: two unequal pipelines, one of TP 2, beside a plain loop",
        100.0,
        "ranks.run",
    ),
    "aborts": GpuPart(
        "a peer that is killed, freezes or never comes; one generation after the other",
        120.0,
        "aborts.run",
    ),
    "step": GpuPart("a step of 1 B beside plain loops, eager and compiled", 200.0, "steps.medium"),
    "step_chat": GpuPart("a step of 1 B on isolated documents", 120.0, "steps.chat"),
    "step_small": GpuPart("a step of 0.3 B beside plain loops", 100.0, "steps.small"),
    "checksums": GpuPart(
        "checksums on the device: seconds and bits", 45.0, "probes.measure_checksums"
    ),
    "rounding": GpuPart("hashes of the fused update, to compare by card", 45.0, "probes.rounding"),
    "profile": GpuPart("what autohet profile measures", 60.0, "measures.profile"),
    "state_tests": GpuPart("the tests of recovery that need a GPU", 80.0, "parts.state_tests"),
}
DEFAULT_BUDGET_S = 570.0
MOST_ERROR_LINES = 40


def function_of(part: GpuPart) -> Any:
    """Import a part's module and return its function."""
    module, _, name = part.run.rpartition(".")
    return getattr(importlib.import_module(f"scripts.benchmarks.gpu.{module}"), name)


def elastic(machine: Machine) -> dict[str, Any]:
    """Test strikes on a fleet whose workers share the GPU over NCCL."""
    return _pytest(TESTS["elastic"], machine)


def test_families(machine: Machine) -> dict[str, Any]:
    """Test that tiny models of every family train as on the CPU."""
    return _pytest(TESTS["families"], machine)


def state_tests(machine: Machine) -> dict[str, Any]:
    """Test snapshots, checksums and restores of a GPU's state."""
    return _pytest(TESTS["state_tests"], machine)


def _pytest(path: str, machine: Machine) -> dict[str, Any]:
    """Run the tests below `path` that are marked `gpu`; on a CPU only collect them.

    Each line is passed on as it comes: a part that is cut off shows how far its tests were.
    """
    on_gpu = machine.device_type == "cuda"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", path, "--durations=0"]
    command += ["-v"] if on_gpu else ["--collect-only", "-q"]
    lines: list[str] = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        for line in tests.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    durations = [line for line in lines if " call " in line and "::" in line]
    figures = {"summary": lines[-1] if lines else "", "durations": durations}
    if tests.returncode:
        errors = "\n".join([line for line in lines if line.startswith("E  ")][:MOST_ERROR_LINES])
        raise Failed(f"pytest ended with {tests.returncode}: {errors}", figures)
    return figures
