"""Typed call of autograd functions, which torch declares without types."""

from typing import Any

from torch import Tensor


def apply(function: Any, *arguments: Any) -> Tensor:
    """Apply a `torch.autograd.Function` that returns one tensor."""
    result: Tensor = function.apply(*arguments)
    return result
