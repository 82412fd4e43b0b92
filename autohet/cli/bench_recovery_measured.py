"""The parts of a recovery that need a whole run: `autohet train` on an emulated fleet, with a notice, a death, an arrival."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from autohet.runtime.job import Job, ScriptedEvent
from planner.errors import ConfigError

JOB = "cluster_configs/jobs/demo.yaml"
CLUSTER = "cluster_configs/local-emulated.yaml"
STEPS = 60
CAUSES = ("notice", "death", "arrival")
PARTS = ("detect", "replan", "rebuild", "restore", "first_step")


def measured_parts() -> dict[str, dict[str, float | None]]:
    """By cause, the seconds of each part of its reconfiguration (None: it did not happen before the end).

    Raises:
        ConfigError: the job's files are not there, or the run failed.
    """
    from autohet.driver.run import train

    with tempfile.TemporaryDirectory(prefix="autohet-bench-fleet-") as directory:
        outcome = train(
            _job(directory),
            cluster_path=CLUSTER,
            address=None,
            events_path=Path(directory, "events.jsonl"),
            show=_silent,
        )
    changes = {change["cause"]: change["seconds"] for change in outcome.summary["reconfigurations"]}
    if not changes:
        raise ConfigError(
            f"the run on the emulated fleet ended with '{outcome.reason}' and no reconfiguration; --quick leaves it out"
        )
    return {cause: dict(changes.get(cause, dict.fromkeys(PARTS, None))) for cause in CAUSES}


def _job(directory: str) -> Job:
    if not Path(JOB).exists() or not Path(CLUSTER).exists():
        raise ConfigError(f"{JOB} and {CLUSTER} are not here; run in the repository, or give --quick")
    job = Job.from_yaml(JOB)
    script = (
        ScriptedEvent(at_step=5, event="notice", node_type="l40s", deadline_s=20.0),
        ScriptedEvent(at_step=10, event="death", node_type="a10g"),
        ScriptedEvent(at_step=16, event="arrival", node_type="l40s"),
    )
    return replace(
        job,
        name="bench-recovery",
        training=replace(job.training, steps=STEPS),
        elastic=replace(job.elastic, script=script),
        checkpoint=replace(job.checkpoint, storage=str(Path(directory, "checkpoints"))),
    )


def _silent(*_: Any) -> None:
    """Nothing is shown of the run."""
