"""transformers' Trainer in the duel, with `enable_jit_checkpoint`, started by torchrun.

A notice is a SIGTERM to every worker, as Slurm and Kubernetes send it. The job then starts again on
the machines that are there, from the checkpoint that the trainer saved.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from autohet.bench.duel.machines import take_away, wait_for
from autohet.bench.duel.task import NUM_WORKERS, DuelTask

MODULE = "autohet.bench.duel.transformers_trainer"


def run(task: DuelTask, log: Path) -> None:
    """Train the task in processes of torchrun, each start in a session of its own."""
    workers = _Torchrun(task, log)
    try:
        workers.start()
        take_away(task, log, workers, workers.is_finished)
        wait_for(workers.is_finished, "transformers' Trainer")
    finally:
        workers.kill(0)


class _Torchrun:
    """One start after another of the same command."""

    def __init__(self, task: DuelTask, log: Path) -> None:
        self._task = task
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def is_finished(self) -> bool:
        return (self._task.path / "transformers" / "finished").exists()

    def start(self) -> None:
        arguments = ["--standalone", f"--nproc-per-node={NUM_WORKERS}", "-m", MODULE]
        command = [sys.executable, "-m", "torch.distributed.run", *arguments]
        with self._log.with_suffix(".output").open("ab") as output:
            self._process = subprocess.Popen(
                [*command, self._task.directory, str(self._log)],
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def notice(self, index: int) -> None:
        assert self._process is not None
        # torchrun passes it to its workers and kills them after 30 s.
        self._process.send_signal(signal.SIGTERM)

    def kill(self, index: int) -> None:
        if self._process is not None:
            _kill_session(self._process)

    def replace(self, index: int) -> None:
        self.start()


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _train(task: DuelTask, log: Path) -> None:
    """Run one worker's trainer."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from autohet.bench.duel.task import LEARNING_RATE, ROWS, PlainModel, record_step

    plain = PlainModel(task)
    steps = {}

    class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return task.steps * ROWS

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"rows": torch.from_numpy(plain.rows[index // ROWS, index % ROWS].copy())}

    class Paced(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(Rows())

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **named: Any) -> Any:
            loss = plain.loss(model, inputs["rows"])
            steps[self.state.global_step] = loss.detach()
            return loss

    class StepLog(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            step = state.global_step - 1
            mean = steps.pop(step)
            torch.distributed.all_reduce(mean)
            if args.process_index == 0:
                record_step(log, step, float(mean) / NUM_WORKERS)

    directory = task.path / "transformers"
    directory.mkdir(exist_ok=True)
    arguments = TrainingArguments(
        str(directory),
        max_steps=task.steps,
        per_device_train_batch_size=ROWS // NUM_WORKERS,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=0.0,
        save_steps=task.checkpoint_every,
        enable_jit_checkpoint=True,
        use_cpu=True,
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Paced(plain.model, arguments, train_dataset=Rows(), callbacks=[StepLog()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(directory)))
    if trainer.state.global_step >= task.steps:
        (directory / "finished").touch()


if __name__ == "__main__":
    _train(DuelTask.load(sys.argv[1]), Path(sys.argv[2]))
