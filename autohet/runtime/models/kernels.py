"""Faster forms of a stage's blocks, each behind a key of the job: `torch.compile`, on by default on
GPUs, and a library of fused kernels, off by default.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from typing import Any, Literal

import torch

from autohet.runtime.models.compilation import can_compile
from autohet.runtime.models.stage import StageModel

logger = logging.getLogger("autohet.worker")
LIBRARY = "liger_kernel.transformers.monkey_patch"
MIN_COMPILED_PARAMETERS = 1_000_000
"""Of a block, or of the head: smaller ones are tests, which compiling only slows."""
WANTED = ("rope", "rms_norm", "swiglu")
"""What is taken of the library; the loss stays ours, which sums over ranks of a vocabulary that is
cut.
"""


def wants_compiled(wish: bool | Literal["auto"], stage: StageModel) -> bool:
    """Return whether the stage's blocks are to be compiled.

    auto: blocks of MIN_COMPILED_PARAMETERS on a GPU where code can be compiled. Norms, RoPE and
    SwiGLU become fused kernels, and a block is no longer bound by launches. Selective recomputation
    chooses among a block's operators, which compiled code hides.
    """
    if wish != "auto":
        return wish
    if not isinstance(stage, StageModel) or stage.recompute == "selective" or not stage.num_layers:
        return False
    num_parameters = sum(each.numel() for each in stage.blocks[0].parameters())
    return num_parameters >= MIN_COMPILED_PARAMETERS and can_compile(stage.device.type)


def compile_blocks(stage: StageModel) -> bool:
    """Compile each block of the stage, at its first call; True where they are.

    What was compiled is kept by the process, by the block's code and shapes: the next generation's
    stages use it if their microbatches and slices have the same shapes. Blocks of a stage of
    several ranks communicate, so they stay as they are.
    """
    if stage.tp is not None and stage.tp.degree > 1:
        logger.info(
            "training.compile_blocks: blocks of a tensor-parallel stage communicate, and are not"
            " compiled"
        )
        return False
    for block in stage.blocks:
        block.compile(dynamic=False)
    return True


def use_library(model_type: str, device: torch.device) -> str | None:
    """Let the model's own classes take the library's RMSNorm, RoPE and SwiGLU, for all stages that
    are built from now on. Idempotent.

    Returns why nothing was changed, in a sentence; None where it was.
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
    apply(**{name: name in WANTED for name in known if known[name].annotation in (bool, "bool")})
    return None
