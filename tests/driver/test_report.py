"""The report and the timeline of a run, from its events alone; and how alive a job's status says
that it is.
"""

import json
import logging
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest

from autohet.cli.main import main
from autohet.cli.status import describe_job
from autohet.driver.events.event_log import EventLog
from autohet.driver.job import status as status_module
from autohet.driver.job.status import SILENT_S, with_liveness
from autohet.driver.report.chart import chart, round_values
from autohet.driver.report.events import fleet_over_time, kept_steps, last_run, read_events
from autohet.driver.report.page import report_page
from autohet.driver.report.timeline import timeline
from autohet.driver.report.write import leave_report, write_report
from planner.errors import ConfigError

SECONDS = {
    "detect": 1.0,
    "replan": 0.5,
    "rebuild": 1.0,
    "restore": 2.0,
    "first_step": 0.5,
    "total": 5.0,
}
TIERS = {"memory": 0, "disk": 0, "peer": 2_000_000, "s3": 0}


def step(time, number, loss, generation=1):
    facts = {"loss": loss, "gradient_norm": 1.0, "tokens": 100, "seconds": 1.0}
    return {"time": time, "generation": generation, "kind": "step", "step": number, **facts}


def arrival(time, node, gpu_type, usd=2.0, zone=""):
    facts = {
        "node": node,
        "node_type": "t",
        "gpu_type": gpu_type,
        "num_gpus": 4,
        "usd_per_hour": usd,
        "zone": zone,
    }
    return {"time": time, "generation": 0, "kind": "arrival", **facts}


def run_events():
    """Four steps, a death at 104 s that takes step 3 back, and again."""
    restored = {
        "b/0": {"seconds": 2.0, "bytes_by_tier": TIERS},
        "a/1": {"seconds": 1.5, "bytes_by_tier": TIERS},
    }
    return [
        {
            "time": 100.0,
            "generation": 0,
            "kind": "started",
            "job": "toy <1>",
            "step": 0,
            "checkpoint": None,
        },
        arrival(100.0, "a", "A100"),
        arrival(100.0, "b", "T4"),
        step(101.0, 0, 3.0),
        step(102.0, 1, 2.8),
        step(103.0, 2, 2.6),
        step(104.0, 3, 9.9),
        {
            "time": 105.0,
            "generation": 1,
            "kind": "death",
            "nodes": ["b"],
            "workers": ["b/0"],
            "reason": "lost b",
        },
        {
            "time": 105.5,
            "generation": 1,
            "kind": "decision",
            "reason": "Deciding to <shrink>",
            "cause": "lost b",
        },
        {
            "time": 108.5,
            "generation": 2,
            "kind": "restore",
            "step": 3,
            "bytes_by_tier": TIERS,
            "workers_restored": restored,
        },
        step(109.0, 3, 2.4, 2),
        {
            "time": 109.0,
            "generation": 2,
            "kind": "reconfigure",
            "cause": "death",
            "nodes": ["b"],
            "reason": "lost <b>",
            "step": 3,
            "steps_lost": 1,
            "bytes_by_tier": TIERS,
            "seconds": SECONDS,
            "attempts": 0,
        },
        {
            "time": 110.0,
            "generation": 2,
            "kind": "finished",
            "reason": "trained to the last step",
            "ok": True,
            "step": 4,
        },
    ]


def write_events(path, events):
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_a_step_that_was_taken_back_counts_once():
    assert [event["loss"] for event in kept_steps(run_events())] == [3.0, 2.8, 2.6, 2.4]


def test_the_fleet_and_its_price_over_time():
    fleet = fleet_over_time(run_events(), 100.0)
    assert fleet.gpus_by_type["A100"][-1] == (5.0, 4.0)
    assert fleet.gpus_by_type["T4"] == [(0.0, 0.0), (0.0, 0.0), (0.0, 4.0), (5.0, 0.0)]
    assert fleet.gpus_by_zone == {}
    assert [usd for _, usd in fleet.usd_per_hour] == [0.0, 2.0, 4.0, 2.0]


