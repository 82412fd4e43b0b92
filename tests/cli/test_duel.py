"""What `autohet bench recovery --duel` reads off recorded steps."""

import json

import pytest

from autohet.bench.duel import report
from autohet.bench.duel.task import DuelTask, record_step
from autohet.bench.duel.trainers import TRAINERS

STEPS = 8
LOSSES = [5.0 - step / 10 for step in range(STEPS)]


@pytest.fixture
def task(tmp_path):
    (tmp_path / "reference.json").write_text(json.dumps(LOSSES))
    return DuelTask(str(tmp_path), STEPS, 4, 0.1, 1.0, (1, 3))


def record(task, steps, *, dropped=(), first=100.0):
    """Record steps a second apart; those at the places `dropped` are not applied."""
    for place, step in enumerate(steps):
        applied = place not in dropped
        record_step(
            task.log_of("torchft"), step, LOSSES[step] + 0.25, applied=applied, at=first + place
        )


def test_steps_that_were_run_again_or_dropped_are_wasted(task):
    """Wrong: only what is run again after a checkpoint counts."""
    record(task, [0, 1, 2, 3, 2, 3, 4, 5, 5, 6, 7], dropped=(7,))
    with task.log_of("torchft").open("a") as file:
        file.write('{"step": 7, "lo')  # of a worker that was killed
    found = report.score(task, "torchft")
    assert found["executed_steps"] == 11
    assert found["wasted_steps"] == 3
    assert found["max_abs_loss_difference"] == pytest.approx(0.25)
    assert found["seconds"] == pytest.approx(10.0)


def test_time_beyond_the_steps_is_not_hidden_in_their_mean(task):
    record(task, range(4))
    record(task, range(4, 8), first=124.0)
    found = report.score(task, "torchft")
    assert found["longest_gap_s"] == pytest.approx(21.0)
    assert found["beyond_s"] == pytest.approx(27.0 - 7 * 1.0)


def test_a_run_that_did_not_reach_its_end_is_no_result(task):
    record(task, range(7))
    with pytest.raises(RuntimeError, match="7 of 8"):
        report.score(task, "torchft")


def test_what_is_not_installed_and_what_failed_are_said(task, monkeypatch, capsys):
    monkeypatch.setattr(report, "why_not", lambda name: "not installed" * (name == "torchft"))
    monkeypatch.setattr(report, "run_apart", lambda name, task: None)
    document = report.duel_document(task, list(report.results(task)))
    report._show(document)
    shown = capsys.readouterr().out
    assert len(document["trainers"]) == len(TRAINERS)
    assert "torchft: not installed" in shown
    assert "ray_train: ray_train recorded 0 of 8 steps" in shown
    assert max(map(len, shown.splitlines())) <= 80
