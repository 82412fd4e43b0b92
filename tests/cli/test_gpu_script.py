"""`scripts/gpu`: without a GPU it says so; its parts run on the CPU, which poses as one, by the
very code that a GPU gets.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from autohet.bench.gpu import __main__ as gpu
from autohet.bench.gpu import aborts, measures
from autohet.bench.gpu.part import Failed, Machine, Part, Skipped

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu"
CPU = Machine("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    done = subprocess.run([str(SCRIPT)], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "no GPU" in done.stderr


def test_deadlines_keep_it_under_twenty_minutes() -> None:
    assert sum(part.deadline_s for part in gpu.PARTS.values()) < 1200


def slow(machine: Machine) -> dict[str, Any]:
    raise AssertionError("only its process may run it")


def test_a_part_that_hangs_is_ended_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong: one hanging NCCL drill costs all results."""
    monkeypatch.setitem(gpu.PARTS, "aborts", Part("hangs", 0.1, slow))
    monkeypatch.setattr(gpu, "RESULTS", Path("/nowhere"))
    result = gpu._in_process("aborts", CPU)
    assert result["outcome"] == "failed"
    assert "did not end within" in result["reason"]
    assert "aborts: failed" in capsys.readouterr().out


def test_outcomes_say_what_was_left_out_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def skips(machine: Machine) -> dict[str, Any]:
        raise Skipped("one GPU")

    def fails(machine: Machine) -> dict[str, Any]:
        raise Failed("off by 9%", {"error": 0.09})

    monkeypatch.setitem(gpu.PARTS, "step", Part("", 1.0, skips))
    monkeypatch.setitem(gpu.PARTS, "parity", Part("", 1.0, fails))
    assert gpu.run_part("step", CPU) == {"outcome": "skipped", "reason": "one GPU"}
    assert gpu.run_part("parity", CPU) == {
        "outcome": "failed",
        "reason": "off by 9%",
        "figures": {"error": 0.09},
    }


def test_results_are_named_by_the_hardware_and_only_those_of_a_gpu_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    gpu._leave(CPU, {})
    assert not list(tmp_path.iterdir())
    assert "EMULATED" in capsys.readouterr().out
    monkeypatch.setattr(Machine, "name", "NVIDIA H200 NVL")
    monkeypatch.setattr(Machine, "describe", lambda self: {"device": self.name})
    gpu._leave(Machine("cuda"), {"step": {"outcome": "shown"}})
    (path,) = tmp_path.iterdir()
    assert path.name == "gpu-h200-nvl.json"
    assert json.loads(path.read_text())["hardware"] == {"device": "NVIDIA H200 NVL"}


def test_copies_to_the_host_are_told_apart() -> None:
    events = [
        {"name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 1 << 20}},
        {"name": "Memcpy DtoH (Device -> Pageable)", "args": {"bytes": 1 << 18}},
        {"name": "Memcpy DtoH (Device -> Pageable)", "args": {"bytes": 80}},
        {"name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 1 << 21}},
        {"name": "step"},
    ]
    assert measures.bytes_to_host(events) == ((1 << 20) + (1 << 18), 1 << 18)


@pytest.mark.parametrize("name", sorted(set(gpu.PARTS) - {"aborts"}))
def test_a_part_runs_on_a_cpu_that_poses_as_a_gpu(name: str) -> None:
    result = gpu.run_part(name, CPU)
    assert result["outcome"] == "shown", result
    assert json.dumps(result)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "drill",
    [
        "killed",
        "killed_message",
        "missing",
        *(pytest.param(drill, marks=pytest.mark.slow) for drill in ("frozen", "generations")),
    ],
)
def test_an_abort_drill_runs_over_gloo(drill: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = aborts._drill(drill, 3, CPU)
    assert found["right"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", list(gpu.PARTS))
def test_a_part_shows_what_it_should_on_a_gpu(name: str) -> None:
    assert gpu._in_process(name, Machine("cuda"))["outcome"] in ("shown", "skipped")
