"""Faster forms of a stage's blocks, each behind a key of the job and off by default:

`torch.compile`, and a library of fused kernels.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from typing import Any

import torch

from autohet.runtime.models.stage import StageModel

logger = logging.getLogger("autohet.worker")
LIBRARY = "liger_kernel.transformers.monkey_patch"
WANTED = ("rope", "rms_norm", "swiglu")
"""What is taken of the library; the loss stays ours, which sums over ranks of a vocabulary that is
cut.
"""


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
