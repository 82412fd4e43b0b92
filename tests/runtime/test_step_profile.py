"""A profiler trace of the steps that a job names, in the job's storage."""

import gzip
import json
from pathlib import Path

import torch

from autohet.runtime.process.log import RunRecord
from autohet.runtime.process.step_profile import StepProfiler

CPU = torch.device("cpu")
OPERATORS = (torch.sin, torch.cos, torch.tan, torch.exp)
"""One for each step."""


def profiled(tmp_path: Path, steps: tuple[int, int] | None, ran: range) -> dict[str, set[str]]:
    """Names of the operators in each trace, after these steps of one generation."""
    profiler = StepProfiler(steps, "a-0/1", RunRecord(str(tmp_path), "runs/one"), CPU)
    for step in ran:
        profiler.before(step)
        OPERATORS[step](torch.ones(3))
        profiler.after(step)
    profiler.stop(ran[-1])
    profiler.close()
    found = {}
    for path in sorted((tmp_path / "runs" / "one").glob("*")):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = {event.get("name", "") for event in events}
        found[path.name] = names & {"aten::sin", "aten::cos", "aten::tan", "aten::exp"}
    return found


def test_the_named_steps_alone_are_in_the_trace(tmp_path: Path) -> None:
    found = profiled(tmp_path, (1, 2), range(4))
    assert found == {"profile-a-0-1-steps-1-2.json.gz": {"aten::cos", "aten::tan"}}


def test_a_generation_that_ends_between_leaves_what_it_ran(tmp_path: Path) -> None:
    found = profiled(tmp_path, (1, 3), range(3))
    assert found == {"profile-a-0-1-steps-1-2.json.gz": {"aten::cos", "aten::tan"}}


def test_without_the_key_nothing_is_written(tmp_path: Path) -> None:
    assert profiled(tmp_path, None, range(4)) == {}
