"""Layer times made of measured rates, against blocks that were measured: of devices that hold their
rate, every one is met; nothing is scaled from another device.
"""

from collections.abc import Iterator
from statistics import median

import pytest

from planner.cost.layers.estimate import Reference, is_measured, references
from planner.cost.layers.roofline import (
    LayerWork,
    block_seconds,
    device_rates,
    measured_matmul_flops,
    usual_share_of_peak,
)
from planner.cost.parameters import CostParameters
from planner.inputs.catalogue import find_gpu_type
from planner.inputs.profile import default_profile

PARAMETERS = CostParameters()
TOKENS = 8192


def _ratios(gpu_type: str, dtype: str) -> Iterator[float]:
    """Predicted over measured seconds of every bundled Llama block, forward and backward."""
    device = find_gpu_type(gpu_type)
    assert device is not None
    for reference in references((default_profile(),)):
        if (reference.gpu_type, reference.dtype) != (gpu_type, dtype):
            continue
        if not reference.model.startswith("llama_"):
            continue
        yield _predicted_s(device, reference) / _measured_s(reference)


def _work(reference: Reference) -> LayerWork:
    length = reference.sequence_length
    sequences = max(1, TOKENS // length)
    return LayerWork("block", reference.layer, reference.dtype, length, sequences, 1)


def _predicted_s(device: object, reference: Reference) -> float:
    return sum(block_seconds(device, _work(reference), PARAMETERS))  # type: ignore[arg-type]


def _measured_s(reference: Reference) -> float:
    return sum(reference.seconds(_work(reference).flops, reference.layer.parameters))


@pytest.mark.parametrize(
    ("gpu_type", "dtype"),
    [
        ("A100-40", "fp16"),
        ("A100-80", "fp16"),
        ("A100-40", "fp32"),
        ("V100-16", "fp16"),
        ("V100-16-PCIe", "fp16"),
        ("A6000", "fp16"),
        ("A10G", "fp16"),
        ("L40S", "fp32"),
    ],
)
def test_rates_of_matrix_products_give_whole_blocks(gpu_type: str, dtype: str) -> None:
    """Wrong: data-sheet peaks, which are 1.2 to 2 times off on these devices."""
    assert median(_ratios(gpu_type, dtype)) == pytest.approx(1.0, abs=0.2)


def test_an_h100_is_not_an_h100_nvl_with_another_data_sheet() -> None:
    """Wrong: the rate of the card that is limited to 400 W, times a ratio of peaks."""
    h100, a100 = (measured_matmul_flops(name, "bf16") for name in ("H100", "A100-80"))
    assert h100 is not None
    assert a100 is not None
    assert 2.7 < h100 / a100 < 3.3
    assert not is_measured((default_profile(),), "H100-80", "bf16")
    assert is_measured((default_profile(),), "A100-80", "bf16")  # as its fp16
    assert is_measured((default_profile(),), "L40S", "fp32")
    assert not is_measured((default_profile(),), "L40S", "bf16")


def test_an_unmeasured_device_gets_the_usual_share_and_says_so() -> None:
    device = find_gpu_type("A40")
    assert device is not None
    rates = device_rates(device, "bf16", PARAMETERS)
    assert not rates.is_measured
    assert rates.matmul_flops == device.peak_flops("bf16") * usual_share_of_peak("bf16")
    assert 0.6 < usual_share_of_peak("bf16") < 1.0
    assert "data sheet" in rates.description


def test_weight_gradients_shrink_with_the_worker() -> None:
    """Wrong: the constant of a wide block's backward is paid by each eighth of a narrow one."""
    reference = next(
        r
        for r in references((default_profile(),))
        if (r.gpu_type, r.model) == ("V100-16", "llama_7b")
    )
    whole = reference.layer.parameters
    _, backward_s = reference.seconds(0.0, whole)
    _, eighth_s = reference.seconds(0.0, whole / 8)
    launch_s = min(reference.forward[0], reference.backward[0])
    assert eighth_s - launch_s == pytest.approx((backward_s - launch_s) / 8)
