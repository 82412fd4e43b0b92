"""What the checksum of shards must see: every flipped bit, every torn or misplaced block, whatever
the length.
"""

import random
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recovery.state import device_checksum
from recovery.state.checksum import BLOCK_BYTES, RunningChecksum, checksum
from recovery.state.device_checksum import checksums, on_device

LENGTHS = [0, 1, 7, 240, 1024, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 13]


def data_of(length: int, seed: int = 1) -> bytearray:
    return bytearray(random.Random(seed).randbytes(length))


@pytest.mark.parametrize("length", LENGTHS)
def test_each_bit_counts(length: int) -> None:
    data = data_of(length)
    before = checksum(memoryview(data))
    assert before == checksum(memoryview(bytes(data)))
    places = (
        {0, length - 1, *random.Random(2).sample(range(length), min(200, length))}
        if length
        else set()
    )
    for place in places:
        for bit in range(8):
            data[place] ^= 1 << bit
            assert checksum(memoryview(data)) != before
            data[place] ^= 1 << bit


def test_torn_zeroed_and_exchanged_blocks_are_seen() -> None:
    old, new = data_of(4 * BLOCK_BYTES, 1), data_of(4 * BLOCK_BYTES, 2)
    before = checksum(memoryview(new))
    for cut in (8, 4096, BLOCK_BYTES, 3 * BLOCK_BYTES + 64):
        assert checksum(memoryview(new[:cut] + old[cut:])) != before
    first, second = new[:BLOCK_BYTES], new[BLOCK_BYTES : 2 * BLOCK_BYTES]
    assert checksum(memoryview(second + first + new[2 * BLOCK_BYTES :])) != before
    assert checksum(memoryview(bytes(4096) + new[4096:])) != before
    assert checksum(memoryview(new[: 3 * BLOCK_BYTES])) != before


def test_it_depends_on_the_content_alone_and_not_on_its_place() -> None:
    padded = bytearray(3) + data_of(2 * BLOCK_BYTES + 5)
    assert checksum(memoryview(padded)[3:]) == checksum(memoryview(bytes(padded[3:])))


def test_flips_that_cancel_in_a_sum_are_seen() -> None:
    """The sign bits of two 64-bit words of one block of 64 KiB; of every second fp32; of all."""
    state = torch.randn(1 << 16)
    before = state.clone().view(torch.uint8).numpy().data
    for flipped in (slice(1, 4, 2), slice(1, None, 2), slice(None)):
        after = state.clone()
        after[flipped] *= -1
        for sums in (checksums, on_device):
            assert sums([after.view(torch.uint8)]) != [checksum(before)]


def test_devices_compute_the_same_as_the_host() -> None:
    """All lengths in one call, whole blocks at unaligned places among them, and bytes of one
    value.
    """
    pieces = [
        torch.frombuffer(data_of(length, length), dtype=torch.uint8) for length in LENGTHS if length
    ]
    pieces += [
        torch.empty(0, dtype=torch.uint8),
        torch.full((2 * BLOCK_BYTES,), 255, dtype=torch.uint8),
    ]
    pieces += [
        torch.frombuffer(data_of(2 * BLOCK_BYTES + 8), dtype=torch.uint8)[at:] for at in (1, 4, 8)
    ]
    assert (
        on_device(pieces) == checksums(pieces) == [checksum(piece.numpy().data) for piece in pieces]
    )
    for piece in pieces:
        assert on_device([piece]) == checksums([piece])


def test_the_number_of_launches_does_not_grow_with_the_number_of_pieces() -> None:
    """2.2 million launches for 0.27 billion parameters is what a batch a piece costs."""

    class Launches(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.number += not func.is_view
            return func(*args, **(kwargs or {}))

    def launches(num_pieces: int) -> int:
        pieces = [
            torch.frombuffer(data_of(2 * BLOCK_BYTES, seed), dtype=torch.uint8)
            for seed in range(num_pieces)
        ]
        with Launches() as counted:
            on_device(pieces)
        return counted.number

    assert launches(40) == launches(2)


def test_batches_of_blocks_join_and_split_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_checksum, "_BATCH_BYTES", 2 * BLOCK_BYTES)
    lengths = [BLOCK_BYTES, 5 * BLOCK_BYTES, 0, 2 * BLOCK_BYTES + 3, BLOCK_BYTES]
    pieces = [torch.frombuffer(data_of(n + 1, n), dtype=torch.uint8)[:n] for n in lengths]
    assert on_device(pieces) == [checksum(piece.numpy().data) for piece in pieces]


def test_piece_by_piece_it_is_the_same() -> None:
    data = memoryview(data_of(5 * BLOCK_BYTES + 9))
    for cuts in ([], [BLOCK_BYTES], [3 * BLOCK_BYTES, 5 * BLOCK_BYTES]):
        running = RunningChecksum()
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            running.update(data[start:end])
        assert running.value() == checksum(data)
