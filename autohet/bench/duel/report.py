"""`autohet bench recovery --duel`: elastic trainers under the same notices and kills."""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from autohet.bench.duel.task import NUM_WORKERS, REFERENCE_FILE, DuelTask, make_task, steps_in
from autohet.bench.duel.trainers import TRAINERS, run_apart, why_not
from planner.inputs.documents import Document

STEPS = 160
SEED = 1
METHOD = {
    "wasted_steps": "steps that were run and not kept: run again from a checkpoint, or dropped",
    "seconds": "end of the first step to end of the last",
    "beyond_s": "`seconds` less the same number of the run's own median steps",
    "longest_gap_s": "longest time between two steps",
    "max_abs_loss_difference": (
        "largest difference of a step's loss from that of one undisturbed process of the same model"
        " and rows"
    ),
    "machines": (
        "processes of this machine, paced by a sleep a row; a notice, the machine's kill at its"
        " deadline, and a replacement at once, at the same steps for all"
    ),
}


def run(args: argparse.Namespace) -> int:
    """Run the duel; exit code 1 if a trainer did not reach the end."""
    with tempfile.TemporaryDirectory(prefix="autohet-duel-") as directory:
        task = make_task(Path(directory), STEPS, SEED)
        document = duel_document(task, list(results(task)))
    if args.out:
        Path(args.out).write_text(json.dumps(document, indent=1) + "\n")
    if args.json:
        print(json.dumps(document))
    else:
        _show(document)
    return int(any("failed" in each for each in document["trainers"]))


def results(task: DuelTask) -> Iterator[Document]:
    """Yield each trainer's entry when it is done."""
    for name, trainer in TRAINERS.items():
        entry: Document = {"trainer": name, "what": trainer.what}
        reason = why_not(name)
        if reason:
            yield {**entry, "left_out": reason}
            continue
        print(f"bench recovery --duel: {trainer.what}", file=sys.stderr, flush=True)
        try:
            run_apart(name, task)
            entry |= score(task, name)
        except RuntimeError as error:
            entry["failed"] = str(error)
        yield entry


def score(task: DuelTask, name: str) -> Document:
    """Return what a trainer's recorded steps come to; units are in METHOD.

    Raises:
        RuntimeError: more steps are missing than machines left while they led a step.
    """
    steps = list(steps_in(task.log_of(name)))
    kept = {each["step"]: each for each in steps if each["applied"]}
    num_missing = task.steps - len(kept)
    if num_missing > len(task.leaving) or task.steps - 1 not in kept:
        raise RuntimeError(f"{name} recorded {len(kept)} of {task.steps} steps")

    reference = json.loads((task.path / REFERENCE_FILE).read_text())
    times = sorted(each["time"] for each in steps)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    seconds = times[-1] - times[0]
    differences = [abs(each["loss"] - reference[step]) for step, each in kept.items()]
    num_executed = len(steps) + num_missing
    return {
        "executed_steps": num_executed,
        "wasted_steps": num_executed - task.steps,
        "seconds": seconds,
        "beyond_s": seconds - (task.steps - 1) * statistics.median(gaps),
        "longest_gap_s": max(gaps),
        "max_abs_loss_difference": max(differences),
        "final_loss": kept[task.steps - 1]["loss"],
    }


def duel_document(task: DuelTask, trainers: list[Document]) -> Document:
    """Return the whole document of a duel."""
    reference = json.loads((task.path / REFERENCE_FILE).read_text())
    return {
        "duel": {
            "steps": task.steps,
            "checkpoint_every_steps": task.checkpoint_every,
            "notices_at_steps": list(task.leaving),
            "notice_s": task.notice_s,
            "num_machines": NUM_WORKERS,
            "usual_step_s": task.usual_step_s,
            "seed": task.seed,
            "reference_final_loss": reference[-1],
        },
        "method": METHOD,
        "trainers": trainers,
    }


def _show(document: Document) -> None:
    from rich.table import Table

    from autohet.runtime.process.terminal import PlainConsole

    duel = document["duel"]
    title = f"{duel['steps']} steps, {len(duel['notices_at_steps'])} machines leave"
    table = Table("trainer", title=title)
    for heading in ("steps wasted", "seconds", "beyond", "longest gap", "loss off by"):
        table.add_column(heading, justify="right")
    for each in document["trainers"]:
        reason = each.get("left_out") or each.get("failed")
        if reason is not None:
            table.add_row(each["trainer"], "-")
            continue
        table.add_row(
            each["trainer"],
            str(each["wasted_steps"]),
            f"{each['seconds']:.1f}",
            f"{each['beyond_s']:.1f}",
            f"{each['longest_gap_s']:.1f}",
            f"{each['max_abs_loss_difference']:.1e}",
        )
    out = PlainConsole()
    out.print(table)
    for each in document["trainers"]:
        reason = each.get("left_out") or each.get("failed")
        out.print(f"{each['trainer']}: {reason or each['what']}")
