"""Matrix products of integers whose bits are known on every device.

Each partial sum of the fp32 products is an integer below 2**24, and each of the 16-bit products one
below 2**8, so no order of the sums and no width of an accumulator rounds. The results are
constants of this module.
"""

import torch
from torch import Tensor

from autohet.runtime.models.layers.dropout import column_keys, hashed_values, row_keys
from planner.errors import ConfigError
from recovery.state.device_checksum import view_checksums

SIZE = 256
WIDE = 0xD023782D48312D8F
"""Checksum of the products of integers of 8 bits."""
NARROW = 0x366E9449D71A6962
"""Checksum of the products of -1, 0 and 1."""


class FaultyDevice(ConfigError):
    """A device computes wrongly."""


def has_exact_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return False if the device computes a product of integers to other bits than the known ones.

    The products are in fp32 and in `dtype`. On a GPU each multiprocessor gets some of the work.
    """
    repeats = 1
    if device.type == "cuda":
        repeats = torch.cuda.get_device_properties(device).multi_processor_count
    for each in (torch.float32, dtype):
        expected = WIDE if each is torch.float32 else NARROW
        if product_checksums(device, each, repeats) != {expected}:
            return False
    return True


def check_products(device: torch.device, dtype: torch.dtype) -> None:
    """Raise FaultyDevice unless the device has the exact products."""
    if not has_exact_products(device, dtype):
        raise FaultyDevice(
            f"its device ({device}) computes products of integers to wrong bits; replace the node"
        )


def product_checksums(device: torch.device, dtype: torch.dtype, repeats: int) -> set[int]:
    """Return the checksums of `repeats` runs of the products in one format, as fp32 numbers.

    They are of the three kinds of a linear map's passes: a b, a b^T and a^T b.
    """
    factors = [_integers(name, device, dtype) for name in ("a", "b")]
    left, right = (each.expand(repeats, SIZE, SIZE).contiguous() for each in factors)
    products = torch.stack(
        [
            torch.bmm(left, right),
            torch.bmm(left, right.transpose(1, 2)),
            torch.bmm(left.transpose(1, 2), right),
        ],
        dim=1,
    )
    return set(view_checksums(products.float().unbind()))


def _integers(name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return integers [SIZE, SIZE]: from -128 to 127 in fp32, from -1 to 1 in other formats."""
    rows = row_keys(0, [0], SIZE, device)
    drawn = hashed_values(rows, column_keys(name, torch.arange(SIZE, device=device)))[0] * 128
    if dtype is not torch.float32:
        drawn = (drawn / 65).trunc()
    return drawn.to(dtype)
