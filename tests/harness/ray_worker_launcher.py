"""Program that a raylet of the tests starts instead of Ray's `setup_worker.py`.

It asks the fork server (`tests.harness.warm_ray`) for the worker and stands for it: it passes
signals on and ends as the worker ends. It imports little, since that is its purpose. A worker that
wants an environment of its own is started as Ray starts it.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType

ADDRESS = "AUTOHET_TEST_FORK_SERVER"
"""Environment variable with the path of the fork server's socket."""
SETUP_WORKER = "AUTOHET_TEST_SETUP_WORKER"
"""Environment variable with the path of Ray's own program."""
CONTEXT = "--serialized-runtime-env-context="
LANGUAGE = "--language="
INTEGER_BYTES = 4


def is_plain(arguments: list[str]) -> bool:
    """Return True if Ray would run the worker with this interpreter and this environment."""
    given = dict.fromkeys((CONTEXT, LANGUAGE), "")
    for argument in arguments:
        for option in given:
            if argument.startswith(option):
                given[option] = argument.removeprefix(option)
    context = json.loads(given[CONTEXT] or "{}")
    interpreter = context.pop("py_executable", sys.executable)
    return (
        given[LANGUAGE] == "PYTHON" and interpreter == sys.executable and not any(context.values())
    )


def run_forked(arguments: list[str]) -> int:
    """Have the worker forked, and wait for its end; return its wait status."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[ADDRESS])
        request = {
            "arguments": arguments,
            "environment": dict(os.environ),
            "directory": os.getcwd(),
        }
        text = json.dumps(request).encode()
        socket.send_fds(server, [len(text).to_bytes(INTEGER_BYTES, "big")], [0, 1, 2])
        server.sendall(text)
        worker = int.from_bytes(server.recv(INTEGER_BYTES, socket.MSG_WAITALL), "big")

        def forward(number: int, _: FrameType | None) -> None:
            with suppress(ProcessLookupError):
                os.kill(worker, number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, forward)
        return int.from_bytes(server.recv(INTEGER_BYTES, socket.MSG_WAITALL), "big")


def main() -> None:
    arguments = sys.argv[1:]
    if not is_plain(arguments):
        os.execv(sys.executable, [sys.executable, os.environ[SETUP_WORKER], *arguments])
    own = (CONTEXT, LANGUAGE)
    status = run_forked([each for each in arguments if not each.startswith(own)])
    if os.WIFSIGNALED(status):
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
