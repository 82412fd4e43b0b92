"""Ray Train in the duel: with periodic checkpoints, or with one more on each notice.

Both are the arms of Ray's own preemption benchmark. A notice is a drain of the node, which
`ray.train.get_preemption_info` shows to the training loop.
"""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import (
    FailureConfig,
    RunConfig,
    ScalingConfig,
    get_context,
    get_preemption_info,
)
from ray.train.torch import TorchTrainer, prepare_model

from autohet.bench.duel.machines import DOCUMENT, take_away
from autohet.bench.duel.task import NUM_WORKERS, DuelTask, PlainModel, record_step
from autohet.bench.recovery.ray_train_baseline import report_checkpoint, resume
from autohet.driver.emulated.fleet import EmulatedFleet
from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.requests.drain import drain


def run(task: DuelTask, log: Path, *, just_in_time: bool = False) -> None:
    """Train the task on a local Ray cluster.

    just_in_time: save a checkpoint as soon as a notice is seen.
    """
    ray_cluster.quieten()
    fleet = EmulatedFleet(DOCUMENT, head_arguments={"num_cpus": 0})
    settings = {"directory": task.directory, "log": str(log), "just_in_time": just_in_time}
    try:
        ray.init(address=fleet.start(), log_to_driver=False, logging_level=logging.ERROR)
        trainer = TorchTrainer(
            _train,
            train_loop_config=settings,
            scaling_config=ScalingConfig(num_workers=NUM_WORKERS, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(
                name=log.stem,
                storage_path=str(task.path / "ray_train"),
                failure_config=FailureConfig(max_failures=-1),
            ),
        )
        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(trainer.fit)
            take_away(task, log, _Nodes(fleet, task.notice_s), training.done)
            training.result()
    finally:
        fleet.close()


class _Nodes:
    def __init__(self, fleet: EmulatedFleet, notice_s: float) -> None:
        self._fleet = fleet
        self._notice_s = notice_s

    def notice(self, index: int) -> None:
        node = self._fleet.nodes[f"node-{index}"]
        drain(node.ray_node.node_id, "duel", self._notice_s)

    def kill(self, index: int) -> None:
        self._fleet.kill(f"node-{index}")

    def replace(self, index: int) -> None:
        self._fleet.add("node")


def _train(settings: dict[str, Any]) -> None:
    """Run one worker's training loop."""
    task = DuelTask.load(settings["directory"])
    plain = PlainModel(task)
    first = resume(plain.model, plain.optimizer)
    context = get_context()
    model = prepare_model(plain.model)
    has_saved_on_notice = False
    for step in range(first, task.steps):
        rows = plain.part(step, context.get_world_rank(), context.get_world_size())
        loss = plain.loss(model, rows)
        loss.backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        if context.get_world_rank() == 0:
            record_step(Path(settings["log"]), step, float(mean) / context.get_world_size())

        is_due = (step + 1) % task.checkpoint_every == 0
        if settings["just_in_time"] and not has_saved_on_notice:
            # A barrier of all workers.
            has_saved_on_notice = get_preemption_info() is not None
            is_due = is_due or has_saved_on_notice
        if is_due:
            report_checkpoint(plain.model, plain.optimizer, step)
