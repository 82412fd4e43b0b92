"""`autohet simulate`: what its options refuse. The simulation itself: tests/driver."""

import json
import logging
from pathlib import Path

import pytest
import yaml

from autohet.cli.main import main

CONFIGS = "cluster_configs"
FILES = [
    "--job",
    f"{CONFIGS}/jobs/llama-1b-bf16.yaml",
    "--cluster",
    f"{CONFIGS}/traces/gcp-a100-v100.yaml",
    "--trace",
    f"{CONFIGS}/traces/gcp-a100-v100.csv",
]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--hours", "inf"),
        ("--hours", "nan"),
        ("--hours", "0"),
        ("--notice-s", "nan"),
        ("--notice-s", "inf"),
    ],
)
def test_times_must_be_finite(capsys, option, value):
    assert main(["simulate", *FILES, option, value]) == 2
    assert f"{option} is {value}; it must be a number" in capsys.readouterr().err


def test_nodes_that_cannot_compute_the_jobs_precision_are_left_out_as_a_real_job_does(
    tmp_path, capsys, caplog
):
    """A V100 does not compute bf16: in a job that wants no other format neither AutoHet nor a
    baseline trains on it, and nobody pays for it.
    """
    job = tmp_path / "job.yaml"
    document = yaml.safe_load(Path(FILES[1]).read_text())
    document["parallelism"] = {**document.get("parallelism", {}), "compute_formats": "off"}
    job.write_text(yaml.safe_dump(document))
    trace = tmp_path / "trace.csv"
    trace.write_text("time_s,node_type,num_nodes\n0,a100,1\n0,v100,9\n")
    arguments = [
        "simulate",
        "--job",
        str(job),
        *FILES[2:4],
        "--trace",
        str(trace),
        "--hours",
        "0.5",
        "--policies",
        "local_first",
        "--json",
    ]
    with caplog.at_level(logging.WARNING, "autohet"):
        assert main([*arguments, "--baselines", "checkpoint_restart"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["left_out"] == ["v100"]
    assert [found["steps"] for found in (*document["results"], *document["baselines"])] == [0, 0]
    usd_per_hour = document["prices"]["a100"]["usd_per_hour"][0][1]
    assert document["results"][0]["usd"] == pytest.approx(usd_per_hour / 2)
    assert "training.precision is bf16, which v100 (V100-16) cannot compute" in caplog.text


def test_a_run_that_made_no_step_says_why(tmp_path, capsys):
    trace = tmp_path / "trace.csv"
    trace.write_text("time_s,node_type,num_nodes\n0,a100,1\n")
    assert (
        main(
            [
                "simulate",
                *FILES[:4],
                "--trace",
                str(trace),
                "--hours",
                "0.1",
                "--policies",
                "local_first",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert f"SIMULATED: 0.1 hours of {trace}" in out
    assert (
        "local_first made no step: Deciding to wait, since the fleet has 1 worker; the job needs 4"
        in out
    )