def test_the_fleet_by_zone_where_nodes_name_theirs():
    events = run_events()
    events[1:3] = [
        arrival(100.0, "a", "A100", zone="us-east-1a"),
        arrival(100.0, "b", "T4", zone="us-east-1b"),
    ]
    by_zone = fleet_over_time([*events, arrival(110.0, "c", "T4")], 100.0).gpus_by_zone
    ends = {zone: points[-1][1] for zone, points in by_zone.items()}
    assert ends == {"us-east-1a": 4.0, "us-east-1b": 0.0, "unknown": 4.0}
    page = report_page(events, "zones")
    assert "<h2>GPUs alive, by zone</h2>" in page
    assert ">us-east-1b</text>" in page
    assert "<h2>GPUs alive, by zone</h2>" not in report_page(run_events(), "no zones")


def test_a_node_with_a_notice_is_gone_when_its_deadline_has_passed():
    notice = {
        "time": 101.0,
        "generation": 1,
        "kind": "notice",
        "node": "a",
        "source": "aws",
        "deadline_s": 2.0,
    }
    fleet = fleet_over_time(
        [arrival(100.0, "a", "T4"), notice, step(102.0, 0, 1.0), step(104.0, 1, 1.0)], 100.0
    )
    assert fleet.gpus_by_type["T4"][-1] == (4.0, 0.0)


def test_the_page_stands_alone_and_what_users_wrote_is_escaped():
    page = report_page(run_events(), "Run toy <1>")
    assert "toy &lt;1&gt;" in page
    assert "&lt;shrink&gt;" in page
    assert "lost &lt;b&gt;" in page
    assert not re.search(r"<(script|link|img)|https?://", page)
    for heading in (
        "Loss by step",
        "Tokens a second",
        "GPUs alive, by type",
        "Price of the living nodes, USD an hour",
        "Changes",
    ):
        assert f"<h2>{heading}</h2>" in page
    assert "Finished: trained to the last step" in page
    assert "<td>2.00</td>" in page  # the restore's seconds
    assert "peer 2.0" in page


def test_a_run_whose_driver_died_has_a_report_too(tmp_path):
    path = write_events(tmp_path / "events.jsonl", run_events()[:6])
    with path.open("a") as file:
        file.write('{"time": 103.0, "kind": "st')  # cut off
    assert len(read_events(path)) == 6
    page, trace = write_report(path)
    assert (page.name, trace.name) == ("report.html", "timeline.json")
    assert "The run has not ended, or its driver died." in page.read_text()


def test_half_a_line_of_a_killed_driver_costs_no_event_of_the_next_one(tmp_path):
    """A long line is written in pieces."""
    path = write_events(tmp_path / "events.jsonl", run_events()[:6])
    with path.open("a") as file:
        file.write('{"time": 103.0, "kind": "st')
    log = EventLog(path)
    log.emit("started", 1, job="toy", restart=True)
    log.close()
    EventLog(path).close()
    assert [event["kind"] for event in read_events(path)] == [
        *(event["kind"] for event in run_events()[:6]),
        "started",
    ]
    assert path.read_text().endswith("}\n")
    with path.open("a") as file:
        file.write("{\n" + json.dumps(step(104.0, 3, 1.0)) + "\n")
    with pytest.raises(ConfigError, match="line 9 of"):
        read_events(path)


def test_the_next_driver_s_clock_may_be_hours_behind(tmp_path):
    """Wrong: the run ends before it began, and there is no page."""
    events = run_events()
    steps = [event["time"] for event in events]
    for event in events[4:]:
        event["time"] -= 7200.0
    path = write_events(tmp_path / "events.jsonl", events)
    moved = [event["time"] for event in read_events(path)]
    assert moved[:4] == steps[:4]
    for before, after, was in zip(moved[4:], moved[5:], pairwise(steps[4:]), strict=False):
        assert after - before == pytest.approx(was[1] - was[0])
    assert moved == sorted(moved)
    write_report(path)


def started(time, restart=False):
    return {
        "time": time,
        "generation": 0,
        "kind": "started",
        "job": "toy",
        "step": 0,
        "checkpoint": None,
        "restart": restart,
    }


