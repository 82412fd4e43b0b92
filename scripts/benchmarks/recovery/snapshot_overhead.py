"""What a snapshot after every step costs: steps with and without it, interleaved in one run.

    python -m scripts.benchmarks.recovery.snapshot_overhead --state-mb 500 --step-s 2 --rounds 8
    [--device cuda] [--json FILE]

A step is matrix products that take about `--step-s` (forward and backward) and then an update that
changes every state tensor in place, as AdamW does. A round is two steps with a snapshot started
after the first one's update (it is copied behind the second one's products), and two steps without;
ratios are those of the medians of the second steps.

* `overhead`: by the wall clock. On a machine that does other work it is mostly noise: see `load`.
* `overhead_of_trainer`: by the training thread's own CPU time (which rises where the copy takes
  memory bandwidth from it) and what it waited. Others' work hardly touches it; it is the cost where
  one core is spare.
* `overhead_without_spare_core`: that and all of the snapshot's CPU time: the cost where training
  uses every core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recovery.local.snapshot import SnapshotWriter
from recovery.state.layout import Layout, TensorSpec
from tests.harness.host_memory import memory_directory, owned_memory

REPOSITORY = Path(__file__).resolve().parents[3]

SIDE = 1024


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    state = _state(options.state_mb << 20, options.device)
    specs = {
        name: TensorSpec(name, (SIDE, SIDE), "float32", 0, tuple(range(0, SIDE + 1, SIDE // 8)))
        for name in state
    }
    layout = Layout(
        specs, {"node/0": frozenset(shard for spec in specs.values() for shard in spec.shards)}
    )
    with _directory(options.directory) as directory:
        writer = SnapshotWriter(directory, "node/0", layout, 1)
        try:
            result = _measure(options, state, writer)
        finally:
            writer.close()
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


@contextmanager
def _directory(on_disk: Path | None) -> Iterator[Path]:
    """Where the snapshots go: it is removed afterwards; host memory also where this process is
    killed.
    """
    if on_disk is not None:
        with tempfile.TemporaryDirectory(dir=on_disk) as name:
            yield Path(name)
        return
    with owned_memory():
        yield memory_directory(Path("snapshot_overhead"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state-mb", type=int, default=500)
    parser.add_argument("--step-s", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--directory", type=Path, help="one on a disk; default: host memory")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _state(num_bytes: int, device: str) -> dict[str, torch.Tensor]:
    count = max(1, num_bytes // (SIDE * SIDE * 4))
    return {
        f"param/layers.{number}.weight": torch.randn(SIDE, SIDE, device=device)
        for number in range(count)
    }


@dataclass
class Sample:
    """Seconds of one step: by the wall clock, of the training thread's CPU, of the whole process's,
    and waited.
    """

    wall_s: float
    thread_s: float
    process_s: float
    blocked_s: float


def _measure(
    options: argparse.Namespace, state: dict[str, torch.Tensor], writer: SnapshotWriter
) -> dict[str, Any]:
    work = _Step(state, options.device, options.step_s)
    samples: dict[bool, list[Sample]] = {True: [], False: []}
    step = 0
    for round_number in range(options.rounds + 1):
        for snapshots in (True, False) if round_number % 2 else (False, True):
            work.run(None)
            step += 1
            sample = _sample(work, state, writer if snapshots else None, step)
            writer.wait()
            if round_number:  # the first one warms up
                samples[snapshots].append(sample)
    return _result(options, state, samples[True], samples[False])


def _sample(
    work: _Step, state: dict[str, torch.Tensor], writer: SnapshotWriter | None, step: int
) -> Sample:
    began, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
    if writer is not None:
        writer.start(step, state)
    waited = time.perf_counter() - began + work.run(writer)
    wall, thread = time.perf_counter() - began, time.thread_time() - thread
    if writer is not None:
        writer.wait()
    return Sample(
        wall, thread, time.process_time() - process, waited if writer is not None else 0.0
    )


def _result(
    options: argparse.Namespace,
    state: dict[str, torch.Tensor],
    with_it: list[Sample],
    without: list[Sample],
) -> dict[str, Any]:
    def median(samples: list[Sample], name: str) -> float:
        return statistics.median(getattr(sample, name) for sample in samples)

    trainer, alone = median(with_it, "thread_s"), median(without, "thread_s")
    blocked = median(with_it, "blocked_s")
    snapshot = median(with_it, "process_s") - trainer - (median(without, "process_s") - alone)
    basis = median(without, "wall_s") if options.device != "cpu" else alone
    return {
        "state_bytes": sum(tensor.nbytes for tensor in state.values()),
        "device": options.device,
        "rounds": options.rounds,
        "step_s": median(without, "wall_s"),
        "step_with_snapshot_s": median(with_it, "wall_s"),
        "overhead": median(with_it, "wall_s") / median(without, "wall_s") - 1,
        "overhead_of_trainer": (trainer - alone + blocked) / basis,
        "overhead_without_spare_core": (trainer - alone + blocked + snapshot) / basis,
        "step_thread_s": alone,
        "step_with_snapshot_thread_s": trainer,
        "blocked_s": blocked,
        "snapshot_cpu_s": snapshot,
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "hardware": _hardware(options.device),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        ).stdout.strip(),
        "torch": torch.__version__,
    }


def _hardware(device: str) -> str:
    with open("/proc/cpuinfo") as file:
        names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
    gpu = f", {torch.cuda.get_device_name()}" if device != "cpu" else ""
    return f"{names[0] if names else 'CPU'}{gpu}"


class _Step:
    """Products that take about `step_s`, then an in-place update of all state."""

    def __init__(self, state: dict[str, torch.Tensor], device: str, step_s: float) -> None:
        self._state, self._device = list(state.values()), device
        self._matrix = torch.randn(SIDE, SIDE, device=device)
        self._products = 8
        self._multiply()
        began = time.perf_counter()
        self._multiply()
        self._products = max(1, round(8 * step_s / (time.perf_counter() - began)))

    def _multiply(self) -> None:
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix)
        if self._device != "cpu":
            torch.cuda.synchronize()

    def run(self, writer: SnapshotWriter | None) -> float:
        """One step; returns the seconds that it waited for the snapshot."""
        self._multiply()
        began = time.perf_counter()
        if writer is not None:
            writer.wait_copied()
        waited = time.perf_counter() - began
        for tensor in self._state:
            tensor.mul_(0.999)
        if self._device != "cpu":
            torch.cuda.synchronize()
        return waited


if __name__ == "__main__":
    main()
