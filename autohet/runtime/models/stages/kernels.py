"""Faster forms of a stage's blocks, each enabled by a key of the job.

`torch.compile` is on by default on GPUs; a library of fused kernels is off by default. Measured on
an H200 with 1 billion parameters: 0.78 s a step compiled, 1.07 s eager.
"""

import importlib
import inspect
from typing import Any, Literal

import torch

from autohet.runtime.models.layers.compilation import MAX_VARIANTS, can_compile
from autohet.runtime.models.registry import FAMILIES
from autohet.runtime.models.stages.stage import StageModel
from planner.cost.parameters import MIN_COMPILED_PARAMETERS

LIBRARY = "liger_kernel.transformers.monkey_patch"
WANTED = ("rope", "rms_norm", "swiglu")
"""Kernels to use from the library, without its loss.

The loss is this project's own, which sums over the ranks of a cut vocabulary.
"""


def wants_compiled(wish: bool | Literal["auto"], stage: StageModel) -> bool:
    """Return True if the stage's blocks should be compiled; never with dropout.

    Dropout draws its bits outside of compiled code.

    auto: compile blocks of MIN_COMPILED_PARAMETERS on a GPU where code can be compiled. Norms, RoPE
    and SwiGLU become fused kernels, and a block is no longer bound by launches. Not with selective
    recomputation, which chooses among a block's operators: compiled code hides them. Not with
    experts, whose compiled products no GPU has run yet.
    """
    if stage.dropout.drops:
        return False
    if wish != "auto":
        return wish
    # A family may bring stages of its own, of which nothing is known.
    if not isinstance(stage, StageModel) or not stage.blocks:
        return False
    if stage.recompute == "selective" or stage.spec.family.has_experts:
        return False
    num_parameters = sum(each.numel() for each in stage.blocks[0].parameters())
    return num_parameters >= MIN_COMPILED_PARAMETERS and can_compile(stage.spec.device.type)


def compile_blocks(stage: StageModel) -> None:
    """Set each block of the stage to be compiled at its first call.

    The process keeps compiled code by the block's code and shapes, up to MAX_VARIANTS. Stages of
    later generations use it if their microbatches and slices have the same shapes. Attention and
    what a tensor-parallel block communicates run between its compiled parts.
    """
    for block in stage.blocks:
        block.compile(dynamic=False, recompile_limit=MAX_VARIANTS)


def use_library(model_type: str, device: torch.device) -> str | None:
    """Replace RMSNorm, RoPE and SwiGLU of the model's classes by the library's; idempotent.

    Affects all stages that are built afterwards. Returns the reason as a sentence if nothing was
    changed, else None.
    """
    if device.type != "cuda":
        return (
            f"training.kernels is liger, whose kernels are for GPUs; on {device.type} PyTorch's own"
            " are used"
        )
    try:
        appliers = importlib.import_module(LIBRARY).MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        return (
            f"training.kernels is liger, which this machine lacks ({error}); pip install"
            " liger-kernel, or PyTorch's own are used"
        )
    apply: Any = appliers.get(model_type)
    if apply is None:
        return f"training.kernels is liger, which knows no {model_type}; PyTorch's own are used"
    known = inspect.signature(apply).parameters
    # Its SwiGLU replaces whole experts, and knows no ranks that hold some of them.
    has_experts = getattr(FAMILIES.get(model_type), "has_experts", False)
    wanted = {name for name in WANTED if name != "swiglu" or not has_experts}
    # Each kernel has a switch. Some are on by default, so those that are not wanted are set to off.
    switches: dict[str, bool] = {}
    for name, parameter in known.items():
        if parameter.annotation in (bool, "bool"):
            switches[name] = name in wanted
    apply(**switches)
    return None
