"""Measurements of `autohet bench recovery` that need a whole run.

Runs `autohet train` on an emulated fleet, with a notice, a death and an arrival, and Ray Train's
trainer for comparison.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autohet.runtime.job import Job, ScriptedEvent
from autohet.runtime.models.specs.model_spec import model_spec_from_config
from planner.errors import ConfigError
from planner.inputs.documents import Document, Json

JOB = "cluster_configs/jobs/demo.yaml"
CLUSTER = "cluster_configs/local-emulated.yaml"
STEPS = 60
CAUSES = ("notice", "death", "arrival")
BASELINES_S = {"ray_train_elastic_tuned": 45.0, "ray_train_elastic": 120.0}
"""Seconds that a run of each baseline may be expected to take; those of Ray's defaults wait."""
PARTS = ("detect", "replan", "rebuild", "restore", "first_step")


def measure_changes() -> dict[str, Document]:
    """Map each cause to its entry of `reconfigurations` in the run's summary.

    A cause is absent if it did not happen before the end.

    Raises:
        ConfigError: the job's files are not there, or the run failed.
    """
    from autohet.driver.job.run import train

    with tempfile.TemporaryDirectory(prefix="autohet-bench-fleet-") as directory:
        outcome = train(
            _job(directory),
            cluster_path=CLUSTER,
            address=None,
            events_path=Path(directory, "events.jsonl"),
            show=silent,
        )
    changes = {change["cause"]: change for change in outcome.summary["reconfigurations"]}
    if not changes:
        raise ConfigError(
            f"the run on the emulated fleet ended with '{outcome.reason}' and no reconfiguration;"
            " --quick leaves it out"
        )
    return changes


def parts_of(changes: Mapping[str, Json]) -> dict[str, dict[str, float | None]]:
    """Map each cause to the seconds of each part; None if it was not measured."""
    return {
        cause: dict(changes[cause]["seconds"]) if cause in changes else dict.fromkeys(PARTS, None)
        for cause in CAUSES
    }


def fleet_scenarios(
    changes: Mapping[str, Json], is_time: Callable[[str, float], bool]
) -> Iterator[Document]:
    """Compare whole recoveries with those of Ray Train's elastic trainer.

    It trains the same model data parallel on three nodes, which is what it can do. is_time: tells
    whether what takes so many seconds may begin.
    """
    from autohet.bench.recovery.ray_train_baseline import NOTICE_S, measure_ray_train

    job = Job.from_yaml(JOB)
    model = dict(job.model.config or {})
    spec = model_spec_from_config(job.name, model, precision="fp32")
    what = {
        "death": "a node dies",
        "notice": f"a node leaves with notice (for the baseline {NOTICE_S:.0f} s)",
    }
    for cause in [cause for cause in ("death", "notice") if cause in changes]:
        ours = changes[cause]
        policies = {
            "local_first": _entry(ours["seconds"], ours["bytes_by_tier"], ours["steps_lost"])
        }
        ratios: dict[str, float | None] = {}
        for name, expected_s in BASELINES_S.items():
            ratios[f"ratio_vs_{name}"] = None
            if is_time(f"{name}, {cause}", expected_s):
                theirs = measure_ray_train(model, cause, tuned=name.endswith("_tuned"))
                entry = _entry(
                    dict.fromkeys(PARTS, None) | {"total": theirs.total_s}, None, theirs.steps_lost
                )
                policies[name] = entry | {
                    "survivors": theirs.survivors,
                    "survivors_that_kept_their_process": theirs.kept,
                }
                ratios[f"ratio_vs_{name}"] = theirs.total_s / ours["seconds"]["total"]
        yield {
            "scenario": f"fleet_{cause}",
            "what": f"{what[cause]}: seconds without a step in whole runs on this machine",
            "cause": cause,
            "state_bytes": spec.parameters * 12,
            "simulated": False,
            "policies": policies,
            "ratio_vs_s3_only": None,
            "ratio_vs_limit": None,
            **ratios,
        }


def _entry(seconds: Json, bytes_by_tier: Mapping[str, int] | None, steps_lost: int) -> Document:
    """Return one policy's entry; None where something was not counted.

    `verified` is None: the state was not compared here (the tests do that).
    """
    tiers = bytes_by_tier or dict.fromkeys(("memory", "disk", "peer", "s3"))
    return {
        "seconds": dict(seconds),
        "bytes_by_tier": dict(tiers),
        "steps_lost": steps_lost,
        "verified": None,
        "how": "run",
    }


def _job(directory: str) -> Job:
    if not Path(JOB).exists() or not Path(CLUSTER).exists():
        raise ConfigError(
            f"{JOB} and {CLUSTER} are not here; run in the repository, or give --quick"
        )
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


def silent(*_: Any) -> None:
    """No-op: the run shows nothing."""
