"""Compiled code of this process: a check for a working compiler, its limit, and its failures."""

import logging
import sys
from functools import cache

import torch
from torch import Tensor

from autohet.runtime.models.error_text import first_line

logger = logging.getLogger("autohet.worker")
MAX_VARIANTS = 256
"""Limit on the compiled variants of one function in a process, the most that dynamo allows in all.

Variants differ in shapes, grad mode and kind of block. An elastic run meets many sizes of
microbatches, and dynamo's own limit of 8 would leave the later ones uncompiled.
"""
LIMIT_REACHED = "Dynamo recompile limit exceeded"
_FAILURES: list[str] = []
"""Why compilers fail in this process; empty if they do not, or have not been tried."""


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
        report_failure(f"Nothing is compiled, since torch.compile fails here: {first_line(error)}")
        return False
    return True


def report_failure(reason: str) -> None:
    """Log why code for GPUs cannot be used in this process, and keep it for the job's events."""
    logger.warning("%s", reason)
    _FAILURES.append(reason)


def fallback_reason() -> str | None:
    """Return why code that was to be compiled runs uncompiled in this process; None: none does."""
    if _FAILURES:
        return _FAILURES[0]
    if not reached_limit():
        return None
    return (
        f"Further shapes run uncompiled, since a function has {MAX_VARIANTS} compiled variants"
        " in this worker's process; use fewer sizes of microbatches, or restart the run"
    )


def reached_limit() -> bool:
    """Return True if some function has MAX_VARIANTS, so that other shapes of it run uncompiled."""
    # Nothing was compiled in a process that has not imported it, and the import takes a second.
    dynamo = sys.modules.get("torch._dynamo.utils")
    found = [] if dynamo is None else list(dynamo.counters["unimplemented"])
    return any(each.startswith(LIMIT_REACHED) for each in found)


def _trial(x: Tensor) -> Tensor:
    activated = torch.nn.functional.silu(x @ x)
    return activated.square().sum()
