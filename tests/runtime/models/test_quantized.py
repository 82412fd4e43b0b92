"""Frozen weights in fewer bits have the values of bitsandbytes and torchao, in every slice."""

import hashlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autohet.runtime.job import AdapterSection, Job
from autohet.runtime.models.layers.adapters import set_adapter
from autohet.runtime.models.parameter_spec import ParameterSpec, local_units, take_units
from autohet.runtime.models.quantized.weight import (
    FORMATS,
    QuantizedWeight,
    held_as,
    quantize,
    quantized_values,
)
from autohet.runtime.models.registry import family_of
from planner.errors import ConfigError
from planner.plans.plan import TensorShare
from tests.harness.tiny_models import tiny_config

CPU = torch.device("cpu")
SHAPE = (140, 128)


def weight() -> Tensor:
    """Values that are the same on every machine, in blocks of unlike sizes."""
    numbers = torch.arange(SHAPE[0] * SHAPE[1])
    signed = (numbers * 40503 % 65536 - 32768).float() / 32768
    sizes = (numbers // 64 * 97 % 31 + 1).float() / 256
    return (signed * sizes).view(SHAPE)


def spec_of(
    base_format: str, shape: tuple[int, int], split_dim: int | None = None, units: int = 1
) -> ParameterSpec:
    cuts: tuple[int, ...] = (0, 1)
    if split_dim is not None:
        cuts = tuple(shape[split_dim] * unit // units for unit in range(units + 1))
    return ParameterSpec("w", shape, 0, split_dim, cuts, trainable=False, base_format=base_format)


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:32]


RECORDED = {
    torch.float32: (
        "25bbcd67abba667cbe5e99de4b32d970",
        "dbe380acc4ce272f555693da8c0c5f6c",
        ["0x1.e3d6ce0000000p-5", "0x1.e5ce8e0000000p-5", "0x1.f9f3720000000p-5"],
        "d682032be4b7e51b06fb8a3c87bc625b",
    ),
    torch.bfloat16: (
        "fc574cf7b051661325c99260987f7540",
        "634428ef36833fe602c786d458ada0db",
        ["0x1.e20c000000000p-5", "0x1.e60c000000000p-5", "0x1.f9f4000000000p-5"],
        "dc13c792afa9df694c1f51c37e05d5e2",
    ),
}
"""Digests of codes and scales, the factors, the scales' mean, and the digest of the values.

They are of bitsandbytes 0.50.2, by its kernels in torch: `quantize_4bit(weight, blocksize=64,
compress_statistics=True, quant_type="nf4")` and `dequantize_4bit`. Its library for CPUs finds a
scale's nearest 8-bit value on a grid of 2**-15, and takes a neighbour in 0.15% of the blocks.
"""


@pytest.mark.parametrize("dtype", RECORDED)
def test_codes_scales_and_values_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    given = weight().to(dtype)
    codes, scales, factors = quantize(spec_of("nf4", SHAPE), given).values()
    of_codes, of_scales, floats, of_values = RECORDED[dtype]
    assert digest(codes) == of_codes
    assert digest(scales) == of_scales
    assert [float(each).hex() for each in factors] == floats
    assert digest(quantized_values(spec_of("nf4", SHAPE), given)) == of_values


OF_TORCHAO = {
    torch.float32: (
        "db6eba35d6cfccdb508ed61fecf3be0b",
        "30e493511751c94c49812819ecd8648d",
        "872f6e83579c7fca12bb0923b46c776b",
    ),
    torch.bfloat16: (
        "570fcd42473d2d0c9cf221441d8d2699",
        "8a900e0e2da0f5545c76a5b32646f7ec",
        "97158e3273daebdf660a30ec91a07e65",
    ),
}
"""Digests of `qdata`, `scale` and `dequantize()` by torchao 0.18's `Float8WeightOnlyConfig`."""


@pytest.mark.parametrize("dtype", OF_TORCHAO)
def test_fp8_is_that_of_torchao(dtype: torch.dtype) -> None:
    spec, given = spec_of("fp8", SHAPE), weight().to(dtype)
    found = [*quantize(spec, given).values(), quantized_values(spec, given)]
    assert tuple(map(digest, found)) == OF_TORCHAO[dtype]
    assert torch.equal(quantized_values(spec, 0 * given), 0 * given)


SHAPES = {
    "whole blocks": ((24, 512), 1),
    "cut blocks": ((24, 192), 1),
    "odd cuts": ((16, 50), 1),
    "rows": ((32, 64), 0),
    "blocks over several rows": ((40, 24), 0),
}


@pytest.mark.parametrize("base_format", FORMATS)
@pytest.mark.parametrize("name", SHAPES)
def test_a_slice_has_the_values_of_the_whole_at_any_degree(name: str, base_format: str) -> None:
    """Wrong: blocks are counted from a slice's own first value, or a row's scale from its part."""
    shape, dim = SHAPES[name]
    torch.manual_seed(1)
    given = torch.randn(shape) * torch.rand(shape[0], 1)
    spec = spec_of(base_format, shape, dim, 8)
    values = quantized_values(spec, given)
    assert torch.equal(values, quantized_values(spec_of(base_format, shape), given))
    held = quantize(spec, given)
    for share in (TensorShare(0, 1, 2), TensorShare(5, 8, 8), TensorShare(1, 3, 4)):
        units = local_units(spec, share)
        parts = []
        for part in held_as(spec):
            parts.append(take_units(part, local_units(part, share), held[part.name]))
        own = QuantizedWeight(spec, units, CPU)
        found = FORMATS[base_format].dequantize([*parts, *own.places], given)
        assert torch.equal(found, take_units(spec, units, values))


@pytest.mark.parametrize(("base_format", "num_bytes"), [("nf4", 0.517), ("fp8", 1.008)])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_weight_is_held_in_its_bytes_and_its_product_keeps_no_values(
    compiled: bool, base_format: str, num_bytes: float
) -> None:
    """Wrong: a compiler takes the values of the forward pass for the backward pass."""
    spec = spec_of(base_format, (256, 512))
    module = QuantizedWeight(spec, (0,), CPU)
    held = quantize(spec, torch.randn(256, 512).bfloat16())
    for part in held_as(spec):
        kept = torch.nn.Parameter(held[part.name], requires_grad=False)
        module._parameters[part.name.rpartition(".")[2]] = kept
    assert sum(each.nbytes for each in held.values()) < num_bytes * 256 * 512
    x = torch.randn(3, 512, requires_grad=True)
    values = FORMATS[base_format].dequantize([*held.values(), *module.places], x)

    run = torch.compile(module, backend="aot_eager_decomp_partition") if compiled else module
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        product = run(x)
    assert saved
    assert all(each.dtype != x.dtype or each.numel() < 1000 for each in saved)
    gradient = torch.randn(3, 256)
    (found,) = torch.autograd.grad(product, x, gradient)
    assert torch.equal(product, F.linear(x, values))
    assert torch.equal(found, gradient @ values)


def document(base: str, **sections: Any) -> dict[str, Any]:
    model = {"config": {"model_type": "llama"}, "adapter": {"base": base}}
    training = {"global_batch_sequences": 1, "sequence_length": 8, "precision": "bf16"}
    training |= sections.pop("training", {})
    return {"name": "j", "model": model, "training": training, **sections}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (document("int8"), "model.adapter.base.*nf4.*fp8.*bf16"),
        (document("bf16", training={"precision": "fp32"}), "base is bf16, but training.precision"),
        (
            document("nf4", parallelism={"compute_formats": {"H100-80": "fp8"}}),
            "base is nf4, .* names fp8 for H100-80; name bf16",
        ),
        (
            document("fp8", parallelism={"compute_formats": {"H100-80": "fp8"}}),
            "base is fp8, .* names fp8 for H100-80; name bf16",
        ),
    ],
)
def test_a_wrong_base_is_one_sentence(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Job.from_document(given)


def test_a_base_in_bf16_is_that_of_a_job_in_bf16() -> None:
    job = Job.from_document(document("bf16"))
    assert job.model.adapter == AdapterSection()
    assert job.identity()["model.adapter.base"] is None


def test_a_transposed_weight_is_refused() -> None:
    config = tiny_config("gpt2")
    set_adapter(config, AdapterSection(base="nf4"), None, None)
    with pytest.raises(ConfigError, match=r"base is nf4.*c_attn.weight is one \(in, out\)"):
        family_of(config).parameter_specs(config)
