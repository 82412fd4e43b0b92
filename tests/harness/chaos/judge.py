"""Judges a struck job by its events, its last checkpoint and an undisturbed plain process."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from tests.harness.chaos.lives import Life, StruckJob
from tests.harness.exact_job import Reference, differing_shards

SHOWN = 8


def judge(struck: StruckJob, reference: Reference) -> dict[str, Any]:
    """Return counts and, under "wrong", every promise that the job broke."""
    strikes = struck.strikes()
    came = [strike for strike in strikes if strike["victim"] is not None]
    wrong = _wrong_end(struck)
    losses: dict[int, float] = {}
    run_again = 0
    for number, life in enumerate(struck.lives):
        events = _events(life)
        run_again += _steps_run_again(events, losses)
        wrong += [f"life {number}: {each}" for each in _wrong_events(life, events)]
        losses |= {event["step"]: event["loss"] for event in events if event["kind"] == "step"}
    wrong += _wrong_losses(losses, reference, kills=len(struck.lives) - 1)
    last = struck.lives[-1].result
    if last is not None and last["ok"]:
        different = differing_shards(str(struck.places.storage), reference)
        if different:
            wrong.append(f"{len(different)} shards of the last checkpoint differ: {different[:3]}")
    return {
        "strikes": len(came),
        "left_out": len(strikes) - len(came),
        "by_kind": dict(Counter(strike["kind"] for strike in came)),
        "by_state": dict(Counter(strike["state"] for strike in came)),
        "drivers": len(struck.lives),
        "steps_run_again_after_kills_of_the_driver": run_again,
        "steps_without_loss": len(reference.losses) - len(losses),
        "mounted": struck.places.mounted,
        "seconds": round(struck.seconds, 1),
        "wrong": wrong,
    }


def _wrong_end(struck: StruckJob) -> list[str]:
    life = struck.lives[-1]
    if life.result is None:
        return [f"the last driver left no result (exit code {life.exit_code})"]
    return [] if life.result["ok"] else [f"ended early: {life.result['reason']}"]


def _wrong_events(life: Life, events: list[dict[str, Any]]) -> list[str]:
    """Steps lost while living workers held them, or that were in files when the driver began."""
    wrong = []
    for event in events:
        if event["kind"] == "restore" and event["steps_lost"]:
            wrong.append(f"{event['steps_lost']} steps lost ({event['cause']})")
        if event["kind"] == "failed":
            wrong.append(f"failed: {event['reason']}")
    first = _first_restore(events)
    if first is not None and first < (life.kept_step or 0):
        wrong.append(f"went on from step {first}, but step {life.kept_step} was kept whole")
    return wrong


def _first_restore(events: list[dict[str, Any]]) -> int | None:
    """Return the step from which a driver's first generation went on."""
    return next((event["step"] for event in events if event["kind"] == "restore"), None)


def _steps_run_again(events: list[dict[str, Any]], losses: dict[int, float]) -> int:
    first = _first_restore(events)
    return 0 if first is None else max(0, max(losses, default=-1) + 1 - first)


def _wrong_losses(losses: dict[int, float], reference: Reference, *, kills: int) -> list[str]:
    """A driver that is killed may have told of all but its last two steps."""
    wrong = []
    different = sorted(step for step, loss in losses.items() if loss != reference.losses[step])
    if different:
        wrong.append(f"losses differ at steps {different[:SHOWN]}")
    missing = sorted(set(range(len(reference.losses))) - losses.keys())
    if len(missing) > 2 * kills:
        wrong.append(f"no loss of steps {missing[:SHOWN]} ({len(missing)} in all)")
    return wrong


def _events(life: Life) -> list[dict[str, Any]]:
    """Events in the order in which they were told; a line that a kill has cut off is left out."""
    events = []
    for path in sorted(life.directory.glob("events-*.jsonl")):
        lines = path.read_text().split("\n")
        events += [json.loads(line) for line in lines[:-1]]
    return events


def save_logs(struck: StruckJob, directory: Path) -> None:
    """Copy what explains a broken promise: strikes, events, logs of workers."""
    directory.mkdir(parents=True, exist_ok=True)
    for life in struck.lives:
        shutil.copytree(life.directory, directory / life.directory.name, dirs_exist_ok=True)
    if struck.places.strikes.exists():
        shutil.copy(struck.places.strikes, directory)
