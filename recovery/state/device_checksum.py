"""`recovery.state.checksum` for tensors on any device: bit for bit the same, computed in place.

XXH3's loop over a block (its specification, "XXH3 Algorithm Details (for long inputs)"): eight
lanes of 64 bits take a stripe of 64 bytes at a time and are scrambled after every 16 stripes. What
a stripe adds does not depend on the lanes, so all stripes of all blocks are multiplied at once;
only the scrambles follow each other, each for all blocks at once. PyTorch's int64 wraps as uint64
does.

The scrambles cost some 800 kernel launches, however many blocks they are for, so the blocks of all
pieces are digested together. If Triton is installed and the pieces are on a CUDA device, one kernel
of `recovery.state.checksum_kernel` replaces those launches.
"""

import importlib
import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from subprocess import SubprocessError

import torch
from torch import Tensor

from recovery.state.checksum import BLOCK_BYTES, checksum, combined

logger = logging.getLogger(__name__)

# XXH3's default secret.
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_MASK_32 = (1 << 32) - 1
_MASK_64 = (1 << 64) - 1
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_LANES = (_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0])
_STRIPES = 16
"""Stripes between two scrambles: (secret's bytes - stripe's bytes) / 8."""
_STRIPE_BYTES = 64
_ROUND_BYTES = _STRIPES * _STRIPE_BYTES
_BATCH_BYTES = 64 << 20
"""Bytes digested at once by torch's kernels; their temporaries take about four times as much."""


def checksums(pieces: Sequence[Tensor]) -> list[int]:
    """Return the checksum of each flat contiguous uint8 tensor.

    On a device it waits for what the current stream has queued. There, whole blocks are digested in
    place; shorter rests come to the host, all of them in one copy.
    """
    if all(piece.device.type == "cpu" for piece in pieces):
        return [checksum(piece.numpy().data) for piece in pieces]
    return on_device(pieces)


def view_checksums(views: Iterable[Tensor]) -> list[int]:
    """Return the checksum of each tensor's content, whatever its shape, strides and type.

    All lie on one device. Views that are not contiguous are copied there, _BATCH_BYTES at a time.
    """
    found: list[int] = []
    pieces: list[Tensor] = []
    copied_bytes = 0
    for view in views:
        piece = view.contiguous()
        if piece.data_ptr() != view.data_ptr():
            copied_bytes += piece.nbytes
        pieces.append(piece.view(-1).view(torch.uint8))
        if copied_bytes >= _BATCH_BYTES:
            found += checksums(pieces)
            pieces = []
            copied_bytes = 0
    return found + checksums(pieces)


def on_device(pieces: Sequence[Tensor]) -> list[int]:
    """Return checksums as `checksums` does, by the device arithmetic wherever the tensors are."""
    if not pieces:
        return []

    digests = block_digests([_whole_blocks(piece) for piece in pieces]).cpu().numpy()
    rest_bytes = _rests(pieces)

    found = []
    block = 0
    at = 0
    for piece in pieces:
        num_blocks, rest = divmod(piece.numel(), BLOCK_BYTES)
        digests_of_piece = array("Q", digests[block : block + num_blocks].tobytes())
        if rest or not num_blocks:
            digests_of_piece.append(checksum(rest_bytes[at : at + rest]))
        found.append(combined(digests_of_piece))
        block += num_blocks
        at += rest
    return found


def _whole_blocks(piece: Tensor) -> Tensor:
    rest = piece.numel() % BLOCK_BYTES
    if not rest:
        return piece
    return piece[: piece.numel() - rest]


def _rests(pieces: Sequence[Tensor]) -> memoryview:
    """Return, on the host, the bytes of all pieces behind their last whole blocks."""
    rests = []
    for piece in pieces:
        rest = piece.numel() % BLOCK_BYTES
        if rest:
            rests.append(piece[piece.numel() - rest :])
    if not rests:
        return memoryview(b"")
    return torch.cat(rests).cpu().numpy().data


def block_digests(pieces: Sequence[Tensor]) -> Tensor:
    """Return the XXH3-64 of each block of flat uint8 tensors of whole blocks, in their order.

    Shape [blocks], int64 bit patterns, on the pieces' device.
    """
    device = pieces[0].device
    if device.type == "cuda":
        by_kernel = _triton_digests(device)
        if by_kernel is not None:
            return by_kernel(pieces)
    return _torch_digests(pieces)


def _torch_digests(pieces: Sequence[Tensor]) -> Tensor:
    # The empty tensor is the result if no piece has a block.
    parts = [torch.empty(0, dtype=torch.int64, device=pieces[0].device)]
    for batch in _batches(pieces):
        parts.append(_digests(_rounds(batch)))
    return torch.cat(parts)


