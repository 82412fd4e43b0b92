"""Check for a working torch.compile on this machine, once per process."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor

from autohet.runtime.models.error_text import first_line

logger = logging.getLogger("autohet.worker")


@cache
def can_compile(device_type: str) -> bool:
    """Return True if code can be compiled for GPUs here, which needs Triton and a C compiler.

    Always False for a CPU: compiled code is no faster there than the libraries that are called.
    """
    if device_type != "cuda":
        return False
    sample = torch.ones(64, 64, device=device_type, requires_grad=True)
    try:
        torch.compile(_trial)(sample).backward()
    except Exception as error:  # noqa: BLE001 - a compiler's failures have no common type
        reason = first_line(error)
        logger.warning("Nothing is compiled, since torch.compile fails here: %s", reason)
        return False
    return True


def _trial(x: Tensor) -> Tensor:
    activated = torch.nn.functional.silu(x @ x)
    return activated.square().sum()
