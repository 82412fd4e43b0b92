"""A recorded run's observations give the same decisions again, bit for bit; a controller that
decides otherwise is shown.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from autohet.cli.main import main
from autohet.control import decide, fleet
from autohet.control.planning import buyer, buying
from autohet.control.planning.buyer import Buyer
from autohet.control.planning.buying import FAILURES, Market
from autohet.control.planning.orders import OrderBuilder
from autohet.control.values.observation import Launches, Notice
from autohet.driver.events.event_log import EventLog
from autohet.driver.loop.controller import Controller, Guard
from autohet.driver.loop.emulated_paces import paces_of
from autohet.driver.loop.planning import make_planning
from autohet.driver.loop.recorder import RecordedPlanning, Recorder
from autohet.driver.loop.replay import replay_run
from autohet.driver.loop.value_codec import decode, encode
from autohet.runtime.facts.layout import layout_builder
from autohet.runtime.messages import AgentEndpoint, DataState, Phase, StepRecord, WorkerReport
from autohet.runtime.models.config import load_config
from planner.errors import ConfigError
from planner.inputs.cluster import Cluster
from planner.inputs.fleet import Node
from recovery.state.layout import ShardId
from tests.driver.test_controller import KIND, causes, run, trained
from tests.harness.fake_job import fake_job
from tests.harness.scripted_workforce import ScriptedWorkforce


def recorded(path: Path, steps: int) -> tuple[Controller, ScriptedWorkforce, Recorder]:
    """A run on four nodes that has trained five steps, recorded from its begin."""
    job = fake_job(steps=steps, elastic={"step_timeout_s": 30, "debounce_s": 0.2})
    workforce, recorder = ScriptedWorkforce(KIND), Recorder(path)
    for index in range(4):
        workforce.join(f"small-{index}")
    planning = RecordedPlanning(make_planning(job), recorder)
    orders = OrderBuilder(job, layout_builder(load_config(job.model, job.training)), paces_of, "me")
    controller = Controller(job, workforce, planning, orders, EventLog(None))
    controller.recorder = recorder
    recorder.begin(job=job, driver="me", generation=0, first_step=0)
    run(controller, trained(controller, 5))
    return controller, workforce, recorder


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a notice, a death and an arrival."""
    path = tmp_path_factory.mktemp("run") / "observations.jsonl"
    controller, workforce, recorder = recorded(path, steps=60)
    priced = replace(KIND, usd_per_hour=0.25)
    workforce.nodes = {
        n: replace(view, node=Node(n, priced)) for n, view in workforce.nodes.items()
    }
    leaver = controller.memory.members[0].split("/")[0]
    workforce.warn(leaver, 60)
    run(controller, lambda: leaver in workforce.released)
    run(controller, trained(controller, controller.memory.ledger.committed_steps + 3))
    del workforce.nodes[leaver], workforce.notices[leaver]
    workforce.kill(controller.memory.members[0].split("/")[0])
    run(controller, lambda: controller.memory.generation == 3)
    run(controller, trained(controller, controller.memory.ledger.committed_steps + 3))
    workforce.join("small-9")
    run(controller, lambda: controller.ended is not None)
    assert controller.ended is not None
    assert controller.ended.ok
    assert causes(controller)[:2] == ["notice", "death"]
    recorder.close()
    return path


def test_the_command_prints_what_was_replayed(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(record.parent), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in record.read_text().splitlines()[1:]]
    assert found["difference"] is None
    assert found["ticks"] == len(lines) > 50
    assert found["actions"] == sum(len(line["actions"]) for line in lines)
    kinds = {action["do"] for line in lines for action in line["actions"]}
    assert kinds >= {
        "Hire",
        "ClaimGeneration",
        "Begin",
        "RequestStop",
        "Interrupt",
        "ReleaseNode",
        "CommitCheckpoint",
    }
    assert {"notice", "death", "departure", "arrival", "price"} <= {
        event["kind"] for line in lines for event in line["decided"]
    }