def test_a_report_is_of_the_last_run_in_its_file_with_all_its_drivers(tmp_path):
    """A run that goes on where another ended has no hours of nothing in its report, and none of the
    other's nodes.
    """
    first = [event for event in run_events() if event["kind"] != "death"]
    second = [
        started(9000.0),
        arrival(9000.0, "c", "L4"),
        step(9001.0, 4, 2.0),
        started(9050.0, restart=True),
    ]
    second += [arrival(9050.0, "d", "L4"), step(9060.0, 5, 1.5), step(9061.0, 6, 1.25)]
    assert last_run(first + second) == second
    page, _ = write_report(write_events(tmp_path / "events.jsonl", first + second))
    text = page.read_text()
    assert "<b>61</b>seconds" in text
    assert "<b>3</b>steps" in text
    assert "A100" not in text
    assert fleet_over_time(second, 9000.0).gpus_by_type["L4"][-1] == (50.0, 4.0), (
        "its second driver numbers nodes anew"
    )
    assert last_run(second[1:3]) == second[1:3]


def test_a_curve_goes_where_its_points_do():
    drawn = chart({"loss": [(0.0, 1.0), (10.0, 3.0)]}, x_unit="step")
    (placed,) = re.findall(r"points='([^']*)'", drawn)
    (x0, y0), (x1, y1) = (tuple(float(v) for v in point.split(",")) for point in placed.split())
    assert x0 < x1
    assert y0 > y1  # larger is higher
    assert chart({"loss": []}) == ""


@pytest.mark.parametrize(
    ("low", "high", "first", "second", "last"),
    [
        (0, 135_100, 0, 20_000, 140_000),
        (2.478, 10.94, 2, 4, 12),
        (0, 8, 0, 2, 10),
        (3, 3, 3, 3.5, 3.5),
        (0, 0, 0, 0.2, 0.2),
    ],
)
def test_axes_have_round_numbers_and_room_above_the_curve(low, high, first, second, last):
    values = round_values(low, high)
    assert (values[0], values[1]) == (pytest.approx(first), pytest.approx(second))
    assert values[-1] > high
    assert values[-1] == pytest.approx(last)


def test_charts_over_time_have_one_axis():
    drawn = chart({"GPUs": [(5.0, 1.0), (9.0, 2.0)]}, [(50.0, "death")], until=100.0)
    assert ">death</text>" in drawn  # which lies beyond the curve
    assert ">100 s</text>" in drawn


def test_the_timeline_has_steps_changes_by_part_and_restores_by_worker():
    document = timeline(run_events())
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert [s["name"] for s in spans if s["tid"] == 1 and s["pid"] == 1] == [
        f"step {n}" for n in (0, 1, 2, 3, 3)
    ]
    parts = [s for s in spans if s["tid"] == 2 and s["pid"] == 1]
    assert [s["name"] for s in parts] == [
        "change: death",
        "detect",
        "replan",
        "rebuild",
        "restore",
        "first_step",
    ]
    assert parts[0]["ts"] == pytest.approx(4.0e6)
    assert parts[-1]["ts"] + parts[-1]["dur"] == pytest.approx(9.0e6)
    named = [e for e in document["traceEvents"] if e["name"] == "thread_name" and e["pid"] == 2]
    names = {event["tid"]: event["args"]["name"] for event in named}
    restores = {names[s["tid"]]: (s["ts"], s["dur"]) for s in spans if s["pid"] == 2}
    assert restores == {"a/1": (pytest.approx(7.0e6), 1.5e6), "b/0": (pytest.approx(6.5e6), 2e6)}
    assert all(event["ts"] >= 0 for event in document["traceEvents"] if "ts" in event)


def transfer(tier, source, step, num_bytes, seconds, ended_ago_s=0.0):
    return {
        "tier": tier,
        "source": source,
        "step": step,
        "bytes": num_bytes,
        "seconds": seconds,
        "ended_ago_s": ended_ago_s,
    }


def saving_events():
    """What `run_events` has, and what was copied meanwhile: worker a/1 handed over in two parts at
    once.
    """
    events = run_events()
    first = [
        transfer("s3", "a/1", 2, 3_000_000, 2.0, 0.5),
        transfer("s3", "b/0", 2, 1_000_000, 0.5),
    ]
    later = [
        transfer("s3", "a/1", 3, 500_000, 0.25),
        transfer("peer", "a", 3, 200_000, 1.5),
        transfer("peer", "a", 3, 100_000, 1.0),
    ]
    told = {"generation": 1, "kind": "transfers"}
    events.insert(7, {"time": 104.0, **told, "transfers": first})
    events.insert(
        -1, {"time": 109.5, **told, "transfers": [*later, transfer("disk", "a/1", 3, 700_000, 0.5)]}
    )
    return events


