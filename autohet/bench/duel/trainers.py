"""Trainers of the duel, each run in a process of its own.

`python -m autohet.bench.duel.trainers NAME DIRECTORY` runs one.
"""

import importlib
import importlib.util
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autohet.bench.duel.task import DuelTask

LIMIT_S = 900.0
"""Seconds after which a trainer that has not ended is given up."""


@dataclass(frozen=True)
class Contestant:
    """Trainer, how it is run, and the package that it needs beside AutoHet's own."""

    what: str
    module: str
    options: dict[str, Any] = field(default_factory=dict)
    package: str | None = None


TRAINERS = {
    "autohet": Contestant("AutoHet: a plan for what is there, state moved on notice", "ours"),
    "ray_train": Contestant("Ray Train, periodic checkpoints", "ray_train"),
    "ray_train_jit": Contestant(
        "Ray Train, a checkpoint on each notice", "ray_train", {"just_in_time": True}
    ),
    "transformers": Contestant(
        "transformers' Trainer, enable_jit_checkpoint, torchrun",
        "transformers_trainer",
        package="accelerate",
    ),
    "torchft": Contestant("torchft, a replica a machine", "torchft_replicas", package="torchft"),
}


def why_not(name: str) -> str | None:
    """Return why a trainer cannot run here; None if it can."""
    package = TRAINERS[name].package
    if package is None or importlib.util.find_spec(package) is not None:
        return None
    return f"the package {package} is not installed (pip install {package})"


def run_apart(name: str, task: DuelTask) -> None:
    """Run a trainer to its end in a session of its own.

    Raises:
        RuntimeError: it failed, or took longer than LIMIT_S; with the end of its output.
    """
    path = task.path / f"{name}.output"
    with path.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "autohet.bench.duel.trainers", name, task.directory],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()
    if code != 0:
        last = path.read_text(errors="replace").strip().splitlines()[-1:]
        raise RuntimeError(f"{name} ended with code {code}: {''.join(last)}")


if __name__ == "__main__":
    _task = DuelTask.load(sys.argv[2])
    _trainer = TRAINERS[sys.argv[1]]
    _module = importlib.import_module(f"autohet.bench.duel.{_trainer.module}")
    _module.run(_task, Path(_task.log_of(sys.argv[1])), **_trainer.options)
