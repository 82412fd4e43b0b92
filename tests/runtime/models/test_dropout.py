"""Dropout of models and adapters: bits that no plan changes, and torch's own distribution."""

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from autohet.runtime.job import AdapterSection, ModelSection
from autohet.runtime.models.config import load_config
from autohet.runtime.models.families import BUILT_IN
from autohet.runtime.models.initialization import initial_parameters
from autohet.runtime.models.layers import chunked_attention, dropout
from autohet.runtime.models.layers.dropout import (
    AttentionDropout,
    DropoutRows,
    ModelDropout,
    StateDropout,
    column_keys,
    dropout_mask,
    dropout_of,
    multiply_dropped,
    row_keys,
)
from autohet.runtime.models.registry import family_of
from autohet.runtime.models.stages.stage import build_stage
from autohet.runtime.models.thread_group import run_ranks
from planner.errors import ConfigError
from tests.harness.live_memory import LiveMemory
from tests.harness.tiny_models import (
    LLAMA_LIKE,
    TINY,
    batch,
    judge,
    random_parameters,
    run_chain,
    stage_chain,
    tiny_config,
)

CPU = torch.device("cpu")
RATE = 0.3


def masks(samples: list[int], columns: range = range(40), path: str = "layers.0.q") -> torch.Tensor:
    rows = row_keys(5, samples, 50, CPU)
    return dropout_mask(rows, column_keys(path, torch.arange(columns.start, columns.stop)), RATE)


def test_bits_belong_to_the_sample_and_the_column_alone() -> None:
    whole = masks([3, 9, 4])
    assert torch.equal(masks([9]), whole[1:2])
    assert torch.equal(masks([3, 9, 4], range(10, 25)), whole[..., 10:25])
    assert not torch.equal(masks([3, 9, 5])[2], whole[2])
    assert not torch.equal(masks([3, 9, 4], path="layers.1.q"), whole)


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.9])
def test_as_many_are_dropped_as_by_torch_and_they_are_independent(rate: float) -> None:
    rows = row_keys(1, range(64), 64, CPU)
    mask = dropout_mask(rows, column_keys("a", torch.arange(256)), rate).float()
    deviation = (rate * (1 - rate)) ** 0.5
    assert abs(mask.mean().item() - rate) < 4 * deviation / mask.numel() ** 0.5
    centred = mask - rate
    for dim in range(3):  # neighbours of one sample, token or column
        pairs = (centred * centred.roll(1, dim)).mean().item()
        assert abs(pairs) < 5 * deviation**2 / mask.numel() ** 0.5
    for dim in range(3):  # no sample, token or column has a rate of its own
        others = [each for each in range(3) if each != dim]
        rates = mask.mean(dim=others)
        spread = deviation / (mask.numel() / mask.shape[dim]) ** 0.5
        assert (rates - rate).abs().max().item() < 5 * spread


@pytest.mark.parametrize("elements", [1 << 22, 700, 1])
def test_product_and_gradients_are_those_of_torch_with_the_same_mask(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dropout, "CHUNK_ELEMENTS", elements)
    torch.manual_seed(0)
    x = torch.randn(2, 50, 40, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 40, dtype=torch.float64, requires_grad=True)
    rows, columns = row_keys(5, [1, 2], 50, CPU), column_keys("a", torch.arange(40))
    kept = ~dropout_mask(rows, columns, RATE)
    expected = (x * kept / (1 - RATE)) @ weight.T
    found = multiply_dropped(x, weight, rows, columns, RATE)
    torch.testing.assert_close(found, expected)
    slope = torch.randn_like(found)
    wanted = torch.autograd.grad(expected, (x, weight), slope)
    for one, other in zip(torch.autograd.grad(found, (x, weight), slope), wanted, strict=True):
        torch.testing.assert_close(one, other)


def stage_of(recompute: Any, rate: float = RATE) -> Any:
    adapter = AdapterSection(rank=4, alpha=8.0, dropout=rate)
    section = ModelSection(config={"model_type": "llama", **LLAMA_LIKE}, adapter=adapter)
    config = load_config(section)
    family = family_of(config)
    layers = range(family.num_layers(config))
    stage = build_stage(config, layers, None, CPU, torch.float32, recompute)
    drawn = dict(initial_parameters(config, list(family.parameter_specs(config)), 1))
    generator = torch.Generator().manual_seed(2)
    for name, tensor in drawn.items():
        if "lora_B" in name:
            tensor.normal_(0, 0.3, generator=generator)
    stage.weights.load(drawn)
    return stage


def test_recomputation_draws_the_same_bits_while_other_microbatches_pass() -> None:
    tokens = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(1))
    gradients = []
    for recompute in ("none", "selective", "full"):
        stage = stage_of(recompute)
        losses = []
        for samples in ([0, 1], [2, 3]):
            stage.dropout.draw(7, samples)
            losses.append(stage.loss(tokens, tokens))
        assert losses[0].item() != losses[1].item()
        losses[0].backward()  # after the forward pass of another microbatch, as in a pipeline
        gradients.append({n: p.grad for n, p in stage.weights.local_parameters().items()})
    for other in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(other[name], gradient, msg=name)


