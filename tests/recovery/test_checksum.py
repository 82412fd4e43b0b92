"""What the checksum of shards must see: every flipped bit, every torn or misplaced block, whatever the length."""

from __future__ import annotations

import random

import pytest

from recovery.state.checksum import BLOCK_BYTES, checksum


def data_of(length: int, seed: int = 1) -> bytearray:
    return bytearray(random.Random(seed).randbytes(length))


@pytest.mark.parametrize("length", [0, 1, 7, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 13])
def test_each_bit_counts(length: int) -> None:
    data = data_of(length)
    before = checksum(memoryview(data))
    assert before == checksum(memoryview(bytes(data)))
    places = {0, length - 1, *random.Random(2).sample(range(length), min(200, length))} if length else set()
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
