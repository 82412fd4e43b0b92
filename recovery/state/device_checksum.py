"""`recovery.state.checksum` of tensors on any device: bit for bit the same, computed where the
bytes lie.

XXH3's loop over a block (its specification, "XXH3 Algorithm Details (for long inputs)"): eight
lanes of 64 bits take a stripe of 64 bytes at a time and are scrambled after every 16 stripes. What
a stripe adds does not depend on the lanes, so all stripes of all blocks are multiplied at once;
only the scrambles follow each other, each for all blocks at once. PyTorch's int64 wraps as uint64
does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recovery.state.checksum import BLOCK_BYTES, checksum, combined

# XXH3's default secret.
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_MASK_32, _MASK_64 = (1 << 32) - 1, (1 << 64) - 1
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_LANES = (_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0])
_STRIPES = 16  # (secret - stripe) / 8 of them lie between two scrambles
_STRIPE_BYTES = 64
_ROUND_BYTES = _STRIPES * _STRIPE_BYTES
_BATCH_BYTES = 64 << 20  # temporaries of about four times as much


def checksums(pieces: Sequence[Tensor]) -> list[int]:
    """The checksum of each flat contiguous uint8 tensor. On a device it waits for what the current
    stream has queued.

    There, whole blocks are digested in place; what is shorter comes to the host, all of it in one
    copy.
    """
    if all(piece.device.type == "cpu" for piece in pieces):
        return [checksum(piece.numpy().data) for piece in pieces]
    return on_device(pieces)


def on_device(pieces: Sequence[Tensor]) -> list[int]:
    """As `checksums`, by the arithmetic for devices wherever the tensors are."""
    whole = [piece.numel() // BLOCK_BYTES * BLOCK_BYTES for piece in pieces]
    parts = [block_digests(piece[:end]) for piece, end in zip(pieces, whole, strict=True)]
    digests = iter(torch.cat(parts).tolist())
    rest = (
        torch.cat([piece[end:] for piece, end in zip(pieces, whole, strict=True)])
        .cpu()
        .numpy()
        .data
    )
    found, at = [], 0
    for piece, end in zip(pieces, whole, strict=True):
        of_piece = [next(digests) & _MASK_64 for _ in range(end // BLOCK_BYTES)]
        left = piece.numel() - end
        if left or not of_piece:
            of_piece.append(checksum(rest[at : at + left]))
        at += left
        found.append(combined(of_piece))
    return found


def block_digests(data: Tensor) -> Tensor:
    """XXH3-64 of each block of a flat uint8 tensor of whole blocks: int64 bit patterns [blocks], on
    its device.
    """
    if not data.numel():
        return torch.empty(0, dtype=torch.int64, device=data.device)
    if data.storage_offset() % 8:
        data = data.clone()
    blocks = data.view(torch.int64).view(-1, BLOCK_BYTES // _ROUND_BYTES, _STRIPES, 8)
    return torch.cat([_digests(part) for part in torch.split(blocks, _BATCH_BYTES // BLOCK_BYTES)])


def _digests(blocks: Tensor) -> Tensor:
    """Of [blocks, rounds, stripes, lanes] words."""
    device, num_rounds = blocks.device, blocks.shape[1]
    keys = torch.stack([_secret(8 * stripe, 8) for stripe in range(_STRIPES)]).to(device)
    added = _added(blocks, keys)
    # The last stripe is not taken in its turn, but once more, with a key of its own, at the very
    # end.
    last = blocks[:, -1, -1]
    sums = added.sum(dim=2)
    sums[:, -1] -= added[:, -1, -1]
    scramble_key = _secret(len(_SECRET) - _STRIPE_BYTES, 8).to(device)
    lanes = _constants(_LANES).to(device).expand(blocks.shape[0], 8)
    for number in range(num_rounds):
        lanes = lanes + sums[:, number]
        if number < num_rounds - 1:
            lanes = ((lanes ^ _shifted(lanes, 47)) ^ scramble_key) * _PRIME32[0]
    lanes = lanes + _added(last, _secret(len(_SECRET) - _STRIPE_BYTES - 7, 8).to(device))
    return _merged(lanes)


def _added(words: Tensor, keys: Tensor) -> Tensor:
    """What stripes [..., lanes] add to the lanes: the neighbour's word, and the product of the
    keyed word's halves.
    """
    keyed = words ^ keys
    product = (keyed & _MASK_32) * _shifted(keyed, 32)
    return product.add_(words.view(*words.shape[:-1], 4, 2).flip(-1).flatten(-2))


def _merged(lanes: Tensor) -> Tensor:
    """Of [blocks, lanes]:

    XXH3's final mix, a 128-bit product of each pair of lanes folded into 64 bits.
    """
    mixed = lanes ^ _secret(11, 8).to(lanes.device)
    start = _constants([BLOCK_BYTES * _PRIME64[0] & _MASK_64]).to(lanes.device)
    digest = _folded_product(mixed[:, 0::2], mixed[:, 1::2]).sum(dim=1) + start
    digest = digest ^ _shifted(digest, 37)
    digest = digest * 0x165667919E3779F9
    return digest ^ _shifted(digest, 32)


def _folded_product(left: Tensor, right: Tensor) -> Tensor:
    low_left, high_left = left & _MASK_32, _shifted(left, 32)
    low_right, high_right = right & _MASK_32, _shifted(right, 32)
    low, cross = low_left * low_right, high_left * low_right
    middle = _shifted(low, 32) + (cross & _MASK_32) + low_left * high_right
    upper = _shifted(cross, 32) + _shifted(middle, 32) + high_left * high_right
    return upper ^ (left * right)


def _shifted(words: Tensor, by: int) -> Tensor:
    """The logical shift to the right: int64's own repeats the sign."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _secret(start: int, words: int) -> Tensor:
    return torch.frombuffer(bytearray(_SECRET[start : start + 8 * words]), dtype=torch.int64)


def _constants(values: Sequence[int]) -> Tensor:
    return torch.tensor(
        [value - (1 << 64) if value >> 63 else value for value in values], dtype=torch.int64
    )
