"""Definition of a part of `scripts/gpu`, and of the machine that it runs on."""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from autohet.runtime.job import Job


class PartSkipped(Exception):
    """Raised if a part cannot be run on this machine; the message is the reason."""


class Failed(Exception):
    """Raised if a part ran and did not show what it should.

    The message is the reason; `figures` are what was measured.
    """

    def __init__(self, message: str, figures: dict[str, Any]) -> None:
        super().__init__(message)
        self.figures = figures


def share_gpu(environment: MutableMapping[str, str], host: str) -> None:
    """Let this process share a GPU with other ranks: NCCL takes each for a rank of another host.

    To be called before the first communicator is made.
    """
    environment.update({"NCCL_HOSTID": host, "NCCL_SOCKET_IFNAME": "lo", "NCCL_P2P_DISABLE": "1"})


@dataclass(frozen=True)
class Machine:
    """Machine that the parts run on.

    `device_type` is cuda; or cpu, which then stands in for the GPU (EMULATED: the code is
    exercised, nothing is measured).
    """

    device_type: str

    @property
    def count(self) -> int:
        return torch.cuda.device_count() if self.device_type == "cuda" else 1

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.device_type == "cuda" else torch.device("cpu")

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(0) if self.device_type == "cuda" else "CPU (EMULATED)"

    def describe(self) -> dict[str, Any]:
        """Describe the hardware for a recorded result."""
        if self.device_type != "cuda":
            return {"device": self.name, "count": self.count, "torch": torch.__version__}
        facts = torch.cuda.get_device_properties(0)
        return {
            "device": self.name,
            "count": self.count,
            "memory_bytes": facts.total_memory,
            "compute_capability": f"{facts.major}.{facts.minor}",
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }


@dataclass(frozen=True)
class GpuPart:
    """Part of `scripts/gpu`, run by one process that is killed at the deadline.

    run: "module.function" of this package; called with the Machine, it returns figures or raises
    Skipped or Failed.
    """

    title: str
    deadline_s: float
    run: str


def job_of(machine: Machine, precision: str) -> Job:
    """Return the job of the measuring parts: a Llama of 0.3 billion parameters on a GPU.

    On a CPU that stands in for one, it has a few thousand parameters.
    """
    on_gpu = machine.device_type == "cuda"
    width, layers, vocabulary, length = (1024, 16, 32000, 1024) if on_gpu else (32, 3, 64, 16)
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 11 * width // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64 if on_gpu else 4,
        "num_key_value_heads": width // 64 if on_gpu else 4,
        "vocab_size": vocabulary,
        "max_position_embeddings": length,
    }
    training = {
        "global_batch_sequences": 32 if on_gpu else 4,
        "sequence_length": length,
        "steps": 100,
        "precision": precision,
        "device": machine.device_type,
    }
    parallelism = {"microbatch_sequences": 8 if on_gpu else 2}
    return Job.from_document(
        {
            "name": "gpu",
            "model": {"config": config},
            "training": training,
            "parallelism": parallelism,
        }
    )


SIZES: dict[str, dict[str, int]] = {
    "1B": {"width": 2048, "inner": 5632, "layers": 16, "microbatch": 4, "batch": 32},
    "3B": {"width": 3072, "inner": 8192, "layers": 26, "microbatch": 2, "batch": 16},
}
"""Llamas with heads of 128, sequences of 2,048 tokens and a vocabulary of 32,000."""


def sized_job(machine: Machine, size: str) -> Job:
    """Return a Llama of `size` (a key of SIZES) in bf16; the small job if a CPU poses as a GPU."""
    if machine.device_type != "cuda":
        return job_of(machine, "fp32")
    shape = SIZES[size]
    config = {
        "model_type": "llama",
        "hidden_size": shape["width"],
        "intermediate_size": shape["inner"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["width"] // 128,
        "num_key_value_heads": shape["width"] // 128,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    }
    training = {
        "global_batch_sequences": shape["batch"],
        "sequence_length": 2048,
        "steps": 100,
        "precision": "bf16",
        "device": "cuda",
    }
    return Job.from_document(
        {
            "name": f"gpu-{size}",
            "model": {"config": config},
            "training": training,
            "parallelism": {"microbatch_sequences": shape["microbatch"]},
        }
    )
