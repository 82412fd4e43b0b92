"""Ray's worker processes, forked from one process that has imported what they run.

A worker's start costs 10 s of processor time in imports, which is most of what a test with a real
Ray cluster costs. The raylet starts `ray_worker_launcher.py` for each worker, which asks the server
here. The worker has the launcher's environment, directory and output; its process id, its death
and its signals are its own. A launcher that is killed takes its worker along.
"""

import atexit
import functools
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.harness.ray_worker_launcher import ADDRESS, INTEGER_BYTES, SETUP_WORKER

LAUNCHER = Path(__file__).with_name("ray_worker_launcher.py")
START_S = 60.0
PRELOAD = (
    "aiohttp",
    "boto3",
    "google.protobuf",
    "jsonschema",
    "requests",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "autohet.control.values.observation",
    "autohet.driver.sources.gpu_health",
    "autohet.driver.sources.node_signs",
    "autohet.runtime.facts.preparation",
    "autohet.runtime.worker",
    "recovery.local.agent_store",
    "recovery.peers.replication",
    "recovery.peers.server",
)
"""Modules that workers and agents import. Ray is not among them: its configuration, of which the
raylet sets a part for each worker, is read when it is imported.
"""


@contextmanager
def warm_ray_workers() -> Iterator[None]:
    """Let raylets that this process starts within the context fork their workers."""
    os.environ.update(launcher_environment())
    with launching_raylets():
        yield


def launcher_environment() -> dict[str, str]:
    """Return the variables by which a raylet's launcher finds the server; start it if need be."""
    from ray._private import workers

    (folder,) = workers.__path__
    return {ADDRESS: session_server(), SETUP_WORKER: f"{folder}/setup_worker.py"}


@contextmanager
def launching_raylets() -> Iterator[None]:
    """Give raylets that this process starts within the context the launcher of forked workers."""
    from ray._private.parameter import RayParams

    made = RayParams.__init__

    def with_launcher(self: Any, *arguments: Any, **named: Any) -> None:
        made(self, *arguments, **{"setup_worker_path": str(LAUNCHER), **named})

    with patch.object(RayParams, "__init__", with_launcher):
        yield


@functools.cache
def session_server() -> str:
    """Start the server that this process's raylets share; return its address."""
    running = ExitStack()
    atexit.register(running.close)
    directory = running.enter_context(tempfile.TemporaryDirectory(prefix="fork-server-"))
    address = str(Path(directory, "socket"))
    running.enter_context(running_server(address, PRELOAD))
    return address


@contextmanager
def running_server(address: str, modules: Sequence[str]) -> Iterator[None]:
    """Run a server that has imported `modules` during the context, but not after this process."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.warm_ray", str(listener.fileno()), *modules],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            process_group=0,
        )
    try:
        yield
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait(START_S)


@dataclass
class ForkServer:
    """Forks a worker for each launcher that connects; ends with its standard input."""

    listener: socket.socket
    launchers: dict[int, socket.socket] = field(default_factory=dict)
    """Launcher's connection by worker's process id."""

    def serve(self) -> None:
        woken, wake = socket.socketpair()
        for end in (woken, wake):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            for source in (self.listener, woken, sys.stdin):
                selector.register(source, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is sys.stdin:
                        return
                    if key.fileobj is self.listener:
                        self._fork(selector)
                    elif key.fileobj is woken:
                        woken.recv(4096)
                        self._reap(selector)
                    elif key.data in self.launchers:  # the launcher is dead
                        selector.unregister(key.fileobj)
                        os.kill(key.data, signal.SIGKILL)

    def _fork(self, selector: selectors.BaseSelector) -> None:
        launcher, _ = self.listener.accept()
        length, streams, _, _ = socket.recv_fds(launcher, INTEGER_BYTES, 3)
        text = launcher.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
        if not text.endswith(b"}") or len(streams) != 3:  # the launcher was killed
            launcher.close()
            return
        request = json.loads(text)
        worker = os.fork()
        if worker == 0:
            selector.close()
            signal.set_wakeup_fd(-1)
            self._become_worker(request, streams)
        for stream in streams:
            os.close(stream)
        with suppress(OSError):
            launcher.sendall(worker.to_bytes(INTEGER_BYTES, "big"))
        self.launchers[worker] = launcher
        selector.register(launcher, selectors.EVENT_READ, worker)

    def _become_worker(self, request: dict[str, Any], streams: list[int]) -> None:
        self.listener.close()
        for other in self.launchers.values():
            other.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv = request["arguments"]
        runpy.run_path(sys.argv[0], run_name="__main__")
        os._exit(0)

    def _reap(self, selector: selectors.BaseSelector) -> None:
        while self.launchers:
            worker, status = os.waitpid(-1, os.WNOHANG)
            if worker == 0:
                return
            launcher = self.launchers.pop(worker)
            with suppress(KeyError):
                selector.unregister(launcher)
            with suppress(OSError):
                launcher.sendall(status.to_bytes(INTEGER_BYTES, "big"))
            launcher.close()

    def close(self) -> None:
        for worker in self.launchers:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    assert "ray" not in sys.modules, "Ray must be imported with its worker's variables"
    server = ForkServer(socket.socket(fileno=int(sys.argv[1])))
    try:
        server.serve()
    finally:
        server.close()
