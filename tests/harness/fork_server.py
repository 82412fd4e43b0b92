"""Processes forked from one server that has imported everything, one server for a test session.

An import of all that a worker runs costs 8 s of processor time. A forked process has a process id,
signals and memory of its own, and the environment that its parent has at that moment.
"""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.optim.adamw",
    "boto3",
    "pytest",  # a child imports its parent's main module again
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    "pyarrow.compute",  # else imported with a worker's first rows, a quarter of a second each
    "recovery.storage.directory",
    "autohet.runtime.models.initialization",
    "autohet.runtime.spmd.trainer",
    "autohet.runtime.step.trainer",
    "autohet.runtime.worker",
    "autohet.driver.ray.agents.agent_actor",
    "autohet.driver.loop.controller",
    "autohet.driver.checkpoints.durable",
    "autohet.control.planning.proposals",
    "planner.search",
    "planner.strategies",
    "tests.harness.process_fleet",
    "tests.harness.toy_model",
    "tests.harness.training_case",
    "tests.harness.frozen_heap",  # last: it takes in what the others have made
)


class ForkedProcess(ForkServerProcess):
    """Process with its parent's environment; a plain one has that of the server's start."""

    def __init__(self, *, target: Callable[..., Any], args: tuple[Any, ...] = (), **named: Any):
        super().__init__(target=_run, args=(dict(os.environ), target, args), **named)


def _run(environment: dict[str, str], target: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args)


class ForkingContext(ForkServerContext):
    """Context of `multiprocessing` whose processes are `ForkedProcess`es."""

    Process = ForkedProcess  # type: ignore[assignment]


def forking_context() -> ForkingContext:
    """Return the context whose processes are forked from the session's server.

    The server imports `PRELOAD` when the first process is started.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    return ForkingContext()


def server_address() -> str:
    """Return where this process's server listens.

    It is for `use_server` in a child that starts processes itself.
    """
    forking_context()
    forkserver.ensure_running()
    return str(forkserver._forkserver._forkserver_address)  # type: ignore[attr-defined]


def use_server(address: str) -> None:
    """Fork from the parent's server.

    Without this a child of the server starts, and imports, one of its own.
    """
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address = address
    server.ensure_running = lambda: None
