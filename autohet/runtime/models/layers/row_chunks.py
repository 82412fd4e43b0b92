"""Rows of a matrix, some at a time, where all at once would take too much memory."""

import torch
from torch import Tensor


def row_chunks(matrix: Tensor, elements: int) -> list[slice]:
    """Return slices of the matrix's rows of at most `elements` elements; none without columns.

    A row that is wider is a slice of its own.
    """
    count, width = matrix.shape
    if not width:
        return []
    size = max(1, elements // width)
    return [slice(first, first + size) for first in range(0, count, size)]


def wide_zeros(tensor: Tensor) -> Tensor:
    """Return zeros of the tensor's shape in fp32 or wider, to which parts of it are added."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return torch.zeros_like(tensor, dtype=wide)
