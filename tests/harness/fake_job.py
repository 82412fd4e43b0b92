"""A job for the controller's tests: a tiny model on EMULATED GPUs of one speed, never trained."""

from typing import Any

from autohet.runtime.job import Job

TINY = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
TINY |= {"num_attention_heads": 2, "vocab_size": 256}


def fake_job(*, steps: int = 40, **sections: dict[str, Any]) -> Job:
    """`sections` add to those of the job's document."""
    document: dict[str, Any] = {
        "name": "fake",
        "model": {"config": TINY},
        "training": {
            "global_batch_sequences": 8,
            "sequence_length": 16,
            "steps": steps,
            "precision": "fp32",
        },
        "data": {"source": "unused"},
        "parallelism": {
            "microbatch_sequences": 1,
            "min_pipelines": 2,
            "max_tp_degree": 1,
            "horizon_s": 1e5,
        },
        "emulation": {"relative_speed_by_gpu_type": {"A10G": 1.0}, "block_forward_s": 0.01},
    }
    for name, section in sections.items():
        document[name] = document.get(name, {}) | section
    return Job.from_document(document)
