"""AdamW over flat buffers: torch.optim.AdamW's values, and for one shard the same bits at every
worker that keeps it.
"""

import math
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autohet.runtime.facts.layout import STATE_KINDS, layout_of_plan, state_name
from autohet.runtime.job import TrainingSection
from autohet.runtime.models.registry import family_of
from autohet.runtime.parallel.buckets import ALIGNMENT, LocalBuffers
from autohet.runtime.state.flat_optimizer import FlatOptimizer, fused_update
from autohet.runtime.state.optimizer import UpdateRule, parameters_without_decay
from autohet.runtime.state.state_source import local_slice
from autohet.runtime.step.learning_rate import learning_rate
from planner.plans.plan import Plan
from recovery.state.layout import ShardId
from recovery.state.slices import shard_views
from tests.harness.live_memory import LiveMemory
from tests.harness.random_plans import plans
from tests.harness.tiny_models import tiny_config

SETTINGS = TrainingSection(
    global_batch_sequences=1, sequence_length=1, steps=10, learning_rate=1e-2, warmup_steps=4
)
CONFIG = tiny_config("llama")
STEPS, FACTOR = 3, 0.37
DECAY = 0.5  # large: a parameter in the wrong group shows
SETTINGS = replace(SETTINGS, weight_decay=DECAY)
UNDECAYED = parameters_without_decay(SETTINGS, family_of(CONFIG).parameter_specs(CONFIG))


