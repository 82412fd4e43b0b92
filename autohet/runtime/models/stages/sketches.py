"""Sketches: a few numbers of a block's result by which unlike devices are compared.

Unlike devices round otherwise, so that their bits differ. Sums of a tensor's elements with random
signs tell how far two results lie apart: for tensors x and y the square of the difference of such a
sum has the expectation |x - y|^2 (Alon, Matias and Szegedy 1999), wherever the difference is. The
sign of an element is the product of its row's and its column's, so that a sum is a vector-matrix
product.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from autohet.runtime.models.layers.dropout import column_keys

NUM_SUMS = 8
NUM_VALUES = NUM_SUMS + 1
"""Numbers of a sketch: signed sums, and the sum of the logarithms of the tensors' norms."""
CHUNK_ELEMENTS = 1 << 22
"""Limit on the elements that are converted to fp32 at a time."""
CEILINGS = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 3e-2}
"""Largest distances of sound results by format of the products.

Seen on CPUs of three instruction sets: 4e-7 in fp32; to fp32, 1e-3 in fp16 and 9e-3 in bf16.
"""
TF32_CEILING = 5e-3


def ceiling(compute: str) -> float:
    """Return the largest distance of sound results in a format; 0: results cannot be compared."""
    if compute == "fp32" and torch.get_float32_matmul_precision() != "highest":
        return TF32_CEILING
    return CEILINGS.get(compute, 0.0)


def sketch(tensors: Sequence[Tensor]) -> tuple[float, ...]:
    """Return NUM_VALUES numbers of tensors on one device, each divided by its norm."""
    device = tensors[0].device
    total = torch.zeros(NUM_VALUES, dtype=torch.float64, device=device)
    for place, tensor in enumerate(tensors):
        columns = tensor.shape[-1]
        values = tensor.detach().reshape(-1, columns)
        row_signs = _signs(f"rows of tensor {place}", len(values), device)
        sums = torch.zeros(NUM_SUMS, columns, device=device)
        squares = torch.zeros((), dtype=torch.float64, device=device)
        num_rows = max(1, CHUNK_ELEMENTS // columns)
        chunks = zip(values.split(num_rows), row_signs.split(num_rows, dim=1), strict=True)
        for chunk, signs in chunks:
            exact = chunk.float()
            sums += signs @ exact
            squares += exact.square().sum(dtype=torch.float64)
        sums *= _signs(f"columns of tensor {place}", columns, device)
        # A tensor of zeros says nothing.
        norm = squares.sqrt().clamp(min=torch.finfo(torch.float32).tiny)
        total[:NUM_SUMS] += sums.sum(dim=1, dtype=torch.float64) / norm
        total[NUM_SUMS] += norm.log()
    total /= math.sqrt(len(tensors))
    return tuple(total.tolist())


@cache
def _signs(name: str, count: int, device: torch.device) -> Tensor:
    """Return 1 and -1, fp32 [NUM_SUMS, count]; the shapes of a model's blocks are few."""
    numbers = torch.arange(NUM_SUMS * count, device=device)
    bits = column_keys(f"sketch: {name}", numbers) & 1
    return (1 - 2 * bits).float().view(NUM_SUMS, count)


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return about the root mean square, over the tensors, of their relative differences."""
    differences = [mine - its for mine, its in zip(one, other, strict=True)]
    mean_square = sum(each**2 for each in differences[:NUM_SUMS]) / NUM_SUMS
    return max(math.sqrt(mean_square), abs(differences[NUM_SUMS]))


def find_far(
    sketches: Mapping[str, Sequence[float]], ceilings: Mapping[str, float]
) -> tuple[bool, tuple[str, ...]]:
    """Return whether any two workers lie apart, and which workers are wrong.

    Two lie apart if their distance is above both their ceilings. A worker is named if it lies apart
    from all others, which are two or more and near each other.
    """
    far: set[frozenset[str]] = set()
    for one, other in itertools.combinations(sketches, 2):
        if distance(sketches[one], sketches[other]) > max(ceilings[one], ceilings[other]):
            far.add(frozenset((one, other)))
    named = []
    for worker in sketches:
        from_it = {pair for pair in far if worker in pair}
        is_alone = len(from_it) == len(sketches) - 1 >= 2
        if is_alone and from_it == far:
            named.append(worker)
    return bool(far), tuple(named)
