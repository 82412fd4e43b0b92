"""Matrix products in fp8, with one scale a tensor, of the linear maps in a stage's blocks.

Activations and weights are cast to e4m3, gradients to e5m2, each by the largest value that it holds
now (Micikevicius et al. 2022, "FP8 formats for deep learning", section 3). Products are summed in
fp32 and leave in the compute dtype, in which weights, norms, attention, embedding and head stay.
Routers, experts and the matrices of adapters stay, too.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autohet.runtime.models.layers.adapters import AdaptedLinear
from autohet.runtime.models.layers.autograd import apply
from autohet.runtime.models.layers.tensor_parallel import RowParallel, set_product
from planner.errors import ConfigError

ALIGNMENT = 16
"""Multiple that the kernels want of both dimensions of a weight."""
LEAST_CAPABILITY = (8, 9)
FORWARD = torch.float8_e4m3fn
BACKWARD = torch.float8_e5m2


def check_fp8(device: torch.device) -> None:
    """Raise ConfigError unless PyTorch has products in fp8 on this device."""
    if not hasattr(torch, "_scaled_mm"):
        raise ConfigError(
            f"a stage computes fp8, for which PyTorch {torch.__version__} has no kernel; use a"
            " newer PyTorch, or bf16"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        raise ConfigError(
            f"a stage computes fp8, for which {torch.cuda.get_device_name(device)} has no units;"
            " set its 'compute' to bf16"
        )


def use_fp8(block: nn.Module) -> int:
    """Let the linear maps of a block compute in fp8; return their number.

    Maps with a dimension that is no multiple of ALIGNMENT stay as they are.
    """
    count = 0
    low_rank: set[nn.Module] = set()
    for module in block.modules():
        if isinstance(module, AdaptedLinear):
            low_rank |= {module.lora_A, module.lora_B}
    for module in block.modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.dim() != 2 or module in low_rank:
            continue
        if any(side % ALIGNMENT for side in weight.shape):
            continue
        is_plain = isinstance(module, RowParallel | AdaptedLinear) and not module.transposed
        if is_plain or type(module) is nn.Linear:
            set_product(module, fp8_linear)
            count += 1
    return count


def fp8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T, with both factors in fp8.

    x: [..., in]; weight: [out, in], of the dtype of x. A number of rows that is no multiple of
    ALIGNMENT is padded with zeros, which the product over rows of the weight's gradient needs.
    """
    rows = x.flatten(0, -2)
    missing = -len(rows) % ALIGNMENT
    if missing:
        rows = F.pad(rows, (0, 0, 0, missing))
    product = apply(_Fp8Product, rows, weight)
    if missing:
        product = product[: len(product) - missing]
    # As F.linear: with a version of its own, so that recomputation may keep a product that a sum
    # over the group, or an adapter's update, is added to in place.
    shaped: Tensor = torch.ops.aten._unsafe_view.default(product, (*x.shape[:-1], len(weight)))
    return shaped


class _Fp8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x8, of_x = _cast(x, FORWARD)
        weight8, of_weight = _cast(weight, FORWARD)
        ctx.save_for_backward(x8, of_x, weight8, of_weight)
        ctx.dtype = x.dtype
        return _product(x8, of_x, weight8.t(), of_weight, x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x8, of_x, weight8, of_weight = ctx.saved_tensors
        gradient8, of_gradient = _cast(gradients[0].contiguous(), BACKWARD)
        of_input = None
        of_map = None
        # A transposed copy's transpose has the contiguous columns that the kernels want.
        if ctx.needs_input_grad[0]:
            factor = weight8.t().contiguous().t()
            of_input = _product(gradient8, of_gradient, factor, of_weight, ctx.dtype)
        if ctx.needs_input_grad[1]:
            columns = gradient8.t().contiguous()
            factor = x8.t().contiguous().t()
            of_map = _product(columns, of_gradient, factor, of_x, ctx.dtype)
        return of_input, of_map


def _cast(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a tensor in fp8 and the fp32 scale that its values are to be multiplied with."""
    largest = torch.finfo(dtype).max
    # At least a little, so that a tensor of zeros is not divided by 0.
    extent = tensor.abs().amax().float().clamp(min=1e-12)
    scale = extent / largest
    # The quotient of the largest value may be rounded up past what fp8 holds.
    scaled = (tensor.float() / scale).clamp(-largest, largest)
    return scaled.to(dtype), scale


def _product(
    left: Tensor, of_left: Tensor, right: Tensor, of_right: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return left @ right; the kernels want rows of `left` and columns of `right` contiguous."""
    product: Tensor = torch._scaled_mm(
        left, right, scale_a=of_left, scale_b=of_right, out_dtype=dtype
    )
    return product
