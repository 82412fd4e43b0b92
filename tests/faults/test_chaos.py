"""Random strikes on real processes; scripts/benchmarks/recovery/chaos.py strikes 200 times."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import Scene
from tests.harness.chaos.judge import judge
from tests.harness.chaos.lives import Life, StruckJob, strike_job
from tests.harness.chaos.places import Places, make_places
from tests.harness.chaos.strikes import WEIGHTS, draw_strikes
from tests.harness.exact_job import LONG, Reference

pytestmark = pytest.mark.faults
SEED = 10
NUM_STRIKES = 6
"""A notice, deaths of an agent and of the driver, and of workers, two of them inside rebuilds."""


def test_random_strikes_cost_nothing(long_scene: Scene, tmp_path: Path) -> None:
    with make_places(tmp_path / "job") as places:
        struck = strike_job(
            places, long_scene.shared, LONG["steps"], draw_strikes(SEED, NUM_STRIKES)
        )
        found = judge(struck, long_scene.reference)
    assert found["wrong"] == [], found
    assert found["strikes"] >= NUM_STRIKES - 1, found


def test_a_seed_gives_one_sequence_of_strikes() -> None:
    """A longer sequence begins with the shorter one, and 200 strikes have every kind."""
    assert draw_strikes(1, 40)[:12] == draw_strikes(1, 12)
    assert draw_strikes(1, 12) != draw_strikes(2, 12)
    kinds = Counter(strike.kind for seed in range(1, 5) for strike in draw_strikes(seed, 50))
    assert kinds.keys() == WEIGHTS.keys() - {"deaths_in_rebuilds"}


def step(number: int, loss: float) -> dict[str, Any]:
    return {"kind": "step", "step": number, "loss": loss}


def restore(number: int, cause: str = "death", lost: int = 0) -> dict[str, Any]:
    return {"kind": "restore", "step": number, "cause": cause, "steps_lost": lost}


@pytest.mark.parametrize(
    ("second_life", "kept_step", "broken"),
    [
        ([restore(2, "start"), step(2, 3.0)], 2, None),
        ([restore(2, "start"), step(2, 3.0), restore(2, lost=1)], 2, "1 steps lost (death)"),
        ([restore(2, "start"), step(2, 3.5)], 2, "losses differ at steps [2]"),
        ([restore(1, "start"), step(1, 2.0), step(2, 3.0)], 2, "step 2 was kept whole"),
        ([restore(2, "start")], 2, None),
        ([restore(0, "start")], None, None),
    ],
)
def test_the_judge_names_a_broken_promise(
    second_life: list[dict[str, Any]], kept_step: int | None, broken: str | None, tmp_path: Path
) -> None:
    """A driver is killed after two steps of three; the next one ends the job too early."""
    first_life = [restore(0, "start"), step(0, 1.0), step(1, 2.0)]
    lives = []
    for number, events in enumerate((first_life, second_life)):
        directory = tmp_path / f"life-{number}"
        directory.mkdir()
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (directory / "events-1.jsonl").write_text(lines + '{"kind": "st')
        lives.append(Life(directory, None, kept_step if number else None))
    (lives[1].directory / "result.json").write_text('{"ok": false, "reason": "gave up"}')
    reference = Reference((1.0, 2.0, 3.0), {}, layout=None)  # type: ignore[arg-type]
    found = judge(StruckJob(Places(tmp_path, False), lives), reference)
    wrong = [each for each in found["wrong"] if each != "ended early: gave up"]
    assert len(wrong) == len(found["wrong"]) - 1, "the early end is named, too"
    assert [broken in each for each in wrong if broken] == ([True] if broken else [])
    assert bool(wrong) == bool(broken)
