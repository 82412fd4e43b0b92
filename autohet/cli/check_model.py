"""Command `autohet check-model`: compares a job's model with the library's, on the CPU.

It proves that the model, cut into stages and tensor-parallel slices, is the library's.
"""

import argparse
import json

from autohet.runtime.job import Job
from autohet.runtime.process.terminal import visible

DESCRIPTION = (
    "Builds a short model of the job's widths and compares logits and gradients with"
    " transformers' own model: cut at every layer, at TP 1, 2 and 4. Needs no GPU and no"
    " weights. Dropout is not compared. Exit codes: 0 equal within 1e-5, 1 a module differs"
    " (it is named), 2 the model cannot be cut, or the job is wrong."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("job", metavar="JOB", help="job document (YAML)")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; ConfigError is the user's mistake."""
    job = Job.from_yaml(arguments.job)
    from autohet.runtime.models.config import load_config
    from autohet.runtime.models.proof import TOLERANCE, prove_model

    proof = prove_model(load_config(job.model, job.training))
    if arguments.json:
        print(json.dumps(proof.to_document()))
        return 0 if proof.passed else 1
    for case in proof.cases:
        cut = "+".join(str(each) for each in case.layers_by_stage)
        verdict = "equal" if case.passed else "DIFFERS"
        print(
            f"layers {cut}, TP {case.tp_degree}: {verdict} (logits {case.logits_error:.1e},"
            f" gradients {case.gradient_error:.1e}, worst {case.worst_parameter})"
        )
    for degree in proof.skipped_degrees:
        print(f"TP {degree}: not checked, since the model cannot be cut into so many parts")
    without = ""
    if proof.dropouts:
        without = ", without dropout"
        places = ", ".join(f"{place} {rate:g}" for place, rate in proof.dropouts.items())
        print(
            f"dropout: not checked ({places}). In a family of your own, compare these places with"
            " the dropouts of the library's modules"
        )
    if proof.passed:
        print(
            f"{proof.model_type} is trained as transformers computes it, within {TOLERANCE:g}"
            f" ({len(proof.cases)} cases{without})"
        )
        return 0
    where = proof.first_difference or "a gradient; see the worst parameters above"
    print(visible(f"{proof.model_type} differs from transformers; first in {where}"))
    return 1
