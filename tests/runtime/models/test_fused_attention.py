"""The Triton kernels of attention: through Triton's interpreter on a CPU, and on a GPU."""

import os
import subprocess
import sys

import pytest
import torch

from autohet.runtime.models.layers import attention as dispatch
from autohet.runtime.models.layers import compilation
from autohet.runtime.models.layers.attention import attention, window_band
from autohet.runtime.models.layers.chunked_attention import ChunkedAttention
from autohet.runtime.models.layers.pieces import cumulative_lengths, piece_mask
from scripts.benchmarks.gpu import attentions
from scripts.benchmarks.gpu.attentions import Case, Drawn

CPU = torch.device("cpu")
INTERPRETED = """
import torch
from autohet.runtime.models.layers import attention
from autohet.runtime.models.layers.chunked_attention import Explicit
from scripts.benchmarks.gpu import attentions
attentions.correct_bf16()
cpu = torch.device("cpu")
attentions.compare(cpu, (16, 64), every=3)
shapes = (1, 4, 77, 16), (1, 2, 77, 16), (1, 2, 77, 16)
for dtype in attention.FUSED:
    attention._check_kernels(cpu, dtype, *shapes, Explicit(5.0, has_sinks=True), 0.1, True)
"""


def test_interpreted_they_give_what_the_library_gives_and_equal_bits() -> None:
    """Outputs, gradients and dropped elements; a run's trial of the kernels passes, too."""
    pytest.importorskip("triton", reason="needs Triton, which PyTorch's CUDA builds bring along")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", INTERPRETED], check=True, timeout=300, env=environment)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_they_give_what_the_library_gives_and_equal_bits() -> None:
    attentions.compare(torch.device("cuda", 0), (16, 256), every=5)


@pytest.mark.parametrize("window", [None, 1, 9, 70])
def test_first_keys_are_those_of_the_masks(window: int | None) -> None:
    """Wrong: pieces of the second row count from the first, or a window leaves its piece."""
    begins = torch.zeros(2, 77, dtype=torch.bool)
    begins[0, [0, 5, 6, 40]] = True
    begins[1, [0, 12]] = True
    query = torch.empty(2, 1, 77, 8)
    found = dispatch._first_keys(cumulative_lengths(begins, CPU), window, query)
    assert found is not None
    assert found.dtype == torch.int32
    mask = piece_mask(begins, window, CPU)[:, 0]
    assert torch.equal(found.long(), mask.int().argmax(-1))
    assert torch.equal(mask.sum(-1), torch.arange(77) - found + 1), "no key is left out"
    if window is not None:
        of_band = dispatch._first_keys(window_band(window, 77, torch.float32, CPU), None, query)
        assert of_band is not None
        wanted = (torch.arange(77) - window + 1).clamp(min=0)
        assert torch.equal(of_band[1].long(), wanted)


def test_without_working_kernels_the_chunks_compute_all_forms(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A compiler's failure costs speed alone, and the job's events name it once."""
    monkeypatch.setattr(compilation, "_FAILURES", [])
    monkeypatch.setattr(dispatch, "FUSED_ATTENTION", "no_such_kernels")
    dispatch._try_kernels.cache_clear()
    kind = ((1, 2, 77, 8),) * 3
    for _ in range(2):
        assert (
            dispatch._try_kernels(CPU, torch.float32, *kind, dispatch.Explicit(), None, False)
            is None
        )
    assert "no_such_kernels" in str(compilation.fallback_reason())
    assert len(caplog.records) == 1
    dispatch._try_kernels.cache_clear()

    drawn = Drawn(Case(2, 4, 2, 40, 16, 16, 0.1, 5.0, pieces=True), torch.float32, CPU)
    begins = torch.zeros(2, 40, dtype=torch.bool)
    begins[:, [0, 11]] = True
    module = torch.nn.Module()
    setattr(module, dispatch.ATTENTION_DROPOUT, drawn.explicit.dropout)
    lengths = cumulative_lengths(begins, CPU)
    found, _ = attention(
        module, *drawn.states, lengths, scaling=drawn.scale, piece_window=7, softcap=5.0
    )
    mask = piece_mask(begins, 7, CPU)
    wanted = ChunkedAttention.apply(*drawn.states, None, mask, drawn.scale, drawn.explicit)
    assert torch.equal(found, wanted)
