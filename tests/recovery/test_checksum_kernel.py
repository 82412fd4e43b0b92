"""The Triton kernel of checksums: through Triton's interpreter on a CPU, and itself on a GPU."""

import os
import subprocess
import sys

import pytest
import torch

from recovery.state.checksum import BLOCK_BYTES, checksum
from recovery.state.device_checksum import checksums

INTERPRETED = """
import torch
from recovery.state import checksum_kernel, device_checksum
torch.manual_seed(0)
sizes = [device_checksum.BLOCK_BYTES * blocks for blocks in (1, 3, 0, 2)]
pieces = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
pieces.append(torch.full((device_checksum.BLOCK_BYTES,), 255, dtype=torch.uint8))
lanes = checksum_kernel.block_lanes(pieces, device_checksum.kernel_keys())
assert torch.equal(device_checksum.merge_lanes(lanes), device_checksum.block_digests(pieces))
"""


def test_interpreted_it_gives_the_bits_of_pytorchs_operations() -> None:
    pytest.importorskip("triton", reason="needs Triton, which PyTorch's CUDA builds bring along")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", INTERPRETED]
    subprocess.run(command, check=True, timeout=120, env=environment)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_checksums_on_a_gpu_are_those_of_the_host() -> None:
    """Many pieces, whole blocks at unaligned places and rests of blocks among them."""
    generator = torch.Generator().manual_seed(1)
    sizes = [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 13, 1 << 26]
    whole = torch.randint(0, 256, (max(sizes) + 16,), dtype=torch.uint8, generator=generator)
    on_host = [whole[start : start + size] for size in sizes for start in (0, 1, 8)]
    on_gpu = [piece.to("cuda") for piece in on_host]
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), whole]).to("cuda")
    on_gpu += [shifted[1 : size + 1] for size in sizes]
    on_host += [whole[:size] for size in sizes]
    expected = [checksum(piece.contiguous().numpy().data) for piece in on_host]
    assert checksums(on_gpu) == expected
