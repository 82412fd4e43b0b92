"""`scripts/gpu`: without a GPU it says so; its parts run on the CPU, which poses as one, by the
very code that a GPU gets.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.benchmarks.gpu import __main__ as gpu
from scripts.benchmarks.gpu import aborts, measures, parts, probes, ranks
from scripts.benchmarks.gpu.part import Failed, GpuPart, Machine, PartSkipped
from tests.harness.selection import every_third
from tests.harness.waits import HANG_S

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu"
CPU = Machine("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_without_a_gpu_it_says_so_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "no GPU" in said.err


def part_of(run: str, deadline_s: float = 20.0) -> GpuPart:
    return GpuPart("", deadline_s, run)


@pytest.fixture
def on_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A CPU whose results are recorded as a GPU's; returns the record's path."""
    monkeypatch.setattr(Machine, "name", "NVIDIA H200 NVL")
    monkeypatch.setattr(Machine, "describe", lambda self: {"device": self.name})
    return tmp_path / "gpu-h200-nvl.json"


def test_every_part_names_a_function() -> None:
    assert all(callable(gpu.function_of(part)) for part in gpu.PARTS.values())


def test_a_part_that_hangs_is_ended_and_the_rest_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Wrong: one hanging NCCL drill costs all results."""
    monkeypatch.setitem(gpu.PARTS, "aborts", part_of("aborts.run", 0.1))
    result = gpu.run_parts(["aborts"], CPU, 60.0, tmp_path)["aborts"]
    assert result["outcome"] == "failed"
    assert "did not end within" in result["reason"]


def test_a_part_that_crashes_leaves_its_traceback(tmp_path: Path) -> None:
    result = gpu.run_in_process("profile", Machine("no such device"), 60.0)
    assert result["outcome"] == "failed"
    assert "exit code 2" in result["reason"]
    assert "no such device" in result["errors"]


def test_the_budget_names_what_it_leaves_no_time_for(tmp_path: Path) -> None:
    results = gpu.run_parts(["profile", "streams"], CPU, 0.0, tmp_path)
    assert [each["outcome"] for each in results.values()] == ["not run", "not run"]
    assert "budget of 0 s" in results["streams"]["reason"]


def test_each_result_is_printed_and_recorded_as_soon_as_it_is_there(
    on_record: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong: a run that is cut off has shown nothing."""

    def in_process(name: str, machine: Machine, limit_s: float) -> dict[str, Any]:
        if name == "streams":
            raise KeyboardInterrupt
        return {"outcome": "shown", "figures": {}, "seconds": 1.0}

    monkeypatch.setattr(gpu, "run_in_process", in_process)
    monkeypatch.setenv("AUTOHET_COMMIT", "abc")
    with pytest.raises(KeyboardInterrupt):
        gpu.run_parts(["profile", "streams"], Machine("cuda"), 60.0, on_record.parent)
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["profile"]["outcome"] == "shown"
    recorded = json.loads(on_record.read_text())["parts"]
    assert recorded == {
        "profile": {"outcome": "shown", "figures": {}, "seconds": 1.0, "commit": "abc"}
    }


def test_a_record_keeps_the_parts_of_earlier_runs(on_record: Path) -> None:
    on_record.write_text(json.dumps({"parts": {"step": {"outcome": "shown"}}}))
    gpu.record_results(Machine("cuda"), {"profile": {"outcome": "failed"}}, on_record.parent)
    assert set(json.loads(on_record.read_text())["parts"]) == {"step", "profile"}


def test_a_cpu_that_poses_as_a_gpu_leaves_no_record(tmp_path: Path) -> None:
    gpu.record_results(CPU, {"step": {"outcome": "shown"}}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_commit_needs_no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOHET_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu.current_commit() == "unknown"


def skips(machine: Machine) -> dict[str, Any]:
    raise PartSkipped("one GPU")


def fails(machine: Machine) -> dict[str, Any]:
    raise Failed("off by 9%", {"error": 0.09})


def test_outcomes_say_what_was_left_out_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "function_of", lambda part: {"skips": skips, "fails": fails}[part.run])
    monkeypatch.setitem(gpu.PARTS, "step", part_of("skips"))
    monkeypatch.setitem(gpu.PARTS, "parity", part_of("fails"))
    assert gpu.run_part("step", CPU) == {"outcome": "skipped", "reason": "one GPU"}
    assert gpu.run_part("parity", CPU) == {
        "outcome": "failed",
        "reason": "off by 9%",
        "figures": {"error": 0.09},
    }


def test_without_its_packages_the_script_names_the_remedy(tmp_path: Path) -> None:
    """Wrong: a bare machine's run ends in a traceback at an import."""
    (tmp_path / "msgspec.py").write_text("raise ImportError")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [str(SCRIPT)], capture_output=True, text=True, timeout=HANG_S, check=False, env=environment
    )
    assert done.returncode == 2
    assert "--wheels" in done.stderr
    assert "Traceback" not in done.stderr


def test_copies_to_the_host_are_told_apart() -> None:
    events = [
        {"name": "Memcpy DtoH (Device -> Pinned)", "args": {"bytes": 1 << 20}},
        {"name": "Memcpy DtoH (Device -> Pageable)", "args": {"bytes": 1 << 18}},
        {"name": "Memcpy DtoH (Device -> Pageable)", "args": {"bytes": 80}},
        {"name": "Memcpy HtoD (Pinned -> Device)", "args": {"bytes": 1 << 21}},
        {"name": "step"},
    ]
    assert measures.bytes_to_host(events) == ((1 << 20) + (1 << 18), 1 << 18)


@pytest.mark.parametrize("path", parts.TESTS.values())
def test_the_tests_of_a_part_are_there(path: str) -> None:
    place = SCRIPT.parents[1] / path
    files = [place] if place.is_file() else place.glob("test_*.py")
    assert any("pytest.mark.gpu" in file.read_text() for file in files)


ONE_THAT_RUNS_PYTEST = "families"


ON_A_CPU = set(gpu.PARTS) - {"aborts", "ranks", *parts.TESTS} | {ONE_THAT_RUNS_PYTEST}


@pytest.mark.parametrize("name", every_third(sorted(ON_A_CPU)))
def test_a_part_runs_on_a_cpu_that_poses_as_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "UPDATE_ELEMENTS", 1 << 12)
    result = gpu.run_part(name, CPU)
    assert result["outcome"] == "shown", result
    assert json.dumps(result)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_four_ranks_train_as_one_plain_process() -> None:
    assert ranks.run(CPU)["worst_relative_loss_error"] < ranks.TOLERANCE


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "drill",
    [
        "killed",
        *(
            pytest.param(drill, marks=pytest.mark.slow)
            for drill in ("killed_message", "missing", "frozen", "generations")
        ),
    ],
)
def test_an_abort_drill_runs_over_gloo(drill: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = aborts.run_drill(drill, 3, CPU)
    assert found["right"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", list(gpu.PARTS))
def test_a_part_shows_what_it_should_on_a_gpu(name: str) -> None:
    result = gpu.run_in_process(name, Machine("cuda"), gpu.PARTS[name].deadline_s)
    assert result["outcome"] in ("shown", "skipped"), result
