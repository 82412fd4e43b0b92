"""Profile tables: strict reading, CSV and Parquet alike, curves, and estimates that say what they
are.
"""

import csv
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.basis import Measurements, Workload
from planner.cost.layers.curves import PointSplit, make_curve
from planner.cost.layers.layer_seconds import LayerTimeModel
from planner.cost.layers.measured_layers import MeasuredLayers
from planner.cost.model import CostModel
from planner.cost.parameters import CostParameters
from planner.errors import ConfigError
from planner.inputs.profile import (
    Measurement,
    ProfileTable,
    default_profile,
    read_profile,
    write_profile,
)
from planner.plans.plan import Pipeline, Stage
from tests.planner.cases import fleet, model

ROW = {
    "model": "m",
    "gpu_type": "T4",
    "dtype": "fp16",
    "tp_degree": "1",
    "sequence_length": "8",
    "microbatch_sequences": "2",
    "layer": "block",
    "forward_s": "0.5",
    "backward_s": "",
}


def _write(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_csv_and_parquet_hold_the_same_table(tmp_path):
    rows = (
        Measurement("m", "T4", "fp16", 1, 8, 1, "block:3", 0.25, None, 0.1, 7.0, "here"),
        Measurement("m", "T4", "fp16", 2, 8, 4, "embedding", 0.5, 0.75),
    )
    for name in ("t.csv", "t.parquet"):
        write_profile(tmp_path / name, ProfileTable(rows))
        assert read_profile(tmp_path / name).measurements == rows


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer": "attention"}, "attention"),
        ({"forward_s": ""}, "forward_s"),
        ({"forward_s": "-1"}, "forward_s"),
        ({"backward_s": "slow"}, "backward_s"),
        ({"tp_degree": "1.5"}, "tp_degree"),
        ({"microbatch_sequences": "0"}, "microbatch_sequences"),
        ({"model": ""}, "model"),
        ({"speed": "1"}, "speed"),
    ],
)
def test_a_wrong_row_is_an_error_that_names_row_and_column(tmp_path, change, named):
    path = _write(tmp_path / "t.csv", [ROW | change])
    with pytest.raises(ConfigError, match=named) as caught:
        read_profile(path)
    assert "row 1" in str(caught.value)


def test_a_missing_column_and_a_missing_file_say_so(tmp_path):
    with pytest.raises(ConfigError, match="lacks column 'backward_s'"):
        read_profile(
            _write(tmp_path / "t.csv", [{k: v for k, v in ROW.items() if k != "backward_s"}])
        )
    with pytest.raises(ConfigError, match="cannot read"):
        read_profile(tmp_path / "absent.parquet")


@settings(max_examples=50)
@given(st.dictionaries(st.integers(1, 64), st.floats(1e-4, 1.0), min_size=1, max_size=6))
def test_more_sequences_never_take_less_time(points):
    curve = make_curve(points)
    values = [curve.at(size) for size in range(1, 130)]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(values))
    assert min(values) > 0
    in_run = [curve.in_run(size, 0.9) for size in range(1, 130)]
    assert all(0 < a <= b * (1 + 1e-12) for a, b in zip(in_run, values, strict=True))


@settings(max_examples=30)
@given(st.lists(st.floats(1e-4, 1.0), min_size=2, max_size=6))
def test_rising_measurements_are_met_exactly(steps):
    points = {2**i: sum(steps[: i + 1]) for i in range(len(steps))}
    curve = make_curve(points)
    for size, seconds in points.items():
        assert curve.at(size) == pytest.approx(seconds)


def test_a_straight_line_is_continued():
    curve = make_curve({b: 1.0 + 2.0 * b for b in (1, 2, 4, 8)})
    assert curve.at(100) == pytest.approx(201.0)
    assert curve.at(3) == pytest.approx(7.0)


def test_only_work_and_communication_grow_with_the_microbatch():
    split = PointSplit(base=1, launch_s=1.0, work_s=2.0, communication_s=0.5)
    parameters = CostParameters(launch_exposure=1.0, backward_ratio=2.0, launch_backward_ratio=1.0)
    assert split.at(1, parameters) == pytest.approx((3.5, 1.0 + 4.0 + 0.5))
    assert split.at(4, parameters) == pytest.approx((1.0 + 10.0, 1.0 + 18.0))