def test_evaluation_drops_nothing() -> None:
    tokens = torch.randint(0, 67, (2, 9), generator=torch.Generator().manual_seed(1))
    stage, plain = stage_of("none"), stage_of("none", 0.0)
    stage.dropout.draw(7, [0, 1])
    assert stage.loss(tokens, tokens).item() != plain.loss(tokens, tokens).item()
    with torch.no_grad():
        assert stage.loss(tokens, tokens).item() == plain.loss(tokens, tokens).item()


def rates_of(name: str) -> dict[str, float]:
    """A rate for each dropout key of the model's family; no two keys share one."""
    family = BUILT_IN[TINY[name]["model_type"]]
    return {key: 0.2 + 0.1 * index for index, key in enumerate(sorted(family.dropouts))}


RATES = {name: rates_of(name) for name in TINY}
SAMPLES = [3, 8]


def dropping(name: str, **changes: Any) -> Any:
    return tiny_config(name, **RATES[name], **changes)


def forward(stages: Any) -> torch.Tensor:
    hidden = batch(stages[0].spec.config)[0]
    for stage in stages:
        stage.dropout.draw(5, SAMPLES)
        hidden = stage(hidden)
    return hidden


@pytest.mark.parametrize("name", RATES)
def test_the_library_with_the_same_masks_gives_the_same_logits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each dropout of the library's eager modules, in its order: place, rate and scaling."""
    whole_rows = {"sliding_window": 32} if "sliding_window" in TINY[name] else {}
    config = dropping(name, **whole_rows)
    parameters = random_parameters(config)
    masks: list[torch.Tensor] = []

    def recorded(*arguments: Any) -> torch.Tensor:
        masks.append(dropout_mask(*arguments))
        return masks[-1]

    monkeypatch.setattr(dropout, "dropout_mask", recorded)
    logits = forward(stage_chain(config, parameters, [3]))

    theirs = copy.deepcopy(config)
    for key, rate in RATES[name].items():
        setattr(theirs, key, rate)
    model = AutoModelForCausalLM.from_config(
        theirs, attn_implementation="eager", dtype=torch.float32
    ).train()
    model.load_state_dict(parameters, strict=False)

    def with_mask(x: torch.Tensor, p: float, training: bool = True, _: bool = False) -> Any:
        assert training
        mask = masks.pop(0).view_as(x)
        assert abs(mask.float().mean().item() - p) < 0.12
        return x.masked_fill(mask, 0.0) / (1 - p)

    monkeypatch.setattr(torch.nn.functional, "dropout", with_mask)
    expected = model(batch(config)[0]).logits
    assert not masks
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cuts_sequence", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "starcoder2"])
def test_ranks_and_stages_drop_what_one_worker_drops(name: str, cuts_sequence: bool) -> None:
    config = dropping(name)
    parameters = random_parameters(config)
    expected = forward(stage_chain(config, parameters, [3]))
    assert not torch.allclose(expected, judge(config, parameters)[0])

    def work(tp: Any) -> torch.Tensor:
        return forward(stage_chain(config, parameters, [1, 2], tp, "full"))

    by_rank = run_ranks(2, work, (3, 1), cuts_sequence=cuts_sequence)
    torch.testing.assert_close(torch.cat(by_rank, -1), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mistral"])
def test_gradients_are_those_of_the_same_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputation and other chunks draw them again; autograd through plain operators agrees."""
    config = dropping(name)
    parameters = random_parameters(config)
    found = []
    for recompute, scores in (("none", 1 << 23), ("none", 600), ("full", 1 << 23)):
        monkeypatch.setattr(chunked_attention, "EXPLICIT_SCORES", scores)
        stages = stage_chain(config, parameters, [3], recompute=recompute)
        stages[0].dropout.draw(5, SAMPLES)
        found.append(run_chain(config, stages)[2])
    for name_, whole in found[0].items():
        for other in found[1:]:
            torch.testing.assert_close(other[name_], whole, rtol=1e-4, atol=1e-5, msg=name_)


def test_dropped_states_have_the_gradient_of_their_mask() -> None:
    rows, columns = row_keys(5, [1, 2], 6, CPU), column_keys("a", torch.arange(7))
    x = torch.randn(2, 6, 7, dtype=torch.float64, requires_grad=True)
    drop = StateDropout(RATE, DropoutRows(rows, rows), columns)
    kept = ~dropout_mask(rows, columns, RATE)
    out = drop(x)
    torch.testing.assert_close(out, x * kept / (1 - RATE))
    slope = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, x, slope)
    torch.testing.assert_close(gradient, slope * kept / (1 - RATE))


def test_mean_and_variance_are_those_of_torchs_dropout() -> None:
    x = torch.ones(64, 64, 256)
    rows = row_keys(1, range(64), 64, CPU)
    drop = StateDropout(RATE, DropoutRows(rows, rows), column_keys("a", torch.arange(256)))
    weights = AttentionDropout(RATE, DropoutRows(rows, rows), column_keys("b", torch.arange(4)))
    of_heads = weights.drop(torch.ones(64, 4, 64, 64), slice(0, 64), slice(0, 64))
    torchs = torch.nn.functional.dropout(x, RATE)
    for mine in (drop(x), of_heads):
        assert mine.unique().tolist() == torchs.unique().tolist()
        assert abs(mine.mean().item() - 1) < 5 * (RATE / (1 - RATE) / mine.numel()) ** 0.5
        assert mine.var().item() == pytest.approx(torchs.var().item(), rel=0.01)
    for dim in range(4):  # no sample, head, query or key has a rate of its own, or its neighbour's
        others = [each for each in range(4) if each != dim]
        spread = (RATE / (1 - RATE) / (of_heads.numel() / of_heads.shape[dim])) ** 0.5
        assert (of_heads.mean(dim=others) - 1).abs().max().item() < 5 * spread
        pairs = (of_heads - 1) * (of_heads.roll(1, dim) - 1)
        assert abs(pairs.mean().item()) < 5 * RATE / (1 - RATE) / of_heads.numel() ** 0.5


def test_models_without_dropout_and_evaluation_compute_as_before() -> None:
    config, plain = dropping("gpt2"), tiny_config("gpt2", **dict.fromkeys(RATES["gpt2"], 0.0))
    parameters = random_parameters(config)
    (stage,), (bare,) = (stage_chain(each, parameters, [3]) for each in (config, plain))
    assert stage.dropout.drops
    assert not bare.dropout.drops
    assert not any(module._forward_hooks for module in bare.modules())
    tokens = batch(config)[0]
    stage.dropout.draw(5, SAMPLES)
    with torch.no_grad():
        assert torch.equal(stage(tokens), bare(tokens))
    assert not torch.equal(stage(tokens), bare(tokens))


def test_no_mask_is_kept_for_the_backward_pass() -> None:
    """Dropout keeps no tensor of the hidden states' size more than a model without it."""

    def kept(**rates: float) -> int:
        (stage,) = stage_chain(config := tiny_config("gpt2", **rates), parameters, [3])
        stage.dropout.draw(5, SAMPLES)
        stage(batch(config)[0])
        with LiveMemory([*stage.parameters(), *stage.inputs.tensors()]) as memory:
            out = stage(batch(config)[0])
        assert out.requires_grad
        return memory.bytes

    parameters = random_parameters(tiny_config("gpt2"))
    without = kept(**dict.fromkeys(RATES["gpt2"], 0.0))
    for rates in (RATES["gpt2"], {**RATES["gpt2"], "attn_pdrop": 0.0}):
        assert kept(**rates) < without + 1000


@pytest.mark.parametrize("isolated", [False, True])
def test_keys_of_other_documents_stay_unseen_under_dropout(isolated: bool) -> None:
    config = dropping("llama-grouped")
    (stage,) = stage_chain(config, random_parameters(config), [3])
    tokens = batch(config)[0]
    begins = torch.zeros(tokens.shape, dtype=torch.bool)
    begins[:, [0, 5]] = True
    changed = tokens.clone()
    changed[:, 2] = (changed[:, 2] + 1) % 60
    found = []
    for each in (tokens, changed):
        stage.dropout.draw(5, SAMPLES)
        found.append(stage(each, begins if isolated else None)[:, 5:])
    assert torch.equal(*found) == isolated


def test_a_dropout_without_a_place_is_refused() -> None:
    config = tiny_config("llama-grouped")
    config.hidden_dropout = 0.1
    with pytest.raises(ConfigError, match=r"hidden_dropout of llama is 0\.1, .* set it to 0"):
        family_of(config).take_dropout(config)


def test_all_dropouts_without_a_place_are_named_at_once() -> None:
    config = tiny_config("llama-grouped")
    config.hidden_dropout = 0.1
    config.resid_pdrop = 0.2
    both = r"hidden_dropout of llama is 0\.1, resid_pdrop of llama is 0\.2, .* set them to 0"
    with pytest.raises(ConfigError, match=both):
        family_of(config).take_dropout(config)


def test_a_rate_that_is_no_probability_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"resid_pdrop is 1\.0, but must be .* less than 1"):
        tiny_config("gpt2", resid_pdrop=1.0)


def test_a_job_can_train_without_the_dropout_of_its_model() -> None:
    config: dict[str, Any] = {"model_type": "gpt2", "n_layer": 1}
    assert dropout_of(load_config(ModelSection(config=config))) == ModelDropout(
        0.1, 0.1, {"attn.c_proj": 0.1, "mlp.c_proj": 0.1}
    )
    assert not dropout_of(load_config(ModelSection(config=config, dropout=False)))
