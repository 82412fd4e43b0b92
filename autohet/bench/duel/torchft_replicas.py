"""torchft in the duel: each machine a replica group of one worker, a lighthouse beside them.

It takes no notices. A step that fails is dropped; the others go on with fewer rows, and the
replacement copies the state of one of them. Gradients are summed through the manager: in torchft
0.2.0 its wrapper of DistributedDataParallel raises AssertionError in the survivors of a death.
"""

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

from autohet.bench.duel.machines import take_away, wait_for
from autohet.bench.duel.task import NUM_WORKERS, DuelTask, PlainModel, record_step

MODULE = "autohet.bench.duel.torchft_replicas"


def run(task: DuelTask, log: Path) -> None:
    """Train the task in one process a machine.

    Raises:
        ImportError: the package `torchft` is not installed.
    """
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000)
    replicas = _Replicas(task, log, lighthouse.address())
    try:
        for index in range(NUM_WORKERS):
            replicas.replace(index)
        take_away(task, log, replicas, replicas.are_finished)
        wait_for(replicas.are_finished, "torchft")
    finally:
        for index in range(NUM_WORKERS):
            replicas.kill(index)
        lighthouse.shutdown()


class _Replicas:
    """Processes by machine."""

    def __init__(self, task: DuelTask, log: Path, lighthouse: str) -> None:
        self._task = task
        self._log = log
        self._lighthouse = lighthouse
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def notice(self, index: int) -> None:
        """No-op: a replica has no use for it."""

    def kill(self, index: int) -> None:
        process = self._processes[index]
        process.send_signal(signal.SIGKILL)
        process.wait()

    def replace(self, index: int) -> None:
        environment = {**os.environ, "TORCHFT_LIGHTHOUSE": self._lighthouse}
        command = [sys.executable, "-m", MODULE, self._task.directory, str(self._log), str(index)]
        with self._log.with_suffix(".output").open("ab") as output:
            self._processes[index] = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment
            )

    def are_finished(self) -> bool:
        return all(process.poll() is not None for process in self._processes.values())


def _train(task: DuelTask, log: Path, name: str) -> None:
    """Run one replica's training loop."""
    import torch
    from torch.distributed import TCPStore
    from torch.nn.utils import vector_to_parameters
    from torchft import Manager, Optimizer, ProcessGroupGloo

    plain = PlainModel(task)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=plain.load,
        state_dict=plain.state,
        min_replica_size=1,
        replica_id=f"node-{name}-",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        init_sync=False,
        timeout=timedelta(seconds=10),
    )
    optimizer = Optimizer(manager, plain.optimizer)
    _wait_for_all(task, name)
    finished = task.path / "torchft-finished"
    # Else a replacement that comes after the others' end would train alone from step 0.
    while manager.current_step() < task.steps and not finished.exists():
        step = manager.current_step()
        optimizer.zero_grad()
        rank = manager.participating_rank()
        loss = plain.loss(plain.model, plain.part(step, rank or 0, NUM_WORKERS))
        loss.backward()
        gradients = [each.grad for each in plain.model.parameters() if each.grad is not None]
        both = torch.cat([*[each.flatten() for each in gradients], loss.detach()[None]])
        manager.allreduce(both).wait()
        vector_to_parameters(both[:-1], gradients)
        optimizer.step()
        if manager.participating_rank() == 0:
            applied = manager.current_step() > step
            record_step(log, step, float(both[-1]), applied=applied)
    finished.touch()
    manager.shutdown(wait=False)


def _wait_for_all(task: DuelTask, name: str) -> None:
    """Wait until every machine's first process is there, so that all begin with step 0."""
    (task.path / f"torchft-{name}").touch()
    names = [f"torchft-{index}" for index in range(NUM_WORKERS)]
    wait_for(lambda: all((task.path / each).exists() for each in names), "the other replicas")


if __name__ == "__main__":
    _train(DuelTask.load(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
