"""The task that all trainers of the duel get: weights, rows, pace, and when machines leave.

The shape is that of Ray Train's own preemption benchmark (ray-project/ray, pull request 65047):
periodic checkpoints, four machines that leave after a notice, each replaced at once.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from autohet.emulate.demo import reference_losses
from autohet.runtime.data import prepare_dataset
from autohet.runtime.job import Job
from autohet.runtime.models.config import load_config
from autohet.runtime.models.registry import family_of
from autohet.runtime.state.frozen import first_weights
from autohet.runtime.step.batches import Batches
from autohet.runtime.step.reference import adamw, reference_model
from planner.inputs.documents import Document, Json

MODEL: Json = {
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 64,
}
NUM_LAYERS = 4
NUM_WORKERS = 4
"""Machines with one worker each."""
ROWS = 8
"""Sequences of a step."""
LEARNING_RATE = 1e-3
TASK_FILE = "task.json"
START_FILE = "start.pt"
ROWS_FILE = "rows.npy"
REFERENCE_FILE = "reference.json"


@dataclass(frozen=True)
class DuelTask:
    """Steps, pace and leaving machines of one duel; everything else is written beside it.

    row_s: seconds that a sequence takes on one worker, as a sleep. notice_s: time from a notice
    until its machine is killed. leaving: steps at which a notice comes.
    """

    directory: str
    steps: int
    checkpoint_every: int
    row_s: float
    notice_s: float
    leaving: tuple[int, ...]
    seed: int = 1

    @property
    def usual_step_s(self) -> float:
        """Seconds of a step on all machines."""
        return self.row_s * ROWS / NUM_WORKERS

    @property
    def path(self) -> Path:
        return Path(self.directory)

    @classmethod
    def load(cls, directory: str) -> DuelTask:
        return msgspec.json.decode(Path(directory, TASK_FILE).read_bytes(), type=cls)

    def log_of(self, trainer: str) -> Path:
        """Return the file of a trainer's steps."""
        return self.path / f"{trainer}.steps.jsonl"


def make_task(directory: Path, steps: int, seed: int) -> DuelTask:
    """Write a task's weights, rows, and its losses in one process; return it.

    Machines leave at four steps, one in each quarter of the run.
    """
    chance = random.Random(seed)
    quarter = steps // 4
    # A replacement and a whole notice fit between two of them.
    leaving = [quarter * part + chance.randint(quarter // 8, quarter // 4) for part in range(4)]
    task = DuelTask(str(directory), steps, quarter, 0.15, 6.0, tuple(leaving), seed)

    job = job_of(task)
    training = job.require_training()
    config = load_config(job.model, job.training)
    dataset = prepare_dataset(training, job.training.sequence_length)
    batches = Batches(dataset, task.seed, ROWS, torch.device("cpu"))
    rows = [batches(step, range(ROWS)) for step in range(steps)]
    tokens = torch.stack([torch.cat([each[0], each[1][:, -1:]], dim=1) for each in rows])
    np.save(directory / ROWS_FILE, tokens.numpy())

    names = list(family_of(config).parameter_specs(config))
    first = dict(first_weights(job.model, config, names, task.seed))
    torch.save(first, directory / START_FILE)
    losses = reference_losses(job, steps)
    (directory / REFERENCE_FILE).write_text(json.dumps(losses))
    (directory / TASK_FILE).write_text(json.dumps(asdict(task)))
    return task


def job_of(task: DuelTask) -> Job:
    """Return the task as AutoHet's job."""
    names = [f"node-{index}" for index in range(len(task.leaving))]
    script: list[Document] = []
    for step, name in zip(task.leaving, names, strict=True):
        notice = {"event": "notice", "node": name, "deadline_s": task.notice_s}
        # The replacement comes when the machine is gone, as for the others.
        after = step + round(task.notice_s / task.usual_step_s)
        script.append({"at_step": step, **notice})
        script.append({"at_step": after, "event": "arrival", "node_type": "node"})
    return Job.from_document(
        {
            "name": "duel",
            "model": {"config": dict(MODEL)},
            "training": {
                "global_batch_sequences": ROWS,
                "sequence_length": 64,
                "steps": task.steps,
                "precision": "fp32",
                "seed": task.seed,
                "learning_rate": LEARNING_RATE,
                "schedule": "constant",
                "weight_decay": 0.0,
                "clip_norm": None,
                "device": "cpu",
            },
            "data": {"source": "builtin:python-stdlib", "tokenizer": "bytes"},
            "checkpoint": {
                "every": f"{task.checkpoint_every} steps",
                "storage": str(task.path / "autohet" / "checkpoints"),
            },
            "elastic": {
                "slow_ratio": 0,
                "notice_sources": ["ray", "script"],
                "script": script,
            },
            "parallelism": {"microbatch_sequences": 1, "max_tp_degree": 1, "min_pipelines": 2},
            # A forward and a backward pass of all layers: three times a block's forward pass.
            "emulation": {
                "relative_speed_by_gpu_type": {"A10G": 1.0},
                "block_forward_s": task.row_s / (3 * NUM_LAYERS),
            },
        }
    )


class PlainModel:
    """Whole model of the library with torch's AdamW, as the other trainers train it."""

    def __init__(self, task: DuelTask) -> None:
        torch.set_num_threads(1)
        job = job_of(task)
        first = torch.load(task.path / START_FILE)
        self.task = task
        self.model = reference_model(load_config(job.model, job.training), iter(first.items()))
        self.optimizer = adamw(self.model, job.training)
        self.rows = np.load(task.path / ROWS_FILE, mmap_mode="r")

    def part(self, step: int, rank: int, size: int) -> Tensor:
        """Return a worker's rows of a step, [rows, S + 1]."""
        return torch.from_numpy(np.array(self.rows[step, rank::size]))

    def loss(self, model: Any, rows: Tensor) -> Tensor:
        """Return the mean loss of rows [b, S + 1], at the task's pace."""
        time.sleep(self.task.row_s * len(rows))
        logits = model(input_ids=rows[:, :-1]).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def record_step(
    path: Path, step: int, loss: float, *, applied: bool = True, at: float | None = None
) -> None:
    """Append a step that was run, with its loss over all workers' rows.

    applied: false if its update was dropped. at: wall clock of its end; None: now.
    """
    ended = time.time() if at is None else at
    line = {"step": step, "loss": loss, "applied": applied, "time": ended}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def steps_in(path: Path) -> Iterator[Document]:
    """Yield recorded steps; a killed worker's last line may be cut off."""
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue
