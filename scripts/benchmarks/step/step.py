"""`autohet bench step`, recorded: a step beside a plain loop, and beside stock pipelining with DDP
on an equal plan.

    python -m scripts.benchmarks.step.step [--steps 9] [--json scripts/benchmarks/results/step.json]

Ratios of tokens per second are of the wall clock, medians of steps that take turns; on a machine
that does other work they are mostly noise (`load`), and `cpu_s_vs_pipelining`, of processor
seconds, says what a step costs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from autohet.bench.step.report import DEFAULT_JOB, pipelining_document, step_document
from autohet.runtime.job import Job
from scripts.benchmarks.provenance import provenance

RESULTS = Path(__file__).parents[1] / "results" / "step.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    job = Job.from_document(DEFAULT_JOB)
    document = {
        **provenance(),
        "plain": step_document(job, options.steps),
        "pipelining": pipelining_document(job, options.steps),
    }
    options.json.write_text(json.dumps(document, indent=2) + "\n")
    print(
        f"against the plain loop: {document['plain']['tokens_per_s_vs_plain']:.3f} of its tokens"
        " per second"
    )
    print(f"against stock pipelining: {document['pipelining']['tokens_per_s_vs_pipelining']:.3f}")
    print(
        "processor seconds against stock pipelining:"
        f" {document['pipelining']['cpu_s_vs_pipelining']:.3f}"
    )


if __name__ == "__main__":
    main()
