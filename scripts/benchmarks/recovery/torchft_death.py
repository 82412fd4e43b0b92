"""The baseline torchft: replicas of a whole model in data parallel over gloo, one process of which
is killed.

Every worker is a replica group of one process, with its manager; a lighthouse in this process keeps
the quorum. It is measured twice: with the timeouts of torchft's own documents, and tuned to notice
a silent replica after a second. Gradients go by `Manager.allreduce`, which survives a lost peer;
with torchft's DistributedDataParallel (0.2.0 over gloo, torch 2.13) the survivors died of an
assertion in its hook. Measured are the seconds from the kill to the first step that the survivors
commit by themselves, what of them exceeds a usual step (all that was computed and not committed is
within them: the lost steps in seconds), and how many survivors kept their process.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from autohet.bench.recovery.emulated_fleet import JOB
from autohet.runtime.job import Job
from scripts.benchmarks.provenance import provenance

NUM_WORKERS = 3
WARM_STEPS = 12
STEPS_AFTER = 5
SETTINGS: dict[str, dict[str, int]] = {
    "as its documents say": {
        "quorum_tick_ms": 100,
        "join_timeout_ms": 10_000,
        "heartbeat_timeout_ms": 5000,
        "gloo_timeout_s": 5,
        "manager_timeout_s": 30,
    },
    "tuned": {
        "quorum_tick_ms": 50,
        "join_timeout_ms": 1000,
        "heartbeat_timeout_ms": 1000,
        "gloo_timeout_s": 2,
        "manager_timeout_s": 10,
    },
}
"""The first: the lighthouse of torchft's README (its heartbeat is the default), gloo and manager of
its `train_ddp.py`.
"""
RECIPE = """torchft is no dependency of this repository, and its own would replace parts of it. Beside it:
    pip install --no-deps --target T torchft==0.2.0 googleapis-common-protos \\
        opentelemetry-exporter-otlp-proto-http==1.45.2 opentelemetry-exporter-otlp-proto-common==1.45.2
    pip install --no-deps --target O opentelemetry-exporter-http-transport==0.66b2 opentelemetry-exporter-otlp-common==0.66b2
    PYTHONPATH=T:O:. python -m scripts.benchmarks.recovery.torchft_death"""  # noqa: E501
DEADLINE_S = 240.0
PAUSE_S = 0.1
"""Of each step, as in the baseline of Ray Train."""


def replica(
    number: int,
    lighthouse: str,
    model_config: dict[str, Any],
    directory: str,
    settings: dict[str, int],
) -> None:
    """One worker: trains until it is ended, and writes down each committed step with its time."""
    import torch
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.optim import OptimizerWrapper
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = dict(model_config)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config)
    )
    inner = torch.optim.AdamW(model.parameters())
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=settings["gloo_timeout_s"])),
        load_state_dict=load,
        min_replica_size=1,
        timeout=timedelta(seconds=settings["manager_timeout_s"]),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica-{number}",
        hostname="localhost",
    )
    optimizer = OptimizerWrapper(manager, inner)
    with Path(directory, f"steps-{number}").open("a", buffering=1) as log:
        while True:
            seed = manager.current_step() * NUM_WORKERS + number
            tokens = torch.randint(
                0, config["vocab_size"], (2, 65), generator=torch.Generator().manual_seed(seed)
            )
            optimizer.zero_grad()
            before = manager.current_step()
            model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss.backward()
            for work in [
                manager.allreduce(each.grad) for each in model.parameters() if each.grad is not None
            ]:
                work.wait()
            optimizer.step()
            time.sleep(PAUSE_S)
            if manager.current_step() > before:
                log.write(
                    f"{manager.current_step()} {time.monotonic()} {manager.num_participants()}\n"
                )


def steps(directory: Path) -> list[tuple[float, int, int]]:
    """(time, step, replicas in it) of every committed step of every worker, by time."""
    lines = [
        line.split() for path in directory.glob("steps-*") for line in path.read_text().splitlines()
    ]
    return sorted(
        (float(at), int(step), int(size))
        for step, at, size in (line for line in lines if len(line) == 3)
    )


def wait_for(directory: Path, size: int, count: int, deadline: float, since: float = 0.0) -> None:
    """Until `count` steps were committed by `size` replicas since then."""
    while (
        len({step for at, step, replicas in steps(directory) if replicas == size and at > since})
        < count
    ):
        if time.monotonic() > deadline:
            raise RuntimeError(f"torchft did not commit {count} steps with {size} replicas")
        time.sleep(0.1)


def measure(settings: dict[str, int]) -> dict[str, Any]:
    """One kill. Raises RuntimeError where training did not go on."""
    from torchft.coordination import LighthouseServer

    model = dict(Job.from_yaml(JOB).model.config or {})
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        **{name: value for name, value in settings.items() if name.endswith("_ms")},
    )
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="torchft-") as directory:
        workers = [
            context.Process(
                target=replica,
                args=(number, lighthouse.address(), model, directory, settings),
                daemon=True,
            )
            for number in range(NUM_WORKERS)
        ]
        for worker in workers:
            worker.start()
        try:
            deadline = time.monotonic() + DEADLINE_S
            wait_for(Path(directory), NUM_WORKERS, WARM_STEPS, deadline)
            struck = time.monotonic()
            os.kill(workers[-1].pid, signal.SIGKILL)
            wait_for(Path(directory), NUM_WORKERS - 1, STEPS_AFTER, deadline, struck)
            return found(steps(Path(directory)), struck) | {
                "survivors_that_kept_their_process": sum(
                    worker.is_alive() for worker in workers[:-1]
                )
            }
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
            lighthouse.shutdown()


def found(committed: list[tuple[float, int, int]], struck: float) -> dict[str, float]:
    """What (time, step, replicas) of committed steps say of the kill at `struck`, in seconds."""
    first = {step: at for at, step, _ in reversed(committed)}
    usual = statistics.median(
        b - a for a, b in pairwise(sorted(at for at in first.values() if at < struck)[1:])
    )
    again = min(at for at, _, replicas in committed if at > struck and replicas < NUM_WORKERS)
    last = max(at for at in first.values() if at < again)
    return {
        "usual_step": round(usual, 3),
        "kill_to_step": round(again - struck, 3),
        "lost": round(again - last - usual, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if importlib.util.find_spec("torchft") is None:
        sys.exit(RECIPE)
    load = os.getloadavg()[0]
    cases = {}
    for name, settings in SETTINGS.items():
        runs = [measure(settings) for _ in range(arguments.times)]
        medians = {part: statistics.median(run[part] for run in runs) for part in runs[0]}
        cases[name] = {"settings": settings, "medians": medians, "runs": runs}
    document = {
        "what": (
            "torchft 0.2.0 over gloo, three whole replicas, one killed: seconds from the kill to"
            " the survivors' first step"
        ),
        "pause_of_each_step_s": PAUSE_S,
        "cases": cases,
        "load_average_1min": {"before": load, "after": os.getloadavg()[0]},
        **provenance(),
    }
    print(json.dumps(document, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
