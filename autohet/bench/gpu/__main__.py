"""`scripts/gpu`: every part in a process of its own, within its deadline; results by the hardware's
name.

Exit codes: 0 all that could be run showed what it should, 1 something did not, 2 there is no GPU.
"""

from __future__ import annotations

import argparse
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

import torch

from autohet.bench.gpu import aborts, measures, probes, steps
from autohet.bench.gpu.part import Failed, Machine, Part, Skipped

RESULTS = Path(__file__).parents[3] / "scripts" / "benchmarks" / "results"
PARTS = {
    "parity": Part("losses in fp32 and bf16 beside plain fp32 on the CPU", 90.0, measures.parity),
    "aborts": Part(
        "a peer that is killed, freezes or never comes; one generation after the other",
        150.0,
        aborts.run,
    ),
    "snapshots": Part(
        "a snapshot to host memory after each step: one copy of the state; and back",
        60.0,
        measures.snapshots,
    ),
    "profile": Part("what autohet profile measures", 60.0, measures.profile),
    "vote_flag": Part("the vote's pinned copy is read by the stream", 30.0, probes.vote_flag),
    "streams": Part("snapshots share no stream with communicators", 30.0, probes.streams),
    "checksums": Part("checksums on the device: seconds and bits", 45.0, probes.checksums),
    "rounding": Part("hashes of the fused update, to compare by card", 45.0, probes.rounding),
    "step": Part("a step of 1 B beside plain loops, eager and compiled", 200.0, steps.medium),
    "step_small": Part("a step of 0.3 B beside plain loops", 100.0, steps.small),
    "step_large": Part("a step of 3 B beside plain loops", 200.0, steps.large),
    "predicted": Part(
        "predicted step and peak memory beside measured ones", 80.0, measures.predicted
    ),
}
"""In the order of worth; deadlines add up to twenty minutes, what is usual to half of that."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the parts; see the module's docstring for exit codes."""
    options = _options(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "there is no GPU here: PyTorch finds no CUDA device; run scripts/gpu on a machine"
            " with one",
            file=sys.stderr,
        )
        return 2
    machine = Machine(options.device)
    if options.part:
        Path(options.out).write_text(json.dumps(run_part(options.part, machine)))
        return 0
    chosen = options.only.split(",") if options.only else list(PARTS)
    unknown = sorted(set(chosen) - set(PARTS))
    if unknown:
        print(f"--only names {', '.join(unknown)}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    results = {name: _in_process(name, machine) for name in chosen}
    _leave(machine, results)
    return 0 if all(result["outcome"] in ("shown", "skipped") for result in results.values()) else 1


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "scripts/gpu", description="Tries what AutoHet claims of GPUs on those of this machine."
    )
    parser.add_argument("--only", metavar="a,b,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run_part(name: str, machine: Machine) -> dict[str, Any]:
    """One part in this process: its outcome (`shown`, `skipped`, `failed`), the reason, and what it
    measured.
    """
    try:
        return {"outcome": "shown", "figures": PARTS[name].run(machine)}
    except Skipped as reason:
        return {"outcome": "skipped", "reason": str(reason)}
    except Failed as failure:
        return {"outcome": "failed", "reason": str(failure), "figures": failure.figures}


def _in_process(name: str, machine: Machine) -> dict[str, Any]:
    """The part in a session of its own, so that whatever it has started ends with it."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out.json"
        command = [
            sys.executable,
            "-m",
            "autohet.bench.gpu",
            "--part",
            name,
            "--device",
            machine.device_type,
            "--out",
            str(out),
        ]
        process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        try:
            _, errors = process.communicate(timeout=PARTS[name].deadline_s)
            result = (
                json.loads(out.read_text()) if out.exists() else _died(process.returncode, errors)
            )
        except subprocess.TimeoutExpired:
            result = {
                "outcome": "failed",
                "reason": f"it did not end within its {PARTS[name].deadline_s:.0f} s",
            }
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    result = {"title": PARTS[name].title, **result, "seconds": round(time.monotonic() - began, 1)}
    print(
        f"{name}: {result['outcome']} in {result['seconds']} s;"
        f" {result.get('reason', PARTS[name].title)}",
        flush=True,
    )
    return result


def _died(code: int, errors: bytes) -> dict[str, Any]:
    return {
        "outcome": "failed",
        "reason": f"it ended with exit code {code}",
        "errors": errors.decode(errors="replace")[-2000:],
    }


def _leave(machine: Machine, results: dict[str, Any]) -> None:
    """Record what was measured on a GPU; print what was only exercised."""
    document = {
        "hardware": machine.describe(),
        "parts": results,
        "commit": _commit(),
        "load": os.getloadavg()[0],
    }
    text = json.dumps(document, indent=2) + "\n"
    if machine.device_type != "cuda":
        print(f"EMULATED on the CPU: the code of each part ran, nothing is recorded\n{text}")
        return
    name = re.sub(r"[^a-z0-9]+", "-", machine.name.lower().removeprefix("nvidia ")).strip("-")
    path = RESULTS / f"gpu-{name}.json"
    path.write_text(text)
    print(f"recorded in {path}")


def _commit() -> str:
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=RESULTS, check=False
    )
    return head.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
