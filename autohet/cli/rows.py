"""Command `autohet rows`: prepares a job's data and shows what its rows train on."""

import argparse
import json

import numpy as np

from autohet.runtime.job import Job
from autohet.runtime.process.terminal import visible
from planner.errors import ConfigError

DESCRIPTION = (
    "Prepares a job's rows on this machine, without Ray or a model, and shows the first ones in the"
    " order of the files. + is text that is trained on, - is text that is only read, and = begins a"
    " document."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("job", metavar="JOB", help="job document (YAML)")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="rows (default: 1)")
    parser.add_argument("--evaluation", action="store_true", help="rows of the evaluation")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; ConfigError is the user's mistake."""
    job = Job.from_yaml(arguments.job)
    data = job.evaluation_data if arguments.evaluation else job.data
    if data is None:
        raise ConfigError("the job has no such data; give it `data`, and `evaluation` if wanted")
    from autohet.runtime.data import prepare_dataset
    from autohet.runtime.data.recipe import tokenizer_of

    dataset = prepare_dataset(data, job.training.sequence_length)
    tokenizer = tokenizer_of(data)
    rows = dataset.rows(range(min(arguments.count, len(dataset))))
    counts, begins = np.ones(rows.shape, np.bool_), np.zeros(rows.shape, np.bool_)
    if dataset.is_marked:
        counts, begins = dataset.marks(range(len(rows)))
    # The first token of a row is predicted from nothing.
    counts[:, 0] = False
    found = []
    for ids, is_target, is_begin in zip(rows, counts, begins, strict=True):
        changes = np.flatnonzero((is_target[1:] != is_target[:-1]) | is_begin[1:]) + 1
        spans = []
        for at in np.split(np.arange(len(ids)), changes):
            if is_begin[at[0]]:
                spans.append(("=", ""))
            text = tokenizer.decode(ids[at])
            if is_begin[at[0]] and not is_target[at[0]] and len(set(ids[at])) == 1:
                text = f"{len(at)} tokens of padding"
            spans.append(("+" if is_target[at[0]] else "-", text))
        found.append(spans)
    if arguments.json:
        print(json.dumps({"summary": dataset.summary, "rows": found}))
        return 0
    print(visible(dataset.summary))
    for number, spans in enumerate(found):
        print(f"row {number}")
        for sign, text in spans:
            shown = json.dumps(text, ensure_ascii=False) if text else ""
            print(visible(f"{sign} {shown}".rstrip()))
    return 0
