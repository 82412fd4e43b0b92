"""`autohet bench planner`: what a row says it reached, FASOP's growth figures and its published
partitions.
"""

import json

import pytest

from autohet.bench.planner import report as bench_planner
from autohet.bench.planner.report import search_reaches_limits
from autohet.cli.main import main
from scripts.benchmarks.planner.fasop import CASES, PUBLISHED, fasop_profile, growth, partition_row
from scripts.benchmarks.planner.measurements import measurements_folder

needs_measurements = pytest.mark.skipif(
    measurements_folder() is None,
    reason="no folder of published measurements: set AUTOHET_MEASUREMENTS",
)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"skipped": "absent", "reach_s": 1.0}, None),
        ({"cpu_s": 0.9, "reach_s": 1.0}, True),
        ({"cpu_s": 1.1, "reach_s": 1.0}, False),
        ({"cpu_s": 0.9, "reach_s": 1.0, "ratio": 1.02}, False),
        ({"cpu_s": 0.9, "reach_s": 1.0, "gap": 0.03, "reach_gap": 0.02}, False),
        ({"cpu_s": 0.9, "reach_s": 1.0, "gap": None, "reach_gap": 0.02}, False),
        ({"ratio": 0.98, "reach": 1.0}, True),
        ({"cpu_s": 3.0}, None),
    ],
)
def test_a_search_row_reaches_all_its_limits_or_not(row, expected):
    assert search_reaches_limits(row) is expected


@pytest.mark.parametrize(
    ("model", "gpu", "layer", "size", "factor"),
    [
        ("bert", "A100", "block", 4, 1.0),
        ("bert", "A100", "block", 8, 1.236),
        ("bert", "A100", "block", 32, 1.236 * 1.658 * 2),
        ("bert", "A10", "block", 8, 2.0),
        ("bert", "A10", "head", 8, 8.0),
        ("gpt2XL", "A100", "head", 32, 1.0),
        ("T5", "A10", "decoder", 4, 2 * 1.094),
    ],
)
def test_layers_grow_with_the_microbatch_as_fasop_measured(model, gpu, layer, size, factor):
    assert growth(model, gpu, layer, size) == pytest.approx(factor)


@needs_measurements
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.model in PUBLISHED], ids=lambda case: case.model
)
def test_fasops_published_partitions_come_out_or_better_ones(case):
    entries = json.loads((measurements_folder() / "data" / "fasop" / "profiles.json").read_text())
    row = partition_row(entries, case)
    assert row["reached"]
    assert row["partition"] == row["published"] or row["step_time_s"] < row["published_step_time_s"]
    assert row["fasop_best_step_time_s"] <= row["published_step_time_s"]
    assert {m.layer.split(":")[0] for m in fasop_profile(entries, case).measurements} == {
        "embedding",
        "block",
        "head",
    }


def test_one_document_with_the_verdict_of_every_row(capsys, monkeypatch):
    found = [
        ("accuracy", {"on": "a", "reached": True}),
        ("search", {"on": "b", "reached": None, "skipped": "absent"}),
    ]
    monkeypatch.setattr(bench_planner, "rows", lambda full: iter(found))
    assert main(["bench", "planner", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"accuracy": [found[0][1]], "search": [found[1][1]]}
    assert captured.err.splitlines() == ["accuracy | reached | a", "search | skipped | b"]
    monkeypatch.setattr(
        bench_planner, "rows", lambda full: iter([("search", {"on": "c", "reached": False})])
    )
    assert main(["bench", "planner"]) == 1
    assert capsys.readouterr().out == "search | NOT REACHED | c\n"
