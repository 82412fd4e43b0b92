"""Families that are read off the library's plans: what lies outside blocks, what is refused, and
what stock transformers loads of them.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from autohet.runtime.job import ModelSection
from autohet.runtime.models.config import load_config, saved_document
from autohet.runtime.models.layers.attention import attention
from autohet.runtime.models.layers.logits import LogitAdjustment
from planner.errors import ConfigError
from tests.harness.tiny_models import (
    AUTO,
    batch,
    judge,
    random_parameters,
    stage_chain,
    tiny_config,
)


def source(**config: Any) -> Any:
    return ModelSection(config=config)


@pytest.mark.parametrize("name", AUTO)
def test_stock_transformers_loads_what_is_saved(name: str, tmp_path: Path) -> None:
    config = tiny_config(name)
    parameters = random_parameters(config)
    (tmp_path / "config.json").write_text(json.dumps(saved_document(source(**AUTO[name]))))
    save_file(parameters, tmp_path / "model.safetensors", {"format": "pt"})
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens, _ = batch(config)
    with torch.no_grad():
        found = stock(tokens, use_cache=False).logits
    expected, _, _ = judge(config, parameters)
    assert torch.allclose(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", AUTO)
def test_the_loss_of_one_rank_is_that_of_its_logits(name: str) -> None:
    """One rank never has whole logits: factors and soft-caps are applied to chunks of them."""
    config = tiny_config(name)
    inputs, targets = batch(config)
    (one,) = stage_chain(config, random_parameters(config), [3])
    (other,) = stage_chain(config, random_parameters(config), [3])
    fused = one.loss(inputs, targets)
    fused.backward()
    plain = other.loss_sum(other(inputs), targets)
    plain.backward()
    assert fused.item() == pytest.approx(plain.item(), rel=1e-6)
    wanted = other.weights.local_parameters()
    for key, parameter in one.weights.local_parameters().items():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, wanted[key].grad, rtol=1e-4, atol=1e-4), key


def test_a_capped_attention_in_chunks_is_one_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 2, 40, 8)
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    states = [each.requires_grad_() for each in (query, key, value)]
    outputs, gradients = [], []
    for chunk in (1024, 16):
        for module in ("attention", "chunked_attention"):
            monkeypatch.setattr(f"autohet.runtime.models.layers.{module}.CHUNK_TOKENS", chunk)
        out, _ = attention(torch.nn.Identity(), *states, None, scaling=0.5, softcap=2.0)
        outputs.append(out)
        gradients.append(torch.autograd.grad(out.square().sum(), states))
    assert torch.allclose(outputs[0], outputs[1], atol=1e-6)
    for whole, chunked in zip(*gradients, strict=True):
        assert torch.allclose(whole, chunked, atol=1e-5)


@pytest.mark.parametrize(
    "adjustment",
    [LogitAdjustment(factor=0.3), LogitAdjustment(divisor=6.0), LogitAdjustment(softcap=3.0)],
)
def test_an_adjustment_has_the_gradient_of_its_operations(adjustment: LogitAdjustment) -> None:
    given = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    given.requires_grad_()
    assert torch.autograd.gradcheck(adjustment.apply, (given * 4,))


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text"])
def test_attention_to_later_tokens_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match="use_bidirectional_attention"):
        load_config(source(**AUTO[name], use_bidirectional_attention=True))


def test_a_key_of_another_family_does_not_scale(caplog: pytest.LogCaptureFixture) -> None:
    """A llama with Granite's factors is what the library makes of it: they are named."""
    config = load_config(source(**AUTO["smollm3"], embedding_multiplier=12.0))
    assert not hasattr(config, "embedding_multiplier")
    assert "embedding_multiplier" in caplog.text


@pytest.mark.parametrize("name", [name for name in AUTO if name != "phi3"])
def test_isolated_documents_do_not_see_each_other(name: str) -> None:
    """Phi 3 chooses its rotary factors by the longest document of a microbatch."""
    config = tiny_config(name)
    (stage,) = stage_chain(config, random_parameters(config), [3])
    tokens = batch(config)[0][:1]
    begins = torch.zeros(tokens.shape, dtype=torch.bool)
    begins[0, [0, 7]] = True
    together = stage(tokens, begins)
    for place in (slice(0, 7), slice(7, 12)):
        alone = stage(tokens[:, place])
        torch.testing.assert_close(alone, together[:, place], rtol=1e-4, atol=1e-4)
