"""`autohet simulate`: traces read strictly; the real controller along them, on a fake clock, loses
what it must and no more.
"""

import json
from pathlib import Path

import pytest
import yaml

from autohet.cli.main import main
from autohet.control.planning.buying import best_counts
from autohet.driver.loop.planning import make_planning
from autohet.driver.ray.requests.scaling import fleet_request, standing_nodes
from autohet.runtime.job import Job
from autohet.simulate.costs import Costs
from autohet.simulate.simulation import BASELINES, Scenario, TraceSimulation, horizon
from autohet.simulate.spot_trace import read_trace
from planner.errors import ConfigError
from planner.inputs.cluster import cluster_from_document
from tests.driver.test_scaling import AWS, shortest_job
from tests.harness.local_fleet import cluster_document

pytestmark = pytest.mark.thorough

CLUSTER = cluster_from_document(cluster_document())  # up to four nodes each of big, small and pair


def trace_of(tmp_path, text, notice_s=120.0):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return read_trace(path, CLUSTER, notice_s)


def job_document(**parallelism):
    model = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
    }
    model |= {"num_attention_heads": 2, "vocab_size": 256}
    speeds = {"A100-40": 2.0, "A10G": 1.0, "L40S": 1.5}
    return {
        "name": "fake",
        "model": {"config": model},
        "training": {"global_batch_sequences": 8, "sequence_length": 16, "precision": "fp32"},
        "checkpoint": {"every_steps": 50},
        "elastic": {"step_timeout_s": 30, "debounce_s": 1},
        "parallelism": {
            "microbatch_sequences": 1,
            "max_tp_degree": 1,
            "horizon_s": 1e5,
            **parallelism,
        },
        "emulation": {"relative_speed_by_gpu_type": speeds, "block_forward_s": 0.05},
    }


def run(tmp_path, text, policy="local_first", notice_s=120.0, hours=None, **parallelism):
    trace = trace_of(tmp_path, text, notice_s)
    return TraceSimulation(
        Scenario(
            Job.from_document(job_document(**parallelism)), CLUSTER, trace, horizon(trace, hours)
        )
    ).run(policy)


COUNTS = "time_s,node_type,num_nodes\n0,big,1\n0,small,3\n2000,small,2\n4000,small,3\n6000,big,0\n"


def test_counts_become_nodes_with_names_notices_and_ends(tmp_path):
    events = trace_of(tmp_path, "time_s,node_type,num_nodes\n0,small,2\n500,small,1\n600,small,2\n")
    assert [(e.time_s, e.kind, e.node) for e in events] == [
        (0, "arrival", "small-0"),
        (0, "arrival", "small-1"),
        (380, "notice", "small-1"),
        (500, "death", "small-1"),
        (600, "arrival", "small-2"),
    ]
    assert events[2].gone_s == 500
    assert not [e for e in trace_of(tmp_path, COUNTS, 0.0) if e.kind == "notice"]


def test_events_as_they_are_and_a_notice_ends_its_node(tmp_path):
    events = trace_of(
        tmp_path,
        "time_s,event,node\n0,arrival,small-7\n10,arrival,big-0\n50,notice,small-7\n60,death,big-0\n",
    )
    assert [(e.time_s, e.kind, e.node) for e in events][2:] == [
        (50, "notice", "small-7"),
        (60, "death", "big-0"),
        (170, "death", "small-7"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time,node_type,num_nodes\n", "columns time, node_type, num_nodes"),
        (
            "time_s,node_type,num_nodes\n0,huge,1\n",
            "node type 'huge'; the cluster has big, pair, small",
        ),
        ("time_s,node_type,num_nodes\n0,big,9\n", "'big' has 0 to 4 nodes"),
        ("time_s,node_type,num_nodes\n-1,big,1\n", "'time_s' of row 1"),
        ("time_s,event,node\n0,leaves,big-0\n", "must be notice, death or arrival"),
        ("time_s,event,node\n0,death,big-0\n", "node 'big-0' is not there"),
        ("time_s,event,node\n0,arrival,big-0\n5,arrival,big-0\n", "is there already"),
    ],
)
def test_a_wrong_trace_is_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        trace_of(tmp_path, text)


