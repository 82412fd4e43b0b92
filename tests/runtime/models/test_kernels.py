"""Faster blocks compute what plain ones do, and a library that is absent is said to be."""

import sys
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
from planner.plans.plan import Stage
from tests.harness.tiny_models import tiny_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def stage_of(seed: int = 0, tp: TensorParallel | None = None):
    torch.manual_seed(seed)
    config = tiny_config("llama")
    stage = build_stage(config, range(2), tp, CPU, torch.float32)
    shapes = stage.weights.local_shapes()
    stage.weights.load({name: 0.05 * torch.randn(shape) for name, shape in shapes.items()})
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
    compile_blocks(stage)
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
    compile_blocks(stage)
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


class EqualRanks:
    """Group of two ranks with equal parts: a sum is twice the own part."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        out.copy_(part.expand_as(out))

    def reduce_scatter(self, out: torch.Tensor, parts: torch.Tensor) -> None:
        out.copy_(2 * parts[0])


def gradients_of(stage, tokens: torch.Tensor, begins: torch.Tensor | None) -> list[torch.Tensor]:
    stage(tokens, begins).square().sum().backward()
    found = [parameter.grad for parameter in stage.blocks.parameters()]
    stage.zero_grad()
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_block_that_communicates_is_compiled_between_its_sums(
    graphs: list, sequence_parallel: bool
) -> None:
    """A sum inside a graph would be that of the first call, or hide the wait from interrupts."""
    cut = Stage(0, 2, ("n/0", "n/1"), sequence_parallel=sequence_parallel)
    stage, tokens = stage_of(tp=TensorParallel(EqualRanks(), 0, cut))
    wanted = gradients_of(stage, tokens, None)
    compile_blocks(stage)
    torch.testing.assert_close(gradients_of(stage, tokens, None), wanted)
    assert len(graphs) >= 4
    compiled = len(graphs)
    torch.testing.assert_close(gradients_of(stage, tokens, None), wanted)
    assert len(graphs) == compiled
    assert compilation.fallback_reason() is None


def test_isolated_documents_are_compiled_once_for_all_their_lengths(graphs: list) -> None:
    """Each microbatch has documents of other lengths."""
    stage, tokens = stage_of()
    begins = torch.zeros(5, *tokens.shape, dtype=torch.bool)
    for row in range(5):
        begins[row, :, :: row + 2] = True
    wanted = [gradients_of(stage, tokens, each) for each in begins]
    compile_blocks(stage)
    torch.testing.assert_close(gradients_of(stage, tokens, begins[0]), wanted[0])
    compiled = len(graphs)
    for each, expected in zip(begins, wanted, strict=True):
        torch.testing.assert_close(gradients_of(stage, tokens, each), expected)
    assert len(graphs) == compiled


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