@cache
def _triton_digests(device: torch.device) -> Callable[[Sequence[Tensor]], Tensor] | None:
    """Return the Triton form of `_torch_digests`; None where it cannot be had on this machine.

    Triton may be missing, or lack a C compiler; a kernel that gives other bits is not used either.
    """
    try:
        lanes_by_kernel = importlib.import_module("recovery.state.checksum_kernel").block_lanes
        sample = [torch.arange(BLOCK_BYTES // 8, device=device).view(torch.uint8)]
        found = merge_lanes(lanes_by_kernel(sample, kernel_keys())).tolist()
    except (ImportError, OSError, RuntimeError, SubprocessError) as error:
        logger.info("Checksums on the GPU use PyTorch's kernels; Triton cannot be used: %s", error)
        return None
    if found != _torch_digests(sample).tolist():
        logger.warning("Checksums on the GPU use PyTorch's kernels; Triton gives other bits")
        return None

    def digests(pieces: Sequence[Tensor]) -> Tensor:
        aligned = [_aligned(piece) for piece in pieces]
        lanes = lanes_by_kernel(aligned, kernel_keys())
        return merge_lanes(lanes)

    return digests


def _aligned(piece: Tensor) -> Tensor:
    """Return the piece, or a copy if its memory does not begin at a whole 64-bit word."""
    if piece.data_ptr() % 8:
        return piece.clone()
    return piece


def _batches(pieces: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the pieces' bytes next to each other, at most _BATCH_BYTES at a time.

    Bytes are copied where several pieces meet.
    """
    together: list[Tensor] = []
    room = _BATCH_BYTES
    for piece in pieces:
        start = 0
        while start < piece.numel():
            part = piece[start : start + room]
            together.append(part)
            start += part.numel()
            room -= part.numel()
            if not room:
                yield _joined(together)
                together = []
                room = _BATCH_BYTES
    if together:
        yield _joined(together)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return _aligned(parts[0])
    return torch.cat(list(parts))


def _rounds(data: Tensor) -> Tensor:
    """View whole blocks as [blocks, rounds, stripes, lanes] words."""
    return data.view(torch.int64).view(-1, BLOCK_BYTES // _ROUND_BYTES, _STRIPES, 8)


def _digests(blocks: Tensor) -> Tensor:
    """Digest [blocks, rounds, stripes, lanes] words."""
    device = blocks.device
    num_rounds = blocks.shape[1]
    keys = kernel_keys().to(device)
    stripe_keys = keys[:_STRIPES]
    scramble_key, last_key, start = keys[_STRIPES:]

    added = _added(blocks, stripe_keys)
    # The last stripe is not taken in its turn, but once more, with a key of its own, at the very
    # end.
    last = blocks[:, -1, -1]
    sums = added.sum(dim=2)
    sums[:, -1] -= added[:, -1, -1]

    lanes = start.expand(blocks.shape[0], 8)
    for number in range(num_rounds):
        lanes = lanes + sums[:, number]
        if number < num_rounds - 1:
            mixed = lanes ^ _shifted(lanes, 47)
            lanes = (mixed ^ scramble_key) * _PRIME32[0]
    lanes = lanes + _added(last, last_key)
    return merge_lanes(lanes)


def _added(words: Tensor, keys: Tensor) -> Tensor:
    """Return the addends of stripes [..., lanes] to the lanes.

    Each is the neighbour's word plus the product of the keyed word's halves.
    """
    keyed = words ^ keys
    low = keyed & _MASK_32
    high = _shifted(keyed, 32)
    product = low * high

    pairs = words.view(*words.shape[:-1], 4, 2)
    neighbours = pairs.flip(-1).flatten(-2)
    return product.add_(neighbours)


def kernel_keys() -> Tensor:
    """Return the constants of a block's loop, [_STRIPES + 3, 8] int64 on the host.

    Rows: the key of each stripe of a round, the scrambles' key, the last stripe's key, the lanes'
    first values.
    """
    stripes = [_secret(8 * stripe, 8) for stripe in range(_STRIPES)]
    scramble = _secret(len(_SECRET) - _STRIPE_BYTES, 8)
    last = _secret(len(_SECRET) - _STRIPE_BYTES - 7, 8)
    return torch.stack([*stripes, scramble, last, _constants(_LANES)])


def merge_lanes(lanes: Tensor) -> Tensor:
    """Return the digests [blocks] of [blocks, lanes].

    XXH3's final mix: a 128-bit product of each pair of lanes folded into 64 bits.
    """
    mixed = lanes ^ _secret(11, 8).to(lanes.device)
    start = _constants([BLOCK_BYTES * _PRIME64[0] & _MASK_64]).to(lanes.device)
    products = _folded_product(mixed[:, 0::2], mixed[:, 1::2])
    digest = products.sum(dim=1) + start
    digest = digest ^ _shifted(digest, 37)
    digest = digest * 0x165667919E3779F9
    return digest ^ _shifted(digest, 32)


def _folded_product(left: Tensor, right: Tensor) -> Tensor:
    low_left = left & _MASK_32
    high_left = _shifted(left, 32)
    low_right = right & _MASK_32
    high_right = _shifted(right, 32)
    low = low_left * low_right
    cross = high_left * low_right
    middle = _shifted(low, 32) + (cross & _MASK_32) + low_left * high_right
    upper = _shifted(cross, 32) + _shifted(middle, 32) + high_left * high_right
    return upper ^ (left * right)


def _shifted(words: Tensor, by: int) -> Tensor:
    """Shift logically to the right: int64's own shift repeats the sign."""
    return (words >> by) & ((1 << (64 - by)) - 1)


def _secret(start: int, words: int) -> Tensor:
    part = bytearray(_SECRET[start : start + 8 * words])
    return torch.frombuffer(part, dtype=torch.int64)


def _constants(values: Sequence[int]) -> Tensor:
    """Return unsigned 64-bit values as int64 of the same bits."""
    signed = []
    for value in values:
        is_negative = value >> 63
        signed.append(value - (1 << 64) if is_negative else value)
    return torch.tensor(signed, dtype=torch.int64)