WATCHED = """
import logging, sys, time
from pathlib import Path
from autohet.driver.loop import replay
from autohet.driver.loop.replay import replay_run

EFFECTS = ("open", "import", "os", "socket", "subprocess", "shutil", "tempfile", "sqlite3", "mmap", "fcntl", "http", "urllib")
effects, deciding, decide = [], False, replay.decide

def note(effect):
    if deciding:
        effects.append(effect)
        raise AssertionError(effect)

def watched(memory, seen):
    global deciding
    deciding = True
    try:
        yield from decide(memory, seen)
    finally:
        deciding = False

def noted(name, clock):
    return lambda *arguments: (note("time." + name), clock(*arguments))[1]

replay.decide = watched
logging.getLogger().setLevel(logging.DEBUG)  # whatever is logged has a time
for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "process_time", "sleep", "localtime"):
    setattr(time, name, noted(name, getattr(time, name)))
sys.addaudithook(lambda event, _: note(event) if event.split(".")[0] in EFFECTS else None)
for path in sys.argv[1:]:
    found = replay_run(Path(path))
    assert not effects and found.difference is None, (path, effects, found)
    print(found.decisions)
"""  # noqa: E501


def test_deciding_depends_on_no_hashes_no_file_no_network_and_no_clock(
    record: Path, failed: Path, bought: Path
) -> None:
    """Sets of names come in another order there: nothing that is decided may hang on it.

    Deciding reads and writes no file, no network and no clock.
    """
    command = [sys.executable, "-c", WATCHED, str(record), str(failed), str(bought)]
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert all(int(decisions) > 10 for decisions in done.stdout.split()), done.stdout


def difference_shown(record: Path) -> str:
    """Where a replay first decides otherwise: not at its begin."""
    found = replay_run(record)
    assert found.difference is not None
    assert found.ticks > 5
    return found.difference


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("find_deaths", lambda seen, members: None, "Interrupt"),
        ("find_leavers", lambda seen, members: None, "RequestStop"),
        ("find_arrivals", lambda *arguments: (), "small-9"),
    ],
)
def test_a_controller_that_decides_otherwise_is_shown(
    record: Path, name: str, wrong: object, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, name, wrong)
    difference = difference_shown(record)
    assert told in difference or "decid" in difference


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose workforce fails once, and then for so long that the job is stopped on that
    account.
    """
    path = tmp_path_factory.mktemp("failed") / "observations.jsonl"
    controller, workforce, recorder = recorded(path, steps=400)
    observe, guard = (
        workforce.observe,
        Guard(controller, controller.tick, pause=lambda seconds: None),
    )
    for times in (1, decide.RETRIES + 1):
        workforce.observe = Mock(side_effect=ZeroDivisionError)  # type: ignore[method-assign]
        for _ in range(times):
            guard.tick()
        workforce.observe = observe  # type: ignore[method-assign]
        for _ in range(5):
            guard.tick()
    run(controller, lambda: controller.ended is not None)
    recorder.close()
    return path


def test_what_is_decided_about_ticks_that_failed_is_replayed(
    failed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [json.loads(line) for line in failed.read_text().splitlines()[1:]]
    said = [
        str(event.get("reason"))
        for line in lines
        for event in line["decided"]
        if event["kind"] == "decision"
    ]
    assert (
        sum(
            "Deciding to try again, since there was an error in the driver: ZeroDivisionError" in s
            for s in said
        )
        == 1
    )
    assert sum("Deciding to stop with a checkpoint, since there was" in s for s in said) == 1
    assert replay_run(failed).difference is None
    monkeypatch.setattr(decide, "RETRIES", decide.RETRIES + 1)
    assert "Deciding to" in difference_shown(failed)


@pytest.fixture(scope="module")
def bought(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that asks the autoscaler for other nodes where a type is refused, for a spare, and
    gives a node back that idles.
    """
    path = tmp_path_factory.mktemp("buyer") / "observations.jsonl"
    job = fake_job(
        steps=400, elastic={"step_timeout_s": 30, "debounce_s": 0.2, "idle_release_s": 8}
    )
    other = replace(KIND, name="other", max_nodes=2)
    market = Market(Cluster("aws", (replace(KIND, max_nodes=6), other)), {"small": 1}, {"small": 6})
    workforce, recorder = ScriptedWorkforce(KIND), Recorder(path)
    workforce.launches = Launches({"small": 2})
    for index in range(4):
        workforce.join(f"small-{index}")
    planning = RecordedPlanning(make_planning(job), recorder)
    orders = OrderBuilder(job, layout_builder(load_config(job.model, job.training)), paces_of, "me")
    controller = Controller(job, workforce, planning, orders, EventLog(None))
    controller.recorder, controller.memory.buyer = recorder, Buyer(job, planning, market)
    recorder.begin(job=job, driver="me", generation=0, first_step=0, market=market)
    run(controller, trained(controller, 5))
    workforce.launches = Launches({"small": 2 + FAILURES}, "EC2 has no capacity")
    run(controller, lambda: bool(workforce.asked))
    workforce.prices = {"small": 0.25}
    assert workforce.asked[-1]["other"] == 2, workforce.asked
    workforce.risks["small-0"] = Notice("small-0", "rebalance", workforce.now, risk=True)
    workforce.nodes["small-8"] = replace(
        workforce.nodes["small-0"], node=Node("small-8", KIND), data=DataState()
    )
    run(controller, lambda: "small-8" in workforce.notices)
    assert len(workforce.asked) >= 2, "a spare, and less for what was given back"
    run(controller, lambda: controller.ended is not None)
    recorder.close()
    return path


