"""What a block keeps between its passes, and how often it sends: counted, not assumed."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autohet.runtime.models.layers.moved_inputs import MovedInputs
from autohet.runtime.models.layers.recomputation import run_block
from autohet.runtime.models.registry import family_of
from autohet.runtime.models.thread_group import ThreadGroup, run_ranks
from planner.plans.plan import Recompute
from tests.harness.tiny_models import (
    TINY,
    batch,
    judge,
    random_parameters,
    run_chain,
    stage_chain,
    tiny_config,
    worst_error,
)

MATMULS = ("mm", "addmm", "bmm", "_grouped_mm")
WINDOWED = (
    "cohere2",
    "gemma3_text",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "smollm3",
    "starcoder2",
)


def is_fused(name: str) -> bool:
    config = tiny_config(name)
    family = family_of(config)
    return not family.has_sinks and family.attention_softcap(config) is None


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class Run(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


def middle(name: str, recompute: Recompute) -> tuple[Any, Tensor]:
    """A stage of three blocks and hidden states for it (its embedding is run before)."""
    config = tiny_config(name)
    (stage,) = stage_chain(config, random_parameters(config), [3], recompute=recompute)
    return stage, batch(config)[0]


def counted(name: str, recompute: Recompute) -> tuple[dict[str, int], dict[str, int]]:
    stage, tokens = middle(name, recompute)
    with Run() as forward:
        out = stage(tokens)
    with Run() as backward:
        out.sum().backward()
    return forward.calls, backward.calls


# The models are built in the test: at collection one wrong family would stop every test.
@pytest.mark.parametrize("name", TINY)
def test_selective_computes_no_matrix_product_again_and_everything_else(name: str) -> None:
    if not is_fused(name) or name == "qwen3_5_text":
        pytest.skip("scores, capped or beside sinks, and recurrences are batched products")
    forward, kept = counted(name, "none")
    _, selective = counted(name, "selective")
    _, full = counted(name, "full")
    products = [sum(calls.get(op, 0) for op in MATMULS) for calls in (kept, selective, full)]
    assert products[0] == products[1] < products[2]
    windowed = kept.get(ATTENTION, 0)  # attention in chunks is computed again whatever is kept
    assert (windowed > 0) == (name in WINDOWED)
    assert selective.get(ATTENTION, 0) == windowed
    again = next(operator for operator in ("silu", "tanh", "gelu") if operator in forward)
    assert kept.get(again, 0) == 0
    assert selective[again] == full[again] == forward[again]


def storages_kept(recompute: Recompute) -> int:
    """Bytes that live on between the passes of a stage and were made by its forward pass."""
    made: dict[int, torch.UntypedStorage] = {}

    class Made(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = function(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    storage = leaf.untyped_storage()
                    made[storage._cdata] = storage
            return out

    stage, tokens = middle("llama", recompute)
    with Made():
        out = stage(tokens)
    # A storage that only this table still refers to is gone as soon as the table is.
    weights = {parameter.untyped_storage()._cdata for parameter in stage.parameters()}
    live = [
        s
        for s in made.values()
        if s._cdata not in weights and torch._C._storage_Use_Count(s._cdata) > 1
    ]
    kept = sum(storage.nbytes() for storage in live)
    del out
    return kept


def test_each_choice_keeps_less_than_the_one_before() -> None:
    kept, selective, full = (storages_kept(choice) for choice in ("none", "selective", "full"))
    assert kept > 1.3 * selective > 1.3 * 1.3 * full


class Counting(ThreadGroup):
    """Counts its sums, by rank 0."""

    sums = 0

    def all_reduce(self, tensor: Tensor) -> None:
        if self.rank == 0:
            Counting.sums += 1
        super().all_reduce(tensor)


@pytest.mark.parametrize(("recompute", "wanted"), [("none", 0), ("selective", 0), ("full", 1)])
def test_selective_sends_nothing_again(
    monkeypatch: pytest.MonkeyPatch, recompute: Recompute, wanted: int
) -> None:
    """In a backward pass: the sums of a block's two gradients, and with `full` that of the
    attention's output again.
    """
    monkeypatch.setattr("autohet.runtime.models.thread_group.ThreadGroup", Counting)
    config = tiny_config("llama")
    parameters = random_parameters(config)

    def passes(tp: Any) -> int:
        (stage,) = stage_chain(config, parameters, [3], tp, recompute=recompute)
        out = stage(batch(config)[0])
        tp.group.meeting.wait(20)
        before = Counting.sums
        out.sum().backward()
        return Counting.sums - before

    sent = run_ranks(2, passes)[0]
    assert sent == 3 * (2 + wanted) + 1  # and the gradient of the hidden states before the head


def test_clamped_projections_have_the_librarys_gradients() -> None:
    """OLMo's `clip_qkv` changes the output of a product in place."""
    config = tiny_config("olmoe", clip_qkv=0.5)
    parameters = random_parameters(config)
    _, _, expected = judge(config, parameters)
    stages = stage_chain(config, parameters, [3], recompute="selective")
    assert worst_error(run_chain(config, stages)[2], expected) < 1e-5


def test_a_kept_product_that_a_module_changes_is_an_error() -> None:
    class Clamped(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).clamp_(-0.1, 0.1)

    hidden = torch.randn(2, 3, 4, requires_grad=True)
    out = run_block(Clamped(4, 4), hidden, {}, "selective", MovedInputs())
    with pytest.raises(RuntimeError, match="mutated"):
        out.sum().backward()
