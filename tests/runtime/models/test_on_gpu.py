"""Every family on a GPU: tiny models train there as on the CPU, in fp32, and follow it in bf16 and
fp16. Attention with sinks, latent attention, windows, dropout and grouped products have kernels of
their own there.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from autohet.bench.step.sides import our_trainer, random_rows
from autohet.runtime.job import Job
from tests.harness.tiny_models import TINY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 4
FAMILIES = ("llama-grouped", "qwen3", "gpt2", "gemma2", "gemma3_text", "granite", "starcoder2")
FAMILIES += ("deepseek_v3", "deepseek_v3-plain", "gpt_oss", "mixtral", "olmoe", "qwen3_moe")
TOLERANCE = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 5e-3}


def losses_of(name: str, precision: str, device: str, recompute: str = "none") -> list[float]:
    """Losses of the first steps, with the dropout that the model's config has."""
    job = Job.from_document(
        {
            "model": {"config": TINY[name]},
            "training": {
                "global_batch_sequences": 4,
                "sequence_length": 16,
                "precision": precision,
                "learning_rate": 1e-3,
                "device": device,
                "recompute": recompute,
            },
            "parallelism": {"microbatch_sequences": 2},
        }
    )
    trainer = our_trainer(job, torch.device(device))
    rows: Any = random_rows(replace(job), torch.device(device))
    return [trainer.train_step(rows).loss for _ in range(STEPS)]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name in TINY])
@pytest.mark.parametrize("precision", TOLERANCE)
def test_a_family_trains_as_on_the_cpu(name: str, precision: str) -> None:
    expected = losses_of(name, "fp32", "cpu")
    found = losses_of(name, precision, "cuda")
    assert found == pytest.approx(expected, rel=TOLERANCE[precision])


def test_inputs_that_wait_in_host_memory_change_no_bit() -> None:
    plain, moved = (losses_of("llama-grouped", "fp32", "cuda", way) for way in ("full", "offload"))
    assert moved == plain