def test_a_replay_buys_the_same(bought: Path) -> None:
    found = replay_run(bought)
    assert found.difference is None
    lines = [json.loads(line) for line in bought.read_text().splitlines()[1:]]
    assert {"AskForNodes", "GiveBack"} <= {
        action["do"] for line in lines for action in line["actions"]
    }
    assert any(
        answer["@"].endswith("RecordedResult") for line in lines for answer in line["answers"]
    )
    assert "Deciding to ask for" in bought.read_text()


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (buyer, "with_spares", lambda counts, *arguments: dict(counts)),
        (buyer, "releasable", lambda *arguments: ()),
        (buying, "FAILURES", 99),
        (buyer.Buyer, "_answer_refusals", lambda *arguments: []),
    ],
)
def test_a_buyer_that_decides_otherwise_is_shown(
    bought: Path, where: object, name: str, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, wrong)
    difference_shown(bought)


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three drivers' records in one file: the first was killed while it wrote a line, the second
    while it wrote its first.
    """
    path = tmp_path_factory.mktemp("restarted") / "observations.jsonl"
    recorded(path, steps=60)[2].close()
    whole = path.read_text()
    path.write_text(whole[:-100] + "\n" + whole[:500])
    controller, _, recorder = recorded(path, steps=8)
    run(controller, lambda: controller.ended is not None)
    recorder.close()
    return path


def test_a_driver_that_is_started_again_leaves_the_killed_ones_record_and_both_are_replayed(
    restarted: Path,
) -> None:
    found = replay_run(restarted)
    assert (found.difference, found.drivers) == (None, 3)
    lines = restarted.read_text().splitlines()
    assert found.ticks == sum(line.startswith('{"seen"') for line in lines) - 1


@pytest.mark.parametrize(("driver", "told"), [(0, "tick"), (2, "driver 3, tick")])
def test_what_is_changed_in_any_drivers_record_is_shown(
    restarted: Path, tmp_path: Path, driver: int, told: str
) -> None:
    lines = restarted.read_text().splitlines()
    begins = [number for number, line in enumerate(lines) if line.startswith('{"version"')]
    at = next(n for n, line in enumerate(lines) if n > begins[driver] and '"Begin"' in line)
    lines[at] = lines[at].replace('"Begin"', '"Interrupt"')
    changed = tmp_path / "observations.jsonl"
    changed.write_text("\n".join(lines))
    difference = replay_run(changed).difference
    assert difference is not None
    assert difference.startswith(told)


@pytest.mark.parametrize("broken", ["", "{}\n", '{"seen": {}}\n', '{"version": 1}\n'])
def test_what_is_no_record_is_refused(broken: str, tmp_path: Path) -> None:
    path = tmp_path / "observations.jsonl"
    path.write_text(broken)
    with pytest.raises(ConfigError, match="no record of a run's observations"):
        replay_run(path)


def test_a_line_that_is_cut_off_in_the_middle_is_an_error(restarted: Path, tmp_path: Path) -> None:
    lines = restarted.read_text().splitlines()
    lines[3] = lines[3][:-1]
    path = tmp_path / "observations.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="line 4 of"):
        replay_run(path)


def test_a_record_holds_no_secret(record: Path) -> None:
    """Which the endpoints of the nodes' agents have, and their text has not."""
    endpoint = AgentEndpoint("small-0", "here", 1, "token")
    assert "token" not in repr(endpoint)
    assert '"port"' in record.read_text()
    assert '"token"' not in record.read_text()


