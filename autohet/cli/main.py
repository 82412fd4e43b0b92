"""Entry point of `autohet`: parses the command line and calls the command's module.

Exit codes: 0 done, 1 the work failed, 2 the user's input is wrong (one clear message, no
traceback).
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from autohet import __version__
from autohet.own_packages import require_own_packages

COMMANDS = {
    "plan": "choose an asymmetric 3D plan for a job on a cluster",
    "train": "train a job on a Ray cluster",
    "sky": "train a job under SkyPilot, in the next region where one starves",
    "rows": "prepare a job's data, and show which tokens are trained on",
    "check-model": "prove on the CPU that a job's model is trained as transformers computes it",
    "profile": "measure this machine's devices for a job's layers",
    "simulate": "a spot trace through the real controller, on a fake clock",
    "quote": "the price of a job by a deadline, and how likely it is",
    "bench": "benchmarks: planner, recovery, step",
    "checkpoint": "list, verify or export checkpoints",
    "status": "what a running job is doing",
    "stop": "stop a running job, also without its driver",
    "replay": "a run's recorded observations, decided anew",
    "report": "a run's events as one HTML page and a timeline",
    "demo": "the demonstration, on an emulated fleet on this machine",
}
OWN_JSON = ("bench", "checkpoint", "demo")
"""Commands that define `--json` themselves: for each of their actions, or with a file's name."""


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """Build the parser; import only the module of `command`, so that every command starts fast."""
    parser = argparse.ArgumentParser(
        prog="autohet",
        description="Elastic training on mixed spot GPUs.",
        epilog=(
            "Exit codes: 0 done, 1 the work failed, 2 the input is wrong (one message says what and"
            " how to fix it). `autohet COMMAND --help` shows a command's options; with --json it"
            " prints one JSON document and nothing else."
        ),
    )
    parser.add_argument("--version", action="version", version=f"autohet {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        command_parser = subparsers.add_parser(name, help=summary)
        if name == command:
            module = importlib.import_module(_module_of(name))
            command_parser.description = module.DESCRIPTION
            module.add_options(command_parser)
            if name not in OWN_JSON:
                command_parser.add_argument(
                    "--json", action="store_true", help="print one JSON document"
                )
    return parser


def _module_of(command: str) -> str:
    return f"autohet.cli.{command.replace('-', '_')}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    try:
        require_own_packages()
    except ImportError as error:
        print(f"autohet: {error}", file=sys.stderr)
        return 2
    # Only now, since a foreign `planner` may lack what is imported from it.
    from autohet.runtime.process.terminal import visible
    from planner.errors import ConfigError

    # Advice of transformers on configs would hide our one message.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if argv is None:
        argv = sys.argv[1:]
    arguments = list(argv)
    # Read before it is parsed, since only the command's own module is imported.
    command = next((argument for argument in arguments if argument in COMMANDS), None)
    parsed = build_parser(command).parse_args(arguments)
    module = importlib.import_module(_module_of(parsed.command))
    try:
        return int(module.run(parsed))
    except ConfigError as error:
        print(visible(f"autohet {parsed.command}: {error}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"autohet {parsed.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