def test_the_timeline_has_uploads_and_spills_by_worker_and_copies_by_node():
    document = timeline(saving_events())
    meta = [event for event in document["traceEvents"] if event["ph"] == "M"]
    processes = {
        event["pid"]: event["args"]["name"] for event in meta if event["name"] == "process_name"
    }
    rows = {
        event["tid"]: event["args"]["name"]
        for event in meta
        if event["name"] == "thread_name" and event["pid"] > 2
    }
    spans = [event for event in document["traceEvents"] if event["ph"] == "X" and event["pid"] > 2]
    assert {
        (processes[s["pid"]], rows[s["tid"]], s["name"], s["ts"], s["dur"], s["args"]["bytes"])
        for s in spans
    } == {
        ("uploads to durable storage by worker", "a/1", "upload: step 2", 1.5e6, 2e6, 3_000_000),
        ("uploads to durable storage by worker", "b/0", "upload: step 2", 3.5e6, 0.5e6, 1_000_000),
        ("uploads to durable storage by worker", "a/1", "upload: step 3", 9.25e6, 0.25e6, 500_000),
        ("copies on other nodes by node", "a", "copy: step 3", 8e6, 1.5e6, 200_000),
        ("copies on other nodes by node", "a", "copy: step 3", 8.5e6, 1e6, 100_000),
        ("spills to the node's own disk by worker", "a/1", "spill: step 3", 9e6, 0.5e6, 700_000),
    }
    assert len({s["tid"] for s in spans if rows[s["tid"]] == "a"}) == 2, (
        "a row's spans do not overlap"
    )
    assert (
        len({s["tid"] for s in spans if rows[s["tid"]] == "a/1" and s["name"].startswith("upload")})
        == 1
    )
    page = report_page(saving_events(), "saved")
    assert "<b>4.5</b>MB uploaded" in page
    assert "<b>0.3</b>MB copied to other nodes" in page


def test_the_command_and_what_is_no_file_of_events(tmp_path, capsys):
    path = write_events(tmp_path / "events.jsonl", run_events())
    assert main(["report", "--events", str(path), "--out", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "out" / "timeline.json").read_text())["traceEvents"]
    assert found["report"].endswith("report.html")
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    assert main(["report", "--events", str(tmp_path / "other.jsonl")]) == 2
    assert "line 1 of" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="cannot read events"):
        read_events(tmp_path / "none.jsonl")


def test_a_report_that_cannot_be_made_ends_no_run(tmp_path):
    leave_report(None)
    leave_report(tmp_path / "none.jsonl")
    (tmp_path / "events.jsonl").write_text("")
    leave_report(tmp_path / "events.jsonl")
    assert not (tmp_path / "report.html").exists()


def test_a_loss_that_is_not_finite_is_no_end_of_the_report(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("started", 1, job="toy")
    for step, loss in enumerate((2.0, float("inf"), float("nan"), 1.0)):
        log.emit("step", 1, step=step, loss=loss, gradient_norm=loss, tokens=8, seconds=0.5)
    log.close()

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse).get("loss") for line in lines] == [
        None,
        2.0,
        None,
        None,
        1.0,
    ]
    leave_report(tmp_path / "events.jsonl")
    json.loads((tmp_path / "timeline.json").read_text(), parse_constant=refuse)
    assert "<polyline" in (tmp_path / "report.html").read_text()
    assert chart({"loss": [(0.0, float("nan"))]}) == ""
    assert "nan" not in chart({"loss": [(0.0, 1.0), (1.0, float("inf")), (2.0, 2.0)]})


def test_a_report_that_fails_is_said_and_ends_no_run(tmp_path, caplog):
    (tmp_path / "events.jsonl").write_text(
        '{"kind": "step", "time": 1.0}\n'
    )  # of a step that says nothing
    with caplog.at_level(logging.WARNING, "autohet"):
        leave_report(tmp_path / "events.jsonl")
    assert "No report" in caplog.text


STATUS = {"step": 5, "steps": 10, "loss": 2.5, "workers": ["a/0"], "generation": 1}


LIVES = pytest.mark.parametrize(
    ("state", "published_at", "now", "liveness", "text"),
    [
        ("training", 1000.0, 1002.0, "alive", "alive, 2 s ago"),
        (
            "training",
            1000.0,
            1000.0 + SILENT_S + 90,
            "silent",
            "SILENT: its driver last said this 100 s ago",
        ),
        ("ended", 1000.0, 9000.0, "ended", "ended, 8000 s ago"),
        ("training", 1000.0, 999.0, "alive", "alive, 0 s ago"),
        ("training", None, 999.0, "silent", "at an unknown time"),
    ],
)


