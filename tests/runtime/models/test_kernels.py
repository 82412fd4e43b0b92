"""Faster blocks compute what plain ones do, and a library that is absent is said to be."""

import logging
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

from autohet.runtime.models.layers import compilation
from autohet.runtime.models.layers.tensor_parallel import TensorParallel
from autohet.runtime.models.stages import kernels
from autohet.runtime.models.stages.kernels import (
    LIBRARY,
    compile_blocks,
    use_library,
    wants_compiled,
)
from autohet.runtime.models.stages.stage import build_stage
from autohet.runtime.profiling.device_profile import ProfileRequest, measure_layers
from planner.errors import ConfigError
from tests.harness.tiny_models import tiny_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def stage_of(seed: int = 0):
    torch.manual_seed(seed)
    config = tiny_config("llama")
    stage = build_stage(config, range(2), None, CPU, torch.float32)
    stage.weights.load(
        {
            name: 0.05 * torch.randn(spec.shape)
            for name, spec in stage.spec.parameters.items()
            if name in stage.weights.places()
        }
    )
    return stage, torch.randint(int(config.vocab_size), (2, 8))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch):
    """Graphs that blocks were compiled to, by a back end that runs them as they are."""
    torch._dynamo.reset()
    counters.clear()
    found = []

    def back_end(graph, inputs):
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda self, **keys: setattr(
            self, "_compiled_call_impl", torch.compile(self._call_impl, backend=back_end, **keys)
        ),
    )
    yield found
    torch._dynamo.reset()
    counters.clear()


def test_compiled_blocks_compute_the_same_and_are_kept_for_the_next_stage(graphs: list) -> None:
    """What is asked here is what is compiled, and how often."""
    stage, tokens = stage_of()
    wanted = stage(tokens)
    assert compile_blocks(stage)
    torch.testing.assert_close(stage(tokens), wanted)
    first = len(graphs)
    assert first
    following, _ = stage_of(1)
    compile_blocks(following)
    following(tokens)
    assert len(graphs) == first


class Block(torch.nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.relu()


def run_generation(size: int) -> None:
    """Train and evaluate with a new stage, which is gone afterwards."""
    stage = SimpleNamespace(blocks=[Block(), Block()], spec=SimpleNamespace(tp_degree=1))
    assert compile_blocks(stage)
    hidden = torch.ones(size, requires_grad=True)
    for block in stage.blocks:
        block(hidden).sum().backward()
        with torch.no_grad():
            block(hidden)


def test_every_size_of_an_elastic_run_is_compiled_once(graphs: list) -> None:
    """With dynamo's own limit of 8 variants, the fifth size runs uncompiled."""
    for size in range(1, 13):
        run_generation(size)
        assert len(graphs) == 2 * size
    for size in (1, 6, 12):
        run_generation(size)
    assert len(graphs) == 24
    assert compilation.fallback_reason() is None


def test_shapes_beyond_the_limit_are_said_to_run_uncompiled(
    graphs: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run goes on; a profile would take their times for compiled ones."""
    monkeypatch.setattr(kernels, "MAX_VARIANTS", 3)
    run_generation(1)
    assert compilation.fallback_reason() is None
    run_generation(2)
    assert len(graphs) == 3
    assert "run uncompiled" in str(compilation.fallback_reason())
    config = tiny_config("llama")
    request = ProfileRequest("m", config, "fp32", 8, (3,), "cpu", "CPU", repeats=1)
    with pytest.raises(ConfigError, match="3 sequences ran uncompiled"):
        list(measure_layers(request))


def test_blocks_that_communicate_are_left_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "autohet.worker")
    stage, _ = stage_of()
    stage.spec = replace(stage.spec, tp=TensorParallel.even(None, 0, 2))
    assert not compile_blocks(stage)
    assert "communicate" in caplog.text


def test_an_absent_library_is_said_to_be_and_a_present_one_asked_for_what_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "for GPUs" in str(use_library("llama", CPU))
    monkeypatch.setitem(sys.modules, LIBRARY, None)
    assert "pip install liger-kernel" in str(use_library("llama", CUDA))
    asked = {}

    def apply(
        rope: bool = True,
        cross_entropy: bool = False,
        fused_linear_cross_entropy: bool = True,
        rms_norm: bool = True,
        swiglu: bool = False,
        model=None,
    ):
        asked.update(
            swiglu=swiglu,
            rope=rope,
            cross=cross_entropy,
            fused=fused_linear_cross_entropy,
            norm=rms_norm,
            model=model,
        )

    library = ModuleType(LIBRARY)
    library.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply, "mixtral": apply}
    monkeypatch.setitem(sys.modules, LIBRARY, library)
    assert use_library("llama", CUDA) is None
    others = {"rope": True, "cross": False, "fused": False, "norm": True, "model": None}
    assert asked == {"swiglu": True, **others}
    assert use_library("mixtral", CUDA) is None
    assert asked == {"swiglu": False, **others}, "its experts know no ranks of a stage"
    assert "knows no gpt2" in str(use_library("gpt2", CUDA))


def test_blocks_are_compiled_by_default_where_that_is_worth_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU, of small blocks, under selective recomputation and as the job forbids: not."""
    stage, _ = stage_of()
    assert not wants_compiled("auto", stage)
    monkeypatch.setattr(kernels, "can_compile", lambda device_type: True)
    assert not wants_compiled("auto", stage)
    monkeypatch.setattr(kernels, "MIN_COMPILED_PARAMETERS", 1)
    assert wants_compiled("auto", stage)
    assert not wants_compiled(False, stage)
    stage.recompute = "selective"
    assert not wants_compiled("auto", stage)


def test_a_compiler_that_fails_is_no_reason_to_fail(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine without a C compiler: Triton raises at the first call."""

    def refuses(function: object) -> object:
        raise RuntimeError("Failed to find C compiler. Please specify via CC")

    compilation.can_compile.cache_clear()
    monkeypatch.setattr(compilation, "_FAILURES", [])
    monkeypatch.setattr(torch, "compile", refuses)
    monkeypatch.setattr(torch, "ones", lambda *shape, **options: torch.zeros(*shape))
    assert not compilation.can_compile("cuda")
    assert "Failed to find C compiler" in caplog.text
    assert "Failed to find C compiler" in str(compilation.fallback_reason())
    compilation.can_compile.cache_clear()