def test_the_bundled_measurements_are_whole():
    table = default_profile()
    assert len(table.measurements) > 2500
    gpus = {m.gpu_type for m in table.measurements}
    assert {
        "T4",
        "P40",
        "P100",
        "V100-16",
        "A10G",
        "L4",
        "L40S",
        "A6000",
        "A100-40",
        "A100-80",
        "H100-NVL",
    } <= gpus
    assert all(m.forward_s > 0 and (m.backward_s or 0) > 0 for m in table.measurements)


def test_an_update_measured_at_one_tp_degree_is_shared_out_at_another():
    """No catalogue knows this GPU: nothing could be estimated from its memory bandwidth."""
    spec = model()
    rows = [
        Measurement(
            "tiny", "GPU of tomorrow", "fp32", 1, 128, size, layer, 0.1 * size, 0.2 * size, 0.4
        )
        for size in (1, 2)
        for layer in ("embedding", "block", "head")
    ]
    times = LayerTimeModel(
        MeasuredLayers(ProfileTable(rows), spec, "tiny", "fp32", 128),
        CostParameters(),
        lambda gpu, degree, size: 0.0,
    ).times("GPU of tomorrow", 2, 1)
    block = spec.blocks[0]
    share = block.parameters_per_worker(2) / block.parameters_per_worker(1)
    assert times.update_s[1] == pytest.approx(0.4 * share)
    assert 0.5 < share < 0.51


def _two_kinds(rows):
    """The layer times of a model of one dense block and seven with experts."""
    spec = model()
    dense = replace(spec.blocks[0], parameters=2 * spec.blocks[0].parameters)
    spec = replace(spec, blocks=(dense, *spec.blocks[1:]))
    table = ProfileTable(
        Measurement("tiny", "A100", "fp32", 1, 128, size, layer, size * seconds, size * seconds)
        for layer, seconds in rows.items()
        for size in (1, 2)
    )
    return LayerTimeModel(
        MeasuredLayers(table, spec, "tiny", "fp32", 128), CostParameters(), lambda *_: 0.0
    )


def test_each_block_takes_the_time_of_its_own_kind():
    """At a measured TP degree and at another; a row of all blocks, as in old files, serves all."""
    times = {"embedding": 0.1, "head": 0.3}
    both = _two_kinds({**times, "block:0": 1.0, "block:1": 4.0})
    assert list(both.times("A100", 1, 2).forward_s) == [0.2, 2.0, *[8.0] * 7, 0.6]
    assert list(both.times("A100", 2, 2).forward_s[1:3]) == [1.0, 4.0]
    assert both.even.basis("A100")[0] == "measured"
    assert both.measured.nearest_key("T4", "block") == both.measured.key("A100-40", 1)
    assert not any("kinds" in note for note in both.times("A100", 1, 2).estimated)
    old = _two_kinds({**times, "block": 2.0}).times("A100", 1, 1)
    assert list(old.forward_s[1:-1]) == [2.0] * 8
    assert any("one time for 2 kinds" in note for note in old.estimated)


def test_a_kind_that_was_not_measured_is_estimated():
    found = _two_kinds({"embedding": 0.1, "block:1": 4.0, "head": 0.3}).times("A100", 1, 1)
    assert list(found.forward_s[2:-1]) == [4.0] * 7
    assert 0 < found.forward_s[1] < 4.0
    assert any(note.startswith("block on A100") for note in found.estimated)


def test_a_stage_takes_the_time_of_the_kinds_that_it_has():
    """A run compares its measured passes with these seconds, and corrects rates by the ratio."""
    kinds = _two_kinds({"embedding": 0.1, "block:0": 1.0, "block:1": 4.0, "head": 0.3})
    cost = CostModel(
        fleet(("A100", 2, 1)),
        Workload(kinds.measured.spec, 128, "fp32"),
        Measurements(kinds.measured.profile),
        CostParameters(launch_exposure=1.0),
    )
    stages = Stage(0, 1, ("a100-0/0",)), Stage(1, 7, ("a100-1/0",))
    pipeline = Pipeline(stages, 2, 1)
    assert cost.stages.seconds(pipeline, 0)[0] == pytest.approx(0.1 + 1.0)
    assert cost.stages.seconds(pipeline, 1)[0] == pytest.approx(7 * 4.0 + 0.3)
