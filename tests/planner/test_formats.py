"""Number formats by GPU type: what a mapping and a plan may name."""

import re

import pytest

from planner.errors import ConfigError
from planner.inputs.catalogue import find_gpu_type
from planner.plans.formats import check_formats, check_named_formats, common_formats
from planner.plans.plan import Pipeline, Plan, Stage
from tests.planner.cases import fleet

WHAT = "parallelism.compute_formats"


@pytest.mark.parametrize("gpu_type", ["L4", "L40S", "RTX-4090", "H100-80", "H200", "B200"])
def test_types_with_8_bit_units_have_a_peak_above_bf16(gpu_type):
    device = find_gpu_type(gpu_type)
    assert device.computes("fp8")
    assert device.peak_flops("fp8") > 1.9 * device.peak_flops("bf16")


@pytest.mark.parametrize("gpu_type", ["T4", "V100-16", "A10G", "A100-80", "RTX-3090"])
def test_types_without_8_bit_units_do_not_compute_fp8(gpu_type):
    assert not find_gpu_type(gpu_type).computes("fp8")


def test_formats_that_several_types_share():
    assert common_formats(["A100-80"]) == ["fp32", "bf16", "fp16"]
    assert common_formats(["H100-80", "L4"]) == ["fp32", "bf16", "fp16", "fp8"]
    assert common_formats(["T4", "A100-80"]) == ["fp32", "fp16"]


@pytest.mark.parametrize(
    ("named", "refusal"),
    [
        ({"A100": "fp8"}, "A100 is fp8, for which that GPU type has no units; use fp32 or bf16 or"),
        ({"T4": "bf16"}, "T4 is bf16, for which that GPU type has no units; use fp32 or fp16, or"),
        ({"T44": "fp16"}, "names T44, which is no GPU type of the catalogue; use a name such as"),
        ({"V100": "fp16", "V100-16": "fp32"}, "V100 and V100-16, which are one GPU type; keep one"),
    ],
)
def test_a_mapping_of_types_that_lack_units_or_are_unknown_is_refused(named, refusal):
    with pytest.raises(ConfigError, match=rf"^{re.escape(WHAT)}.*{refusal}"):
        check_named_formats(named, WHAT)


def test_emulated_types_have_any_name_and_no_fp8():
    check_named_formats({"fast": "fp16", "T4": "bf16"}, WHAT, is_emulated=True)
    with pytest.raises(ConfigError, match="H100 is fp8, for which the CPU that emulates it"):
        check_named_formats({"H100": "fp8"}, WHAT, is_emulated=True)


def plan_of(*stages):
    return Plan("m", 4, 1, 16, (Pipeline(stages, 4, 1),))


def test_a_plan_may_name_formats_that_its_workers_have():
    cluster = fleet(("T4", 1, 2), ("A100", 1, 2))
    fine = plan_of(
        Stage(0, 2, ("t4-0/0",), compute="fp16"),
        Stage(2, 2, ("a100-0/0", "a100-0/1")),
        Stage(4, 2, ("t4-0/1",), compute="fp32"),
    )
    check_formats(fine, cluster, "bf16")


@pytest.mark.parametrize(
    ("stage", "refusal"),
    [
        (
            Stage(2, 2, ("a100-0/0",), compute="fp8"),
            r"stage 1 of pipeline 0 computes fp8, for which its worker a100-0/0 \(A100\S*\) has no"
            " units; set the stage's 'compute' to fp32 or bf16 or fp16",
        ),
        (
            Stage(2, 2, ("a100-0/0", "t4-0/1")),
            r"computes bf16, for which its worker t4-0/1 \(T4\) has no units; .* fp32 or fp16$",
        ),
    ],
)
def test_a_plan_that_names_a_format_without_units_is_refused(stage, refusal):
    cluster = fleet(("T4", 1, 2), ("A100", 1, 2))
    plan = plan_of(Stage(0, 2, ("t4-0/0",), compute="fp16"), stage)
    with pytest.raises(ConfigError, match=refusal):
        check_formats(plan, cluster, "bf16")


def test_stages_that_name_no_format_pass_where_no_precision_is_asked_for():
    check_formats(plan_of(Stage(0, 4, ("t4-0/0",))), fleet(("T4", 1, 1)), None)