def test_notices_cost_no_step_and_time_adds_up(tmp_path):
    result = run(tmp_path, COUNTS, min_pipelines=2)
    assert result["ended"] is None
    assert result["steps_lost"] == 0
    assert result["bytes_by_tier"]["s3"] == 0
    assert result["changes_by_cause"].keys() <= {"notice", "arrival"}
    assert result["changes_by_cause"]["notice"] >= 1
    assert 0.9 < result["useful_share"] < 1.0
    hours = {"big": 6000 / 3600, "small": (3 * 2000 + 2 * 2000 + 3 * 5600) / 3600}
    assert result["usd"] == pytest.approx(sum(hours.values()), rel=0.01)  # one dollar an hour each


def test_notices_some_seconds_apart_are_one_change_that_is_over_in_time(tmp_path):
    """As a live run gathers them: once it has changed before, and has made a checkpoint, it knows
    how long it may.
    """
    text = "time_s,event,node\n0,arrival,big-0\n" + "".join(
        f"0,arrival,small-{n}\n" for n in range(4)
    )
    text += "1000,notice,small-3\n2000,notice,small-0\n2003,notice,small-1\n2005,notice,small-2\n"
    result = run(tmp_path, text, min_pipelines=1)
    changes = [change for change in result["reconfigurations"] if change["cause"] == "notice"]
    assert [change["nodes"] for change in changes] == [
        ["small-3"],
        ["small-0", "small-1", "small-2"],
    ]
    assert result["changes_by_cause"].get("death", 0) == result["steps_lost"] == 0
    (begins_s,) = (s["begin_s"] for s in result["stretches"] if s["begin_s"] > 2000)
    assert begins_s < 2000 + 120


def test_the_same_trace_gives_the_same_run(tmp_path):
    assert run(tmp_path, COUNTS) == run(tmp_path, COUNTS)


def test_a_sudden_death_costs_nothing_while_another_holds_all(tmp_path):
    result = run(tmp_path, COUNTS, notice_s=0.0, min_pipelines=2)
    assert result["changes_by_cause"]["death"] >= 1
    assert result["steps_lost"] == 0


def test_restarts_from_storage_lose_what_local_state_keeps(tmp_path):
    ours, theirs = (
        run(tmp_path, COUNTS, policy, min_pipelines=2) for policy in ("local_first", "s3_only")
    )
    assert theirs["steps_lost"] > 0
    assert theirs["bytes_by_tier"]["s3"] > 0
    assert theirs["bytes_by_tier"]["memory"] == theirs["bytes_by_tier"]["disk"] == 0
    assert theirs["seconds_by_part"]["total"] > 2 * ours["seconds_by_part"]["total"]


def test_training_begins_as_soon_as_the_first_workers_are_up(tmp_path):
    """Nobody waits for the next look of a driver that has its answer already."""
    result = run(tmp_path, COUNTS, hours=0.5, min_pipelines=2)
    costs = result["stated"]
    up = costs["boot_s"] + costs["process_start_s"] + costs["data_s"]
    assert up < result["stretches"][0]["begin_s"] < up + 10


def test_no_fleet_for_a_while_waits_and_goes_on(tmp_path):
    text = "time_s,node_type,num_nodes\n0,small,2\n3000,small,0\n9000,small,2\n"
    result = run(tmp_path, text, hours=4)
    assert result["ended"] is None
    assert any("wait" in reason for reason in result["decisions"])
    assert 0.3 < result["useful_share"] < 0.65  # 6,000 of 14,400 s without a node