def gradients(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    specs = family_of(CONFIG).parameter_specs(CONFIG)
    return {name: torch.randn(spec.shape, generator=generator) for name, spec in specs.items()}


def wanted() -> dict[str, torch.Tensor]:
    """torch.optim.AdamW's parameters after the steps."""
    first = {name: tensor.clone() for name, tensor in gradients(99).items()}
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in first.items()}
    groups = [
        {"params": [parameters[name] for name in sorted(first.keys() - UNDECAYED)]},
        {"params": [parameters[name] for name in sorted(UNDECAYED)], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, betas=SETTINGS.betas, eps=SETTINGS.eps, weight_decay=DECAY
    )
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            parameters[name].grad = gradient * FACTOR
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(SETTINGS, step)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


WANTED = wanted()


def flats_of(local: LocalBuffers, step: int) -> dict[int, torch.Tensor]:
    """The summed gradients as a worker's buffers have them."""
    flats, whole = {}, gradients(step)
    for index in local.held:
        flats[index] = torch.zeros(local.buffers[index].num_elements)
        for piece in local.buffers[index].pieces:
            spec = local.specs[piece.parameter]
            cut = (
                [whole[piece.parameter]]
                if spec.split_dim is None
                else [
                    whole[piece.parameter].narrow(
                        spec.split_dim, spec.cuts[u], spec.cuts[u + 1] - spec.cuts[u]
                    )
                    for u in piece.units
                ]
            )
            piece.view_in(flats[index]).copy_(torch.cat(cut, spec.split_dim or 0))
    return flats


@settings(max_examples=15)
@given(plans(3, 4, uneven=True), st.booleans())
def test_every_worker_gets_the_same_bits_and_torchs_values(drawn: Plan, sharded: bool) -> None:
    """However its pipeline is cut: whole tensors, parts that others cut more finely, and what it
    alone owns.
    """
    stages = [replace(stage, shard_optimizer=sharded) for stage in drawn.pipelines[0].stages]
    drawn = replace(
        drawn, pipelines=(replace(drawn.pipelines[0], stages=tuple(stages)), *drawn.pipelines[1:])
    )
    layout = layout_of_plan(drawn, CONFIG)
    bits: dict[ShardId, set[bytes]] = defaultdict(set)
    for worker in drawn.workers:
        first, units = gradients(99), layout.units_of(worker)
        state = {
            name: torch.zeros(layout.tensors[name].local_shape(held))
            for name, held in units.items()
        }
        for name, tensor in first.items():
            if (param := state_name("param", name)) in units:
                state[param] = local_slice(layout, param, units[param], tensor)
        local = LocalBuffers(drawn, CONFIG, worker, None)
        optimizer = FlatOptimizer(local, state, UNDECAYED)
        for step in range(STEPS):
            optimizer.update(flats_of(local, step), UpdateRule(SETTINGS, step, FACTOR))
        for shard, view in shard_views(
            layout.tensors, layout.shards_by_worker[worker], state
        ).items():
            bits[shard].add(view.contiguous().numpy().tobytes())
            if shard.tensor.startswith("param/"):
                spec = layout.tensors[shard.tensor]
                whole = WANTED[shard.tensor.removeprefix("param/")]
                expected = whole if spec.split_dim is None else whole[spec.unit_slices(shard.unit)]
                torch.testing.assert_close(view, expected, rtol=1e-6, atol=1e-7)
    assert set(bits) == layout.shards
    assert all(len(versions) == 1 for versions in bits.values())


@pytest.mark.parametrize("threads", [1, 2])
def test_an_element_gets_the_same_bits_wherever_it_lies(threads: int) -> None:
    """At any multiple of ALIGNMENT, in buffers of any such size, with any number of threads."""
    torch.manual_seed(0)
    size = 512 * ALIGNMENT
    whole = [torch.randn(size), torch.randn(size), torch.rand(size)]
    gradient = torch.randn(size)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        parts = {}
        for start, stop in [
            (0, 1),
            (7, 40),
            (33, 512),
            *((first, first + 5) for first in range(0, 500, 9)),
        ]:
            span = slice(start * ALIGNMENT, stop * ALIGNMENT)
            parts[start, stop] = [tensor[span].clone() for tensor in whole]
            alone = tuple(parts[start, stop])
            fused_update([alone], [gradient[span].clone()], UpdateRule(SETTINGS, 0, FACTOR))
        fused_update([tuple(whole)], [gradient], UpdateRule(SETTINGS, 0, FACTOR))
    finally:
        torch.set_num_threads(before)
    for (start, stop), tensors in parts.items():
        for kind, part, tensor in zip(STATE_KINDS, tensors, whole, strict=True):
            assert torch.equal(part, tensor[start * ALIGNMENT : stop * ALIGNMENT]), kind


def test_state_becomes_views_of_a_few_flat_tensors() -> None:
    drawn = Plan.from_document(
        {
            "version": 1,
            "model": "m",
            "global_batch_sequences": 1,
            "microbatch_sequences": 1,
            "sequence_length": 4,
            "pipelines": [
                {
                    "num_microbatches": 1,
                    "stages": [{"first_layer": 0, "num_layers": 3, "workers": ["w"]}],
                }
            ],
        }
    )
    layout = layout_of_plan(drawn, CONFIG)
    state = {
        n: torch.randn(layout.tensors[n].local_shape(u)) for n, u in layout.units_of("w").items()
    }
    before = {name: tensor.clone() for name, tensor in state.items()}
    FlatOptimizer(LocalBuffers(drawn, CONFIG, "w", None), state)
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == len(
        STATE_KINDS
    )


@settings(max_examples=15)
@given(plans(3, 2), st.booleans())
def test_state_that_lies_flat_already_takes_a_third_more_to_lay_out_and_leaves_nothing_behind(
    drawn: Plan, sharded: bool
) -> None:
    """As after a generation with other holders: each kind is one flat tensor, whose views a restore
    has kept in place.
    """
    stages = [replace(stage, shard_optimizer=sharded) for stage in drawn.pipelines[0].stages]
    drawn = replace(
        drawn, pipelines=(replace(drawn.pipelines[0], stages=tuple(stages)), *drawn.pipelines[1:])
    )
    layout = layout_of_plan(drawn, CONFIG)
    for worker in drawn.workers:
        local, units = LocalBuffers(drawn, CONFIG, worker, None), layout.units_of(worker)
        with LiveMemory() as memory:
            state = {}
            for kind in STATE_KINDS:
                shapes = {
                    n: layout.tensors[n].local_shape(held)
                    for n, held in units.items()
                    if n.startswith(f"{kind}/")
                }
                flat = torch.zeros(sum(math.prod(shape) for shape in shapes.values()))
                parts = flat.split([math.prod(shape) for shape in shapes.values()])
                state |= {
                    name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)
                }
                del flat, parts
            before = memory.bytes
            optimizer = FlatOptimizer(local, state)
            padding = 4 * ALIGNMENT * len(units)
            assert memory.peak_bytes <= before * 4 / 3 + padding
            assert memory.bytes <= before + padding
            del optimizer