def test_a_line_that_was_changed_is_shown(record: Path, tmp_path: Path) -> None:
    lines = record.read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if '"Interrupt"' in line)
    lines[at] = lines[at].replace('"now": ', '"now": 1')
    changed = tmp_path / "observations.jsonl"
    changed.write_text("\n".join(lines))
    assert replay_run(changed).difference is not None


def test_values_come_back_as_they_were() -> None:
    record = StepRecord(3, 0.1 + 0.2, 1e-320, 64, 0.25, 2, 12345.678901234567, {"compute": 0.1})
    report = WorkerReport(
        "a/0", 1, 2, Phase.HALTED, 4, 2, vote=(3, ("x", 1)), steps=(record,), error="gone"
    )
    for value in (
        report,
        frozenset({ShardId("w", 1), ShardId("v", 0)}),
        {1: b"bytes", "one": [float("inf")]},
    ):
        assert decode(json.loads(json.dumps(encode(value)))) == value


def test_only_values_of_this_distribution_are_made_from_a_record() -> None:
    for name in (
        "subprocess:Popen",
        "autohet.driver.events.event_log:EventLog",
        "autohet.driver.events.event_log:json",
    ):
        with pytest.raises(ValueError, match="no class of a recorded value"):
            decode({"@": name})


def test_a_replay_follows_the_same_prices(tmp_path: Path) -> None:
    """A bound is exceeded: other nodes are asked for, and those beyond it are given back."""
    path = tmp_path / "observations.jsonl"
    job = fake_job(
        steps=60,
        elastic={"step_timeout_s": 30, "debounce_s": 0.2},
        parallelism={"max_usd_per_hour": 4.0},
    )
    small = replace(KIND, usd_per_hour=0.5, max_nodes=4)
    other = replace(KIND, name="other", gpu_type="A10G", usd_per_hour=0.9, max_nodes=2)
    market = Market(Cluster("aws", (small, other)), {}, {"small": 3})
    workforce, recorder = ScriptedWorkforce(small), Recorder(path)
    for index in range(3):
        workforce.join(f"small-{index}")
    planning = RecordedPlanning(make_planning(job), recorder)
    orders = OrderBuilder(job, layout_builder(load_config(job.model, job.training)), paces_of, "me")
    controller = Controller(job, workforce, planning, orders, EventLog(None))
    controller.recorder, controller.memory.buyer = recorder, Buyer(job, planning, market)
    recorder.begin(job=job, driver="me", generation=0, first_step=0, market=market)
    run(controller, trained(controller, 5))

    workforce.prices = {"small": 1.8}
    for name, view in workforce.nodes.items():
        dear = Node(name, replace(small, usd_per_hour=1.8))
        workforce.nodes[name] = replace(view, node=dear)
    run(controller, lambda: bool(workforce.asked and workforce.notices))
    assert workforce.asked[-1]["other"] == 2
    run(controller, lambda: len(controller.memory.members) < 3)
    controller.tick()
    recorder.close()
    found = replay_run(path)
    assert found.difference is None
    assert found.ticks > 10