@LIVES
def test_a_status_names_workers_that_say_nothing(state, published_at, now, liveness, text):
    silence = {"a/0": 0.2, "b/0": 7.4}
    status = with_liveness(
        {**STATUS, "state": state, "published_at": published_at, "silence_s": silence}, now
    )
    assert describe_job("toy", status).endswith(
        "; b/0 has said nothing for 7 s" if liveness == "alive" else ")"
    )


@LIVES
def test_a_status_says_how_old_it_is(state, published_at, now, liveness, text):
    status = with_liveness({**STATUS, "state": state, "published_at": published_at}, now)
    assert status["liveness"] == liveness
    assert text in describe_job("toy", status)


@pytest.mark.parametrize("ahead_s", [0.0, 7200.0, -7200.0])
@pytest.mark.parametrize("lives", [True, False])
def test_the_clock_of_a_driver_elsewhere_does_not_decide_whether_it_lives(
    monkeypatch, ahead_s, lives
):
    """Wrong: one that is dead counts as alive for hours, one that lives as silent."""
    at = [100.0 + ahead_s - 60.0 * (not lives)]
    monkeypatch.setattr(status_module, "time", SimpleNamespace(time=lambda: 100.0, sleep=at.append))
    monkeypatch.setattr(status_module.ray_cluster, "connect", lambda *_, private: None)

    def read_statuses():
        published_at = at[0] + 2.0 * (len(at) - 1) * lives
        return {"toy": {**STATUS, "state": "training", "published_at": published_at}}

    monkeypatch.setattr(status_module.ray_cluster, "read_statuses", read_statuses)
    found = status_module.read_status(None)["toy"]
    assert found["liveness"] == ("alive" if lives else "silent")


def plan_event(time, generation, cuts):
    """A plan of one pipeline: the layers of each of its workers, in order."""
    first = 0
    stages = []
    for worker, num_layers in cuts.items():
        stages.append({"first_layer": first, "num_layers": num_layers, "workers": [worker]})
        first += num_layers
    document = {
        "version": 1,
        "model": "toy",
        "global_batch_sequences": 8,
        "microbatch_sequences": 2,
        "sequence_length": 32,
        "pipelines": [{"num_microbatches": 4, "stages": stages}],
    }
    return {
        "time": time,
        "generation": generation,
        "kind": "plan",
        "plan": document,
        "predicted_step_s": 1.5,
        "cause": "start" if generation == 1 else "death",
    }


def test_each_generations_plan_is_drawn_with_what_moved():
    events = run_events()
    events.insert(3, plan_event(100.5, 1, {"a/0": 2, "a/1": 2, "b/0": 4}))
    events.insert(-3, plan_event(107.0, 2, {"a/0": 2, "a/1": 6}))
    page = report_page(events, "toy")
    first, second = re.findall(r"<details.*?</details>", page)
    assert "generation 1, 0.5 s: 3 GPUs" in first
    assert "generation 2, 7.0 s: 2 GPUs" in second
    assert "moved: peer 2.0 MB" in second
    widths = [float(width) for width in re.findall(r"<rect[^>]* width=([\d.]+)", first)]
    assert widths[2] > 1.9 * widths[0], "as wide as their layers"
    borders = re.findall(r"stroke='([^']*)'[^>]*><title>layers (\d+)", second)
    assert borders == [("none", "0"), ("#222", "2")], "the first stage kept its layers"
    assert "4 × 2 seq" in second


def test_no_name_of_a_curve_lies_over_a_curve():
    drawn = chart(
        {"one": [(0.0, 1.0), (1.0, 9.0)], "other": [(0.0, 9.0), (1.0, 1.0)]}, [(0.5, "x")]
    )
    curves = [
        float(point.split(",")[1])
        for points in re.findall(r"points='([^']*)'", drawn)
        for point in points.split()
    ]
    words = re.findall(r"<text x=[\d.]+ y=([\d.]+)[^>]*>(?:one|other|x)<", drawn)
    assert len(words) == 3
    assert max(float(y) for y in words) < min(curves)
