"""The loop of `recovery.state.device_checksum` over blocks as one Triton kernel, bit for bit alike.

Import it only where Triton is installed; PyTorch's CUDA builds for Linux bring it along.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from recovery.state.checksum import BLOCK_BYTES

_BLOCKS_PER_PROGRAM = 1
_WARPS = 1
"""A warp reads a round (1 KiB) at a time; its sums then need no barrier between warps."""


def block_lanes(pieces: Sequence[Tensor], keys: Tensor) -> Tensor:
    """Return the eight lanes of each block before the final mix, [blocks, 8] int64.

    pieces: flat uint8 tensors of whole blocks, each at a multiple of 8 bytes; read in place.
    keys: `device_checksum.kernel_keys()`.
    """
    device = pieces[0].device
    addresses = []
    for piece in pieces:
        start = piece.data_ptr()
        end = start + piece.numel()
        addresses.append(np.arange(start, end, BLOCK_BYTES, dtype=np.int64))
    table = torch.from_numpy(np.concatenate(addresses)).to(device)

    num_blocks = len(table)
    lanes = torch.empty(num_blocks, 8, dtype=torch.int64, device=device)
    if num_blocks:
        grid = (triton.cdiv(num_blocks, _BLOCKS_PER_PROGRAM),)
        _lanes_of_blocks[grid](
            table,
            keys.to(device),
            lanes,
            num_blocks,
            WORDS=BLOCK_BYTES // 8,
            BLOCKS=_BLOCKS_PER_PROGRAM,
            num_warps=_WARPS,
        )
    return lanes


@triton.jit
def _added(words, neighbours, keys):  # type: ignore[no-untyped-def]
    """Return the stripes' addends to the lanes.

    Each is the neighbour's word plus the product of the keyed word's halves.
    """
    keyed = words ^ keys
    return (keyed & 0xFFFFFFFF) * (keyed >> 32) + neighbours


@triton.jit  # type: ignore[untyped-decorator]
def _lanes_of_blocks(  # type: ignore[no-untyped-def]
    addresses, keys, lanes_out, num_blocks, WORDS: tl.constexpr, BLOCKS: tl.constexpr
):
    """Digest BLOCKS blocks of WORDS 64-bit words; a round is 16 stripes of 8 lanes."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    exists = block < num_blocks
    lane = tl.arange(0, 8)
    stripe = tl.arange(0, 16)
    base = tl.load(addresses + block, mask=exists, other=0).to(tl.pointer_type(tl.uint64))
    key_words = keys.to(tl.pointer_type(tl.uint64))
    stripe_keys = tl.load(key_words + stripe[:, None] * 8 + lane[None, :])[None, :, :]
    scramble_key = tl.load(key_words + 16 * 8 + lane)[None, :]
    last_key = tl.load(key_words + 17 * 8 + lane)[None, :]
    first = tl.load(key_words + 18 * 8 + lane)[None, :]
    lanes = first + tl.zeros([BLOCKS, 8], dtype=tl.uint64)

    inside = stripe[None, :, None] * 8 + lane[None, None, :]
    swapped = stripe[None, :, None] * 8 + (lane ^ 1)[None, None, :]
    there = exists[:, None, None] & (inside >= 0)
    start = base[:, None, None]
    for number in range(0, WORDS // 128 - 1):
        words = tl.load(start + number * 128 + inside, mask=there, other=0)
        neighbours = tl.load(start + number * 128 + swapped, mask=there, other=0)
        lanes += tl.sum(_added(words, neighbours, stripe_keys), axis=1)
        lanes = ((lanes ^ (lanes >> 47)) ^ scramble_key) * 0x9E3779B1

    # The last stripe is left out of the last round, and taken at the end with a key of its own.
    there = there & (stripe[None, :, None] < 15)
    words = tl.load(start + (WORDS - 128) + inside, mask=there, other=0)
    neighbours = tl.load(start + (WORDS - 128) + swapped, mask=there, other=0)
    added = tl.where(there, _added(words, neighbours, stripe_keys), 0)
    lanes += tl.sum(added, axis=1)
    last = base[:, None] + (WORDS - 8)
    has = exists[:, None] & (lane[None, :] >= 0)
    words = tl.load(last + lane[None, :], mask=has, other=0)
    neighbours = tl.load(last + (lane ^ 1)[None, :], mask=has, other=0)
    lanes += _added(words, neighbours, last_key)
    target = lanes_out.to(tl.pointer_type(tl.uint64)) + block[:, None] * 8 + lane[None, :]
    tl.store(target, lanes, mask=has)
