"""Small probes of what the runtime relies on.

They show when a pinned copy is read, which streams are handed out, what checksums cost, and how the
fused update rounds.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autohet.runtime.job import TrainingSection
from autohet.runtime.state.flat_optimizer import fused_update
from autohet.runtime.state.optimizer import UpdateRule
from recovery.state.borrowed import BorrowedState
from recovery.state.checksum import checksum
from recovery.state.device_checksum import on_device
from scripts.benchmarks.gpu.part import Failed, Machine

VOTES = 20
BUSY_CYCLES = 200_000_000
"""GPU cycles that keep a stream busy for about a tenth of a second."""
UPDATE_ELEMENTS = 1 << 22
UPDATE_STEPS = 3


def vote_flag(machine: Machine) -> dict[str, Any]:
    """Check that a pinned 8-byte copy is read when the stream gets to it, not when it is queued.

    The vote's count of members relies on it: an interrupt zeroes the flag before it aborts.
    """
    on_gpu = machine.device_type == "cuda"
    seen_zero = 0
    for _ in range(VOTES):
        alive = torch.ones(1, dtype=torch.float64, pin_memory=on_gpu)
        mine = torch.zeros(10, dtype=torch.float64, device=machine.device)
        if on_gpu:
            torch.cuda._sleep(BUSY_CYCLES)
            mine[5:6].copy_(alive, non_blocking=True)
            time.sleep(0.005)
            alive.zero_()
        else:  # a CPU has no stream: the order of the calls is all there is
            alive.zero_()
            mine[5:6].copy_(alive)
        seen_zero += float(mine[5]) == 0.0
    figures = {"read_by_the_stream": seen_zero, "votes": VOTES}
    if seen_zero < VOTES:
        raise Failed(
            "a pinned copy is read when it is queued: votes may count aborted ones", figures
        )
    return figures


def streams(machine: Machine) -> dict[str, Any]:
    """Count the streams that PyTorch hands out before they repeat; readings of state share one.

    Fails if readings share a stream with communicators.
    """
    if machine.device_type != "cuda":
        with BorrowedState({"state": torch.zeros(1)}).reading() as state:
            return {"read": list(state)}
    handles = [torch.cuda.Stream().cuda_stream for _ in range(64)]
    tensor = torch.zeros(8, device=machine.device)
    used = set()
    for _ in range(40):
        with BorrowedState({"state": tensor}).reading():
            used.add(torch.cuda.current_stream().cuda_stream)
    figures = {
        "different_streams_of_64": len(set(handles)),
        "streams_of_40_readings": len(used),
        "shared_with_communicators": len(used & set(handles)),
    }
    if len(used) != 1 or used & set(handles):
        raise Failed("snapshots share streams with communicators", figures)
    return figures


def measure_checksums(machine: Machine) -> dict[str, Any]:
    """Seconds of the device's checksum over many small and few large shards, and its bits."""
    on_gpu = machine.device_type == "cuda"
    figures: dict[str, Any] = {}
    for kib, count in ((64, 2048), (512, 2048), (32 << 10, 32)) if on_gpu else ((256, 3),):
        size = kib << 10
        pieces = list(
            torch.randint(0, 256, (count, size), dtype=torch.uint8, device=machine.device).unbind()
        )
        found = on_device(pieces)  # compiles the kernel, too
        began = time.perf_counter()
        again = on_device(pieces)
        seconds = time.perf_counter() - began
        figures[f"{count} x {kib} KiB"] = {
            "seconds": seconds,
            "bytes_per_s": size * count / seconds,
        }
        expected = [checksum(piece.cpu().numpy().data) for piece in pieces[:4]]
        if found[:4] != expected or found != again:
            raise Failed("the device's checksums are not the host's", figures)
    return figures


def rounding(machine: Machine) -> dict[str, Any]:
    """Hash the results of the fused update and its parts for fixed inputs, to compare cards.

    Replicas on different cards stay bit-equal only if all of them round alike.
    """
    figures: dict[str, Any] = {"card": machine.name}
    settings = TrainingSection(global_batch_sequences=1, sequence_length=1)
    for name, wanted in {
        "adamw": settings,
        "adamw_without_decay": replace(settings, weight_decay=0.0),
        "adamw_tiny_eps": replace(settings, eps=1e-15),
    }.items():
        figures[name] = _hash_of_updates(wanted, machine.device)
    values = _fixed_values(7).to(machine.device)
    figures["to_bf16"] = _hash(values.to(torch.bfloat16).view(torch.int16))
    figures["square_root"] = _hash(values.abs().sqrt())
    figures["division"] = _hash(values / (values.abs() + 1e-8))
    on_host = _hash_of_updates(settings, torch.device("cpu"))
    figures["adamw_on_the_cpu"] = on_host
    return figures


def _hash_of_updates(settings: TrainingSection, device: torch.device) -> str:
    """Hash the master and the moments after UPDATE_STEPS fused updates."""
    master = _fixed_values(0).to(device)
    moments = torch.zeros_like(master), torch.zeros_like(master)
    for step in range(UPDATE_STEPS):
        gradient = _fixed_values(step + 1).to(device)
        rule = UpdateRule(settings, step + 1, 1.0 / 3.0)
        fused_update([(master, *moments)], [gradient], rule)
    return _hash(torch.stack([master, *moments]))


def _fixed_values(seed: int) -> Tensor:
    """Return fp32 values of all magnitudes, the same on every machine and in every PyTorch.

    Integer arithmetic alone makes their bits.
    """
    bits = torch.arange(UPDATE_ELEMENTS, dtype=torch.int64) + seed * UPDATE_ELEMENTS
    bits = (bits * 6364136223846793005 + 1442695040888963407) >> 33
    exponent = 107 + (bits & 0xFF) % 24  # 2**-20 to 2**3
    sign = (bits >> 8 & 1) << 31
    packed = sign | exponent << 23 | (bits * 2654435761 & 0x7FFFFF)
    return packed.to(torch.int32).view(torch.float32)


def _hash(values: Tensor) -> str:
    flat = values.contiguous().view(-1).view(torch.uint8).cpu()
    return hashlib.sha256(flat.numpy().data).hexdigest()[:16]