def test_the_command(tmp_path, capsys):
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster_document()))
    (tmp_path / "trace.csv").write_text(COUNTS)
    arguments = [
        "simulate",
        "--cluster",
        str(tmp_path / "cluster.yaml"),
        "--trace",
        str(tmp_path / "trace.csv"),
        "--json",
        "--hours",
        "0.2",
    ]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job_document()))
    arguments += ["--job", str(tmp_path / "job.yaml")]
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert [result["policy"] for result in document["results"]] == ["local_first", "s3_only"]
    assert all(result["simulated"] and result["steps"] > 0 for result in document["results"])
    assert [found["policy"] for found in document["baselines"]] == list(BASELINES)
    assert all(
        found["simulated"] and found["what"] for found in document["baselines"] if found["tokens"]
    )
    assert document["comparison"]["best_baseline"] in BASELINES
    assert document["costs"]["boot_s"]["unit"] == "s"
    picture = tmp_path / "run.svg"
    assert main([*arguments, "--baselines", "none", "--picture", str(picture)]) == 0
    assert "SIMULATED" in picture.read_text()
    assert main([*arguments, "--policies", "magic"]) == 2
    assert main([*arguments, "--baselines", "magic"]) == 2


def test_a_change_ends_with_its_first_step_however_long_the_next_event_is_off(tmp_path):
    """Steps that take longer than arrivals are waited for: the clock does not jump over the first
    one of a change.
    """
    document = job_document()
    document["emulation"]["block_forward_s"] = 5.0
    trace = trace_of(
        tmp_path, "time_s,node_type,num_nodes\n0,small,3\n20000,small,2\n60000,small,2\n", 0.0
    )
    result = TraceSimulation(
        Scenario(Job.from_document(document), CLUSTER, trace, horizon(trace, None))
    ).run("local_first")
    (change,) = result["reconfigurations"]
    assert change["predicted_step_s"] > 10
    # The first step is longer by what is stated; the snapshot of so small a state costs nothing.
    expected = change["predicted_step_s"] + Costs().warm_step_s
    assert change["seconds"]["first_step"] == pytest.approx(expected, abs=0.01)


@pytest.mark.usefixtures("_whole_search")
def test_the_shortest_job_on_the_sample_cluster_buys_what_it_uses(tmp_path):
    """What is asked of the autoscaler comes, beside the file's own floor; after ten minutes nothing
    that was bought idles.
    """
    document = yaml.safe_load(Path(AWS).read_text())
    for name, most in (("p4d", 1), ("g6e", 2), ("g5", 1)):
        document["available_node_types"][name]["max_workers"] = most
    cluster, job = cluster_from_document(document), shortest_job()
    standing = standing_nodes(cluster, document)
    request = fleet_request(
        job, cluster, document, None, best_counts(make_planning(job), cluster, standing)
    )
    here = {
        kind.name: max(request.counts.get(kind.name, 0), standing[kind.name])
        for kind in cluster.node_types
    }
    rows = [f"0,{name},{count}\n" for name, count in here.items() if count]
    path = tmp_path / "trace.csv"
    path.write_text("time_s,node_type,num_nodes\n" + "".join(rows))
    found = TraceSimulation(Scenario(job, cluster, read_trace(path, cluster, 120.0), 3600.0)).run(
        "local_first"
    )
    gpus = {kind.name: kind.num_gpus for kind in cluster.node_types}
    paid, idle = found["gpu_hours_after_ten_minutes"], found["idle_gpu_hours_after_ten_minutes"]
    assert found["steps"] > 0
    assert paid == pytest.approx(
        sum(gpus[name] * count for name, count in here.items()) * 5 / 6, rel=0.01
    )
    floor = (
        sum(gpus[name] * max(0, standing[name] - request.counts.get(name, 0)) for name in standing)
        * 5
        / 6
    )
    bought = paid - floor
    assert idle - floor < 0.05 * bought


def test_gpus_that_the_plan_does_not_use_are_counted_from_the_tenth_minute_on(tmp_path):
    used = run(tmp_path, "time_s,node_type,num_nodes\n0,big,1\n0,small,1\n", hours=1)
    assert used["gpu_hours_after_ten_minutes"] == pytest.approx(2 * 5 / 6, rel=0.01)
    assert used["idle_gpu_hours_after_ten_minutes"] == pytest.approx(0, abs=0.01)
    waits = run(
        tmp_path, "time_s,node_type,num_nodes\n0,big,1\n", hours=1, min_pipelines=2
    )  # two pipelines need two
    assert waits["idle_gpu_hours_after_ten_minutes"] == waits["gpu_hours_after_ten_minutes"] > 0
