"""Baseline of the recovery benchmark: Ray Train's own elastic trainer on a real local cluster.

One node leaves during training. Ray Train's trainer supports data parallelism over equal workers,
so the baseline has one plain transformers model a worker, gloo, and a checkpoint of model and
optimizer every few steps. It measures the time without a step, and the steps that are run again.
"""

import logging
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray
from ray.train import (
    Checkpoint,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    get_checkpoint,
    get_context,
    report,
)
from ray.train.torch import TorchTrainer, prepare_model

from autohet.driver.emulated.fleet import EmulatedFleet
from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.requests.drain import drain
from planner.inputs.documents import Document, Json

NUM_NODES = 3
CHECKPOINT_EVERY = 5
WARM_STEPS = 12
STEPS_AFTER = 3
DEADLINE_S = 240.0
NOTICE_S = 10.0
START_TIMEOUT = "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"
START_TIMEOUT_S = 10
"""Seconds that are long enough for workers of this machine to start."""


@dataclass(frozen=True)
class BaselineResult:
    """Measured recovery of Ray Train's trainer.

    `total_s`: seconds between the end of the last step before the event and the end of the first
    one after it. `kept`: survivors whose process was not restarted.
    """

    total_s: float
    steps_lost: int
    kept: int
    survivors: int


def measure_ray_train(model: Json, cause: str, *, tuned: bool = False) -> BaselineResult:
    """Train `model` on three nodes, take one away, and measure the recovery.

    `model`: a transformers config as a mapping. `cause`: "notice" or "death". `tuned`: sizes are
    polled without a pause (Ray's default: every 60 s), and workers that cannot be placed are given
    up after START_TIMEOUT_S (60 s).

    Raises:
        RuntimeError: training did not continue within four minutes.
    """
    document = {
        "head_node_type": "head",
        "available_node_types": {
            "head": {},
            "node": {"resources": {"CPU": 1, "GPU": 0}, "min_workers": NUM_NODES},
        },
    }
    ray_cluster.quieten()
    if tuned:
        os.environ[START_TIMEOUT] = str(START_TIMEOUT_S)
    fleet = EmulatedFleet(document, head_arguments={"num_cpus": 0})
    with tempfile.TemporaryDirectory(prefix="autohet-ray-train-") as directory:
        try:
            ray.init(address=fleet.start(), log_to_driver=False, logging_level=logging.ERROR)
            return _run(fleet, dict(model), cause, Path(directory), tuned)
        finally:
            fleet.close()
            os.environ.pop(START_TIMEOUT, None)


def _run(
    fleet: EmulatedFleet, model: Document, cause: str, directory: Path, tuned: bool
) -> BaselineResult:
    more: Document = {"elastic_resize_monitor_interval_s": 0.0} if tuned else {}
    trainer = TorchTrainer(
        _train,
        train_loop_config={"model": model, "directory": str(directory)},
        scaling_config=ScalingConfig(
            num_workers=(1, NUM_NODES),  # type: ignore[arg-type]
            resources_per_worker={"CPU": 1},
            **more,
        ),
        run_config=RunConfig(
            name="baseline",
            storage_path=str(directory / "runs"),
            failure_config=FailureConfig(max_failures=5),
        ),
    )
    training = threading.Thread(target=_fit, args=(trainer,), name="ray train", daemon=True)
    training.start()
    deadline = time.monotonic() + DEADLINE_S
    _until(
        lambda: max((step for _, step, _ in _records(directory)), default=-1) >= WARM_STEPS,
        deadline,
        "the first steps",
    )
    # All processes of one machine share this clock, so the workers' times compare with it.
    struck = time.monotonic()
    name = max(fleet.nodes)
    node_id = fleet.nodes[name].ray_node.node_id
    if cause == "notice":
        drain(node_id, "benchmark", NOTICE_S)
        time.sleep(NOTICE_S)
    fleet.kill(name)
    _until(lambda: _found(directory, struck) is not None, deadline, f"a step after the {cause}")
    (directory / "stop").touch()
    training.join(30)
    result = _found(directory, struck)
    assert result is not None
    return result


def _fit(trainer: TorchTrainer) -> None:
    try:
        trainer.fit()
    except Exception:  # noqa: BLE001
        return


def _train(settings: Document) -> None:
    """Run one worker's training loop; log every step with its time and process."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    directory = Path(settings["directory"])
    fields = dict(settings["model"])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = prepare_model(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
    optimizer = torch.optim.AdamW(model.parameters())
    first = resume(model, optimizer)

    # Written line by line: a worker that is killed leaves all its steps.
    name = f"steps-{get_context().get_world_rank()}-{time.time_ns()}"
    log = (directory / name).open("a", buffering=1)
    for step in range(first, 100_000):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, fields["vocab_size"], (2, 65), generator=generator)
        model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1)
        log.write(f"{step} {time.monotonic()} {os.getpid()}\n")
        if (directory / "stop").exists():
            return
        if step % CHECKPOINT_EVERY == CHECKPOINT_EVERY - 1:
            report_checkpoint(model, optimizer, step)


def resume(model: Any, optimizer: Any) -> int:
    """Load the newest checkpoint, if there is one; return the step to begin with."""
    import torch

    checkpoint = get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as directory:
        state = torch.load(Path(directory, "state.pt"))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"]) + 1


def report_checkpoint(model: Any, optimizer: Any, step: int) -> None:
    """Report a checkpoint after a step; all workers call it."""
    import torch

    if get_context().get_world_rank() != 0:
        report({"step": step})
        return
    with tempfile.TemporaryDirectory() as directory:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
            Path(directory, "state.pt"),
        )
        report({"step": step}, checkpoint=Checkpoint.from_directory(directory))


def _records(directory: Path) -> list[tuple[float, int, str]]:
    """Return (time, step, process) of every step of every worker, by time."""
    records = []
    for path in directory.glob("steps-*"):
        for line in path.read_text().splitlines():
            parts = line.split()
            # The last line of a killed worker may be cut off.
            if len(parts) == 3:
                step, at, process = parts
                records.append((float(at), int(step), process))
    return sorted(records)


def _found(directory: Path, struck: float) -> BaselineResult | None:
    """Return the largest time without a step since the node was struck.

    None until a few steps have followed it.
    """
    records = _records(directory)
    recent = [record for record in records if record[0] >= struck - 1.0]
    gaps = [(following[0] - one[0], one, following) for one, following in pairwise(recent)]
    if not gaps:
        return None

    total_s, last, first = max(gaps)
    before = [record for record in records if record[0] <= last[0]]
    after = [record for record in recent if record[0] >= first[0]]
    workers_before = {process for _, _, process in before}
    workers_after = {process for _, _, process in after}
    steps_after = {step for _, step, _ in after}
    # The same workers on both sides: a pause, and not yet the change.
    if workers_after == workers_before or len(steps_after) < STEPS_AFTER:
        return None

    done = max(step for _, step, _ in before)
    _, first_step, _ = first
    steps_lost = max(0, done + 1 - first_step)
    num_kept = len(workers_before & workers_after)
    return BaselineResult(total_s, steps_lost, num_kept, NUM_NODES - 1)


def _until(condition: Any, deadline: float, what: str) -> None:
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"Ray Train's trainer: waited too long for {what}")
        time.sleep(0.1)
