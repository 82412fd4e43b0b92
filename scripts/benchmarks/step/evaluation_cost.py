"""Cost of an evaluation beside the forward passes of plain transformers over the same rows.

Both run in this process on one thread, in turns, with the same microbatches. The ratio is the
median over pairs of turns, of the process's CPU seconds, which other processes of a busy machine
change little, and of seconds on the clock. One JSON document on stdout.

python -m scripts.benchmarks.step.evaluation_cost [--rounds 9] [--rows 48] [--out FILE]
"""

import argparse
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from autohet.bench.step.sides import first_parameters, microbatch_of, our_trainer
from autohet.runtime.job import Job
from autohet.runtime.models.config import load_config
from autohet.runtime.models.registry import family_of
from autohet.runtime.step.batches import EvaluationRows
from autohet.runtime.step.reference import reference_model
from scripts.benchmarks.provenance import provenance

CPU = torch.device("cpu")
MODEL = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
BATCH, LENGTH, MICROBATCH = 16, 256, 4


class _Rows:
    """Data set of random rows in memory, as `EvaluationRows` reads it."""

    is_marked = False
    facts = SimpleNamespace(isolated=False)

    def __init__(self, num_rows: int) -> None:
        generator = np.random.default_rng(0)
        shape = (num_rows, LENGTH + 1)
        self._rows = generator.integers(0, MODEL["vocab_size"], shape, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, indices: Any) -> Any:
        return self._rows[indices]


def plain_loss(model: Any, dataset: _Rows, size: int) -> float:
    """Return the mean loss over all rows by the library's model, `size` rows at a time."""
    total = 0.0
    with torch.no_grad():
        for first in range(0, len(dataset), size):
            rows = torch.from_numpy(dataset.rows(np.arange(first, first + size)))
            logits = model(rows[:, :-1]).logits
            total += F.cross_entropy(
                logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"
            ).item()
    return total / (len(dataset) * LENGTH)


def measure(num_rows: int, rounds: int) -> dict[str, Any]:
    training = {"global_batch_sequences": BATCH, "sequence_length": LENGTH, "precision": "fp32"}
    parallelism = {"microbatch_sequences": MICROBATCH}
    job = Job.from_document(
        {"model": {"config": MODEL}, "training": training, "parallelism": parallelism}
    )
    config = load_config(job.model, job.training)
    names = list(family_of(config).parameter_specs(config))
    model = reference_model(config, first_parameters(job, names, CPU))
    trainer = our_trainer(job, CPU)
    dataset: Any = _Rows(num_rows)
    rows = EvaluationRows(dataset, BATCH, CPU)
    marks: list[list[tuple[float, float]]] = []
    for _ in range(rounds + 1):
        turn = [_now()]
        ours: Any = trainer.evaluate(rows)
        turn.append(_now())
        theirs = plain_loss(model, dataset, microbatch_of(job))
        turn.append(_now())
        assert abs(ours.loss - theirs) < 1e-4 * theirs, "both sides have one loss"
        marks.append(turn)
    pairs = [np.diff(np.array(turn), axis=0) for turn in marks[1:]]  # the first warms up
    ratios = np.array([each[0] / each[1] for each in pairs])
    cpu_ratio, clock_ratio = np.median(ratios, axis=0)
    cpu_s = np.median(np.array(pairs), axis=0)[:, 0]
    return {
        "model": MODEL,
        "rows": num_rows,
        "rounds": rounds,
        "rows_per_cpu_s": {
            "evaluation": round(num_rows / float(cpu_s[0]), 2),
            "forward": round(num_rows / float(cpu_s[1]), 2),
        },
        "ratio": round(float(cpu_ratio), 3),
        "ratios": [round(float(each), 3) for each in ratios[:, 0]],
        "clock_ratio": round(float(clock_ratio), 3),
        "reach": "ratio at most 1.1",
    }


def _now() -> tuple[float, float]:
    """Return the process's CPU seconds and the seconds of the clock."""
    return time.process_time(), time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = provenance() | measure(args.rows, args.rounds)
    text = json.dumps(found, indent=1)
    if args.out is not None:
        args.out.write_text(text + "\n")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
