"""Tables of every command at the widths of a pipe and of a terminal: no word, no number is cut."""

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from autohet.bench.planner import report as planner_report
from autohet.bench.recovery import display as recovery_display
from autohet.bench.step import report as step_report
from autohet.cli import demo, simulate
from autohet.cli.main import main
from autohet.runtime.process.terminal import PlainConsole
from tests.cli.test_plan_command import CLUSTER, JOB

RESULTS = Path("scripts/benchmarks/results")
WIDTHS = (80, 120)
WORD = st.text("abcdefgh0123456789.,", min_size=1, max_size=30)
CELL = st.lists(WORD, max_size=4).map(" ".join)


@st.composite
def tables(draw):
    """Tables of up to nine columns, with what they hold."""
    num_columns = draw(st.integers(1, 9))
    rows = draw(st.lists(st.lists(CELL, min_size=num_columns, max_size=num_columns), max_size=4))
    table = Table(title=draw(CELL))
    for index in range(num_columns):
        table.add_column(
            draw(CELL), no_wrap=draw(st.booleans()), justify=("left", "right")[index % 2]
        )
    for row in rows:
        table.add_row(*row)
    return table, [word for row in rows for cell in row for word in cell.split()]


@given(tables(), st.sampled_from([40, 80, 120]))
def test_every_word_of_any_table_is_whole(made, width):
    table, words = made
    shown = io.StringIO()
    PlainConsole(file=shown, width=width).print(table)
    found = shown.getvalue()
    assert sorted(set(words) - set(re.split(r"[\s│┃|]+", found))) == []
    assert max((len(line) for line in found.splitlines()), default=0) <= width


def result_of(policy):
    return {
        "policy": policy,
        "ended": None,
        "steps": 123_456_789,
        "steps_lost": 12_345,
        "tokens": 9_876_543_210_000,
        "tokens_per_s": 1_234_567.8,
        "useful_share": 0.987,
        "changes_by_cause": {"arrival": 1234, "death": 567, "notice": 890},
        "seconds_by_part": {"total": 123_456.7, "restore": 23_456.7},
        "bytes_by_tier": {"memory": 10**15, "disk": 0, "peer": 3 * 10**14, "s3": 10**13},
        "usd": 1_234_567.89,
        "usd_per_million_tokens": 12.345,
        "decisions": [],
    }


def simulated(tmp_path):
    names = ("local_first", "s3_only", "restart_local")
    baselines = ("homogeneous_a100", "homogeneous_rtx_pro_6000", "checkpoint_restart_tuned")
    simulate.show(
        {
            "results": [result_of(name) for name in names],
            "baselines": [result_of(name) for name in baselines],
            "seconds": 86400.0,
            "trace": "cluster_configs/traces/gcp.csv",
            "prices": {},
            "comparison": None,
        }
    )


def recovered(tmp_path):
    for name in ("recovery", "recovery_fleet"):
        document = json.loads((RESULTS / f"{name}.json").read_text())["document"]
        for scenario in document["scenarios"]:
            for result in scenario["policies"].values():
                result.setdefault("how", "restore run")
        recovery_display.show({"left_out": [], **document})


def planner_rows(tmp_path):
    row = {
        "on": "a fleet",
        "reached": True,
        "candidates": {"evaluated": 123_456, "pruned_by_bound": 98_765, "kept": 12.34567},
        "choices": [{"step_time_s": 0.123456, "gap": None}, {"step_time_s": 1.5, "gap": 0.25}],
    }
    planner_report.print_row("search", row, file=None)


def steps(tmp_path):
    sides = {"autohet": 0.123456, "plain": 0.23456}
    step_report._show(
        {
            "job": "a-job-with-a-long-name-of-its-own",
            "device": "NVIDIA H200",
            "precision": dict.fromkeys(sides, "bf16"),
            "step_s": sides,
            "tokens_per_s": {name: 123_456_789.0 for name in sides},
            "mfu": dict.fromkeys(sides, 0.5),
            "ratio_vs_plain": 1.0,
            "max_abs_loss_difference": 1e-7,
            "load_average_1min": 1.0,
        }
    )


def demonstrated(tmp_path):
    document = json.loads((RESULTS / "demo.json").read_text())["document"]
    found = SimpleNamespace(
        outcome=SimpleNamespace(summary=document),
        reference_losses=[document["final_loss"]],
        max_relative_loss_difference=1e-8,
        symmetric=None,
        speedup_over_symmetric=None,
        adapter=None,
        seconds=123.0,
    )
    demo.conclude(PlainConsole(), found)


def planned(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    files = ["--job", str(tmp_path / "job.yaml"), "--cluster", str(tmp_path / "cluster.yaml")]
    assert main(["plan", *files, "--compare", "autohet,megatron,metis"]) == 0
    assert main(["plan", *files, "--objective", "pareto"]) == 0


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "command", [simulated, recovered, planner_rows, steps, demonstrated, planned]
)
def test_a_commands_tables_fit_without_a_cut_word(tmp_path, monkeypatch, capsys, command, width):
    monkeypatch.setenv("COLUMNS", str(width))
    command(tmp_path)
    out = capsys.readouterr().out
    assert "…" not in out
    assert "{'" not in out, "no dictionary"
    tabular = [line for line in out.splitlines() if "│" in line or "──" in line]
    assert max((len(line) for line in tabular), default=0) <= width
