"""Attention over a sliding window: the dense mask's values and gradients, without anything of the
size of the sequence squared.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from autohet.runtime.models.layers import attention as attention_module
from autohet.runtime.models.layers import chunked_attention
from autohet.runtime.models.layers.attention import attention, whole_mask, window_band
from tests.harness.tiny_models import random_parameters, stage_chain, tiny_config

CPU = torch.device("cpu")
HEADS, SIZE = 4, 8


def inputs(length: int, kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, HEADS, length, SIZE), (2, kv_heads, length, SIZE), (2, kv_heads, length, SIZE)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


@pytest.mark.parametrize("chunk", [1, 3, 1024])
@pytest.mark.parametrize(("length", "window"), [(9, 1), (10, 3), (16, 4), (17, 5), (12, 11)])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_chunks_give_what_the_dense_mask_gives(
    length: int, window: int, chunk: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (attention_module, chunked_attention):
        monkeypatch.setattr(module, "CHUNK_TOKENS", chunk)
    given, judged = inputs(length, kv_heads), inputs(length, kv_heads)
    ours, _ = attention(
        nn.Module(), *given, window_band(window, length, torch.float64, CPU), scaling=0.3
    )
    row, column = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = (column <= row) & (column > row - window)
    query, key, value = (
        judged[0],
        *(each.repeat_interleave(HEADS // kv_heads, 1) for each in judged[1:]),
    )
    wanted = F.scaled_dot_product_attention(query, key, value, seen, scale=0.3).transpose(1, 2)
    torch.testing.assert_close(ours, wanted)
    weights = torch.randn(wanted.shape, dtype=wanted.dtype)
    (ours * weights).sum().backward()
    (wanted * weights).sum().backward()
    for one, other in zip(given, judged, strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    mask = whole_mask(window, length, torch.float64, CPU)
    assert mask is not None
    assert torch.equal(mask == 0, seen)


@pytest.mark.parametrize("length", [1, 4, 5])
def test_no_mask_where_the_window_holds_the_sequence(length: int) -> None:
    assert window_band(5, length, torch.float32, CPU) is None
    assert window_band(None, length, torch.float32, CPU) is None


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, function: object, types: object, args: object = (), kwargs: object = None
    ) -> object:
        out = function(*args, **(kwargs or {}))  # type: ignore[operator, misc]
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


def test_a_long_sequence_equals_the_librarys_mistral_and_makes_no_tensor_of_its_square() -> None:
    """512 tokens, a window of 24: the dense mask alone has 262,144 elements."""
    length = 512
    config = tiny_config(
        "mistral", sliding_window=24, max_position_embeddings=length, num_key_value_heads=2
    )
    parameters = random_parameters(config)
    library = AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=torch.float32
    )
    library.load_state_dict(parameters)
    (stage,) = stage_chain(config, parameters, [3])
    tokens = torch.randint(
        0, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(3)
    )
    with Largest() as largest:
        logits = stage(tokens)
        stage.loss_sum(logits, tokens).backward()
    wanted = library(tokens).logits
    F.cross_entropy(wanted.flatten(0, 1), tokens.flatten(), reduction="sum").backward()
    assert (logits - wanted).abs().max() < 1e-5 * wanted.abs().max()
    for name, parameter in library.named_parameters():
        found = stage.weights.local_parameters()[name].grad
        assert (found - parameter.grad).abs().max() < 2e-5 * parameter.grad.abs().max(), name
    assert largest.elements < length * length // 2
