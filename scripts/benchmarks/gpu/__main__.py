"""`scripts/gpu`: every part in a process of its own, within its deadline and the budget.

Each part prints one JSON line as soon as it ends, and the record is rewritten then: a run that is
cut off keeps all earlier results. Exit codes: 0 all that ran showed what it should, 1 something did
not, 2 there is no GPU or an argument is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.benchmarks.gpu.part import Failed, Machine, PartSkipped
from scripts.benchmarks.gpu.parts import DEFAULT_BUDGET_S, PARTS, ROOT, function_of

RESULTS = ROOT / "scripts" / "benchmarks" / "results"
ERROR_CHARACTERS = 2500
LEAST_S = 5.0
"""A part is not begun with less than this left of the budget."""


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen parts; see the module's docstring for exit codes."""
    options = _options(arguments)
    machine = Machine(options.device)
    if options.part:
        Path(options.out).write_text(json.dumps(run_part(options.part, machine)))
        return 0
    if options.device == "cuda" and not machine.count:
        print(
            "there is no GPU here: PyTorch finds no CUDA device; run scripts/gpu on a machine"
            " with one",
            file=sys.stderr,
        )
        return 2
    chosen = options.only.split(",") if options.only else list(PARTS)
    unknown = sorted(set(chosen) - set(PARTS))
    if unknown:
        print(f"Unknown part {', '.join(unknown)}; choose from {', '.join(PARTS)}", file=sys.stderr)
        return 2
    results = run_parts(chosen, machine, options.budget, Path(options.results))
    passed = all(result["outcome"] in ("shown", "skipped") for result in results.values())
    return 0 if passed else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "scripts/gpu", description="Tries what AutoHet claims of GPUs on those of this machine."
    )
    parser.add_argument("--only", metavar="a,b,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--budget",
        type=float,
        default=DEFAULT_BUDGET_S,
        metavar="SECONDS",
        help="end after this time; parts that were not begun are named (default: %(default).0f)",
    )
    parser.add_argument(
        "--results", default=str(RESULTS), metavar="DIR", help="where the record is written"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run_parts(
    chosen: list[str], machine: Machine, budget_s: float, directory: Path
) -> dict[str, dict[str, Any]]:
    """Run parts one after the other and record each as it ends.

    Returns the results by part. One that the budget leaves no time for has the outcome `not run`.
    """
    ends_at = time.monotonic() + budget_s
    results: dict[str, dict[str, Any]] = {}
    for name in chosen:
        left_s = ends_at - time.monotonic()
        if left_s < LEAST_S:
            result = {"outcome": "not run", "reason": f"the budget of {budget_s:.0f} s is spent"}
        else:
            result = run_in_process(name, machine, min(PARTS[name].deadline_s, left_s))
        results[name] = result
        print(json.dumps({name: result}), flush=True)
        record_results(machine, results, directory)
    return results


def run_part(name: str, machine: Machine) -> dict[str, Any]:
    """Run one part in this process.

    Returns its outcome (`shown`, `skipped`, `failed`), the reason, and what it measured.
    """
    try:
        return {"outcome": "shown", "figures": function_of(PARTS[name])(machine)}
    except PartSkipped as reason:
        return {"outcome": "skipped", "reason": str(reason)}
    except Failed as failure:
        return {"outcome": "failed", "reason": str(failure), "figures": failure.figures}


def run_in_process(name: str, machine: Machine, limit_s: float) -> dict[str, Any]:
    """Run a part in a session of its own, so that whatever it has started ends with it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out.json"
        log = Path(directory) / "log"
        command = [
            sys.executable,
            "-m",
            "scripts.benchmarks.gpu",
            "--part",
            name,
            "--out",
            str(out),
        ]
        command += ["--device", machine.device_type]
        with log.open("w") as errors:
            process = subprocess.Popen(
                command, start_new_session=True, stdout=errors, stderr=errors, cwd=ROOT
            )
            try:
                why = f"it ended with exit code {process.wait(limit_s)}"
            except subprocess.TimeoutExpired:
                why = f"it did not end within {limit_s:.0f} s"
            finally:
                _end(process)
        if out.exists():
            result = json.loads(out.read_text())
        else:
            errors_text = log.read_text(errors="replace")[-ERROR_CHARACTERS:]
            result = {"outcome": "failed", "reason": why, "errors": errors_text}
    return {"title": PARTS[name].title, **result, "seconds": round(time.monotonic() - began, 1)}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the processes that a part left in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def record_results(machine: Machine, results: dict[str, Any], directory: Path) -> None:
    """Write what was measured on a GPU; a CPU that poses as one leaves no record.

    Results of parts that this run did not try stay in the file, each with its own commit.
    """
    if machine.device_type != "cuda":
        return
    path = directory / record_name(machine.name)
    document: dict[str, Any] = {"parts": {}}
    if path.exists():
        document = json.loads(path.read_text())
    document["hardware"] = machine.describe()
    for name, result in results.items():
        if result["outcome"] != "not run":
            document["parts"][name] = result | {"commit": current_commit()}
    path.write_text(json.dumps(document, indent=1) + "\n")


def record_name(gpu: str) -> str:
    """Return the file name of the results on a GPU of this name."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")
    return f"gpu-{name}.json"


def current_commit() -> str:
    """Commit of this tree: AUTOHET_COMMIT where there is no repository, else git's."""
    given = os.environ.get("AUTOHET_COMMIT")
    if given:
        return given
    try:
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
        )
    except OSError:
        return "unknown"
    return head.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
