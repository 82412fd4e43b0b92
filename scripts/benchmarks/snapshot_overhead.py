"""What a snapshot after every step costs: steps with and without it, interleaved in one run.

    python scripts/benchmarks/snapshot_overhead.py --state-mb 500 --step-s 2 --rounds 8 [--device cuda] [--json FILE]

A step is matrix products that take about `--step-s` (forward and backward) and then an update that changes every state
tensor in place, as AdamW does. A round is two steps with a snapshot started after the first one's update (it is copied
behind the second one's products), and two steps without. The ratio is that of the medians of the second steps; `blocked_s`
is what the training thread itself waited, `snapshot_cpu_s` what the process spent beyond the steps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from recovery.layout import Layout, TensorSpec
from recovery.snapshot import SnapshotWriter

SIDE = 1024


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    state = _state(options.state_mb << 20, options.device)
    specs = {name: TensorSpec(name, (SIDE, SIDE), "float32", 0, tuple(range(0, SIDE + 1, SIDE // 8))) for name in state}
    layout = Layout(specs, {"node/0": frozenset(shard for spec in specs.values() for shard in spec.shards)})
    directory = Path(tempfile.mkdtemp(dir=options.directory))
    writer = SnapshotWriter(directory, "node/0", layout, 1)
    try:
        result = _measure(options, state, writer)
    finally:
        writer.close()
        shutil.rmtree(directory)
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-mb", type=int, default=500)
    parser.add_argument("--step-s", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--directory", default="/dev/shm")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _state(num_bytes: int, device: str) -> dict[str, torch.Tensor]:
    count = max(1, num_bytes // (SIDE * SIDE * 4))
    return {f"param/layers.{number}.weight": torch.randn(SIDE, SIDE, device=device) for number in range(count)}


def _measure(options: argparse.Namespace, state: dict[str, torch.Tensor], writer: SnapshotWriter) -> dict[str, Any]:
    work = _Step(state, options.device, options.step_s)
    with_it, without, blocked, cpu_with, cpu_without = [], [], [], [], []
    step = 0
    for round_number in range(options.rounds + 1):
        for snapshots in (True, False) if round_number % 2 else (False, True):
            work.run(None)
            began, cpu = time.perf_counter(), time.process_time()
            waited = 0.0
            if snapshots:
                step += 1
                writer.start(step, state)
                waited = time.perf_counter() - began
            waited += work.run(writer if snapshots else None)
            seconds = time.perf_counter() - began
            if round_number:  # the first one touches the files' pages and warms up
                (with_it if snapshots else without).append(seconds)
            writer.wait()
            if round_number:
                (cpu_with if snapshots else cpu_without).append(time.process_time() - cpu)
                blocked += [waited] if snapshots else []
    median = statistics.median
    return {
        "state_bytes": sum(tensor.nbytes for tensor in state.values()),
        "device": options.device,
        "rounds": options.rounds,
        "step_s": median(without),
        "step_with_snapshot_s": median(with_it),
        "overhead": median(with_it) / median(without) - 1,
        "overhead_of_fastest": min(with_it) / min(without) - 1,
        "blocked_s": median(blocked),
        "snapshot_cpu_s": median(cpu_with) - median(cpu_without),
    }


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
