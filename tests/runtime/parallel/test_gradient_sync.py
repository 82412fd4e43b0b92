"""Buffers: every shard in exactly one, with exactly its holders, in one order for all; sums against
a direct computation.
"""

import gc
import math
import weakref
from collections import Counter, defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autohet.runtime.facts.layout import held_units, layout_of_plan
from autohet.runtime.models.registry import family_of, stage_parameter_names
from autohet.runtime.parallel.buckets import (
    ALIGNMENT,
    GradientBuffer,
    LocalBuffers,
    groups_by_holders,
    plan_buckets,
    plan_buffers,
)
from autohet.runtime.parallel.gradient_sync import GradientSync
from planner.plans.communicators import holder_sets, max_sync_groups
from planner.plans.plan import Plan
from tests.harness.random_plans import plans
from tests.harness.tiny_models import tiny_config
from tests.harness.toy_model import ExactConfig

CONFIG = ExactConfig(num_hidden_layers=4, tie_word_embeddings=True)
LAYER_BYTES = 4 * (2 * 16 * 16 + 16)


def gradient_of(sync: GradientSync, name: str) -> torch.Tensor:
    """The gradient of a worker's slice: its pieces in one tensor."""
    together = torch.empty_like(sync._parameters[name], dtype=torch.float32, requires_grad=False)
    for each in sync._pieces[name]:
        for run in each.runs:
            run.view_in(together).copy_(run.view_in_piece(each.view))
    return together


def plan(*pipelines: list[tuple[int, list[str]]], sharded: bool = False) -> Plan:
    """`sharded`: the optimizer state of the first pipeline's stages, which is all layers'."""
    documents = []
    for shape in pipelines:
        first, stages = 0, []
        for layers, workers in shape:
            extra = {"shard_optimizer": True} if sharded and not documents else {}
            stages.append({"first_layer": first, "num_layers": layers, "workers": workers, **extra})
            first += layers
        documents.append({"num_microbatches": 1, "stages": stages})
    common = {
        "version": 1,
        "model": "m",
        "global_batch_sequences": len(pipelines),
        "microbatch_sequences": 1,
        "sequence_length": 4,
    }
    return Plan.from_document({**common, "pipelines": documents})


CUT_ACROSS = ([(3, ["a", "b"]), (1, ["c"])], [(1, ["d"]), (3, ["e", "f"])], [(4, ["g"])])
ACROSS, SHARDED = plan(*CUT_ACROSS), plan(*CUT_ACROSS, sharded=True)


@pytest.mark.parametrize("drawn", [ACROSS, SHARDED], ids=["each its own", "sharded"])
def test_every_shard_is_in_one_buffer_with_its_holders(drawn: Plan) -> None:
    layout, everywhere = layout_of_plan(drawn, CONFIG), layout_of_plan(ACROSS, CONFIG)
    seen: dict[tuple[str, int], GradientBuffer] = {}
    for buffer in plan_buffers(drawn, CONFIG):
        assert [piece.offset for piece in buffer.pieces] == [
            0,
            *(piece.end for piece in buffer.pieces[:-1]),
        ]
        assert all(piece.offset % ALIGNMENT == 0 for piece in buffer.pieces)
        for piece in buffer.pieces:
            for unit in piece.units:
                assert (piece.parameter, unit) not in seen
                seen[piece.parameter, unit] = buffer
    shards = {shard for shard in layout.shards if shard.tensor.startswith("param/")}
    assert set(seen) == {(shard.tensor.removeprefix("param/"), shard.unit) for shard in shards}
    for shard in shards:
        buffer = seen[shard.tensor.removeprefix("param/"), shard.unit]
        assert buffer.holders == everywhere.holders(shard)
        assert layout.holders(shard) == (
            buffer.holders if buffer.owner is None else (buffer.owner,)
        )
        assert (buffer.owner is not None) == (drawn is SHARDED)


@pytest.mark.parametrize("limit", [1, 100, LAYER_BYTES, 1 << 30])
def test_buckets_cover_each_buffer_once_and_end_with_the_backward_pass(limit: int) -> None:
    """Larger tensors are split: no bucket is larger than the limit.

    None waits for a parameter that comes after a later bucket's.
    """
    buffers = plan_buffers(ACROSS, CONFIG)
    buckets = plan_buckets(buffers, limit)
    for index, buffer in enumerate(buffers):
        spans = sorted((b.start, b.stop) for b in buckets if b.buffer == index)
        assert [start for start, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
        assert spans[-1][1] == buffer.num_elements
    assert all(4 * (b.stop - b.start) <= max(limit, 4 * ALIGNMENT) for b in buckets)
    waits = [max(p.order for p in buffers[b.buffer].pieces if b.touches(p)) for b in buckets]
    assert waits == sorted(waits)


@settings(max_examples=30)
@given(plans(3, 4))
def test_owners_share_what_their_holders_have(drawn: Plan) -> None:
    """Each of a set of holders gets as much as the next, but for one unit; and nobody owns what it
    does not compute with.
    """
    stages = [replace(stage, shard_optimizer=True) for stage in drawn.pipelines[0].stages]
    sharded = replace(
        drawn, pipelines=(replace(drawn.pipelines[0], stages=tuple(stages)), *drawn.pipelines[1:])
    )
    config = tiny_config("llama", vocab_size=64, intermediate_size=64)
    largest = max(
        math.prod(spec.shape) / spec.num_units
        for spec in family_of(config).parameter_specs(config).values()
    )
    load: dict[tuple[str, ...], dict[str, int]] = defaultdict(dict)
    for buffer in plan_buffers(sharded, config):
        if len(buffer.holders) > 1:
            assert buffer.owner in buffer.holders
            load[buffer.holders][buffer.owner] = sum(piece.num_elements for piece in buffer.pieces)
    for holders, by_owner in load.items():
        shares = [by_owner.get(worker, 0) for worker in holders]
        assert max(shares) - min(shares) <= largest + 1


def test_a_tied_embedding_is_summed_over_both_ends() -> None:
    first_and_last = plan([(2, ["a"]), (2, ["b"])], [(1, ["c"]), (2, ["d"]), (1, ["e"])])
    buffers = plan_buffers(first_and_last, CONFIG)
    holders = {piece.parameter: b.holders for b in buffers for piece in b.pieces}
    assert holders["model.embed_tokens.weight"] == ("a", "b", "c", "e")
    assert set(groups_by_holders(first_and_last, CONFIG, buffers)) == set(holders.values())


UNEVEN = plans(3, 4, uneven=True)


class FakeGroups:
    """Groups that record what is given to them: the test adds up itself."""

    device = torch.device("cpu")

    def __init__(self, most: int | None = None) -> None:
        self.back_end = SimpleNamespace(max_sync_groups=lambda plan: most)
        self.made: list[tuple[str, ...]] = []
        self.given: dict[tuple[str, ...], list[torch.Tensor]] = defaultdict(list)

    def group(self, members: tuple[str, ...], purpose: str = "sync") -> Any:
        self.made.append(tuple(members))
        outer = self

        class One:
            def start_all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
                outer.given[tuple(members)].append(tensor)
                return tensor

            def start_reduce(self, tensor: torch.Tensor, to: str) -> torch.Tensor:
                assert to in members
                return self.start_all_reduce(tensor)

            def wait_on_stream(self, work: Any) -> None:
                pass

        return One()


def sync_of(
    drawn: Plan, config: Any, worker: str, groups: FakeGroups, parameters: Any, **options: Any
) -> GradientSync:
    local = LocalBuffers(drawn, config, worker, groups.back_end.max_sync_groups(drawn))
    return GradientSync(local, groups, parameters, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("across", [ACROSS, SHARDED], ids=["each its own", "sharded"])
@pytest.mark.parametrize(("overlap", "most"), [(True, None), (False, None), (False, 2), (False, 1)])
@pytest.mark.parametrize("bucket_bytes", [256, 1 << 30])
def test_sums_and_norm_equal_a_direct_computation(
    across: Plan, overlap: bool, most: int | None, bucket_bytes: int
) -> None:
    torch.manual_seed(0)
    layout = layout_of_plan(ACROSS, CONFIG)
    specs = {name: spec for name, spec in layout.tensors.items() if name.startswith("param/")}
    degree = {w: s.tp_degree for p in ACROSS.pipelines for s in p.stages for w in s.workers}
    wanted = {name: torch.zeros(spec.shape) for name, spec in specs.items()}
    syncs, fakes = {}, {}
    for worker in ACROSS.workers:
        units = {name: u for w, name, _, u in held_units(ACROSS, CONFIG) if w == worker}
        parameters = {
            n: torch.nn.Parameter(torch.zeros(specs[f"param/{n}"].local_shape(u)))
            for n, u in units.items()
        }
        fakes[worker] = FakeGroups(most)
        options: dict[str, Any] = {"overlap": overlap, "bucket_bytes": bucket_bytes}
        sync = syncs[worker] = sync_of(across, CONFIG, worker, fakes[worker], parameters, **options)
        sync.begin()
        for microbatch in range(3):
            if microbatch == 2:
                sync.last_backward()
            torch.autograd.backward([p.sum() * (1 + len(n) % 3) for n, p in parameters.items()])
        for name, u in units.items():
            spec, value = specs[f"param/{name}"], 3.0 * (1 + len(name) % 3)
            for unit in u:
                wanted[f"param/{name}"][spec.unit_slices(unit)] += value / (
                    degree[worker] if spec.split_dim is None else 1
                )
        if overlap:
            assert fakes[worker].given, "no sum started during the last backward"
        sync.finish()
    assert all(most is None or len(set(fake.made)) <= most for fake in fakes.values())
    add_up(fakes)
    squares = torch.zeros((), dtype=torch.float64)
    for worker, sync in syncs.items():
        squares += sync.finish()
        for name in sync.local.units:
            gradient = gradient_of(sync, name)
            spec, units = specs[f"param/{name}"], dict(layout.units_of(worker))[f"param/{name}"]
            pieces = [wanted[f"param/{name}"][spec.unit_slices(unit)] for unit in units]
            assert torch.equal(
                gradient,
                wanted[f"param/{name}"]
                if spec.split_dim is None
                else torch.cat(pieces, spec.split_dim),
            ), name
    assert float(squares) == sum(
        float(tensor.double().square().sum()) for tensor in wanted.values()
    )


def add_up(fakes: dict[str, FakeGroups]) -> None:
    """What the all-reduces would have done."""
    for members in {members for fake in fakes.values() for members in fake.made}:
        for flats in zip(*(fakes[worker].given[members] for worker in members), strict=True):
            total = torch.stack(list(flats)).sum(0)
            for flat in flats:
                flat.copy_(total)


@settings(max_examples=16)
@given(st.tuples(plans(3, 4), st.sampled_from((1, 2, 4))) | st.tuples(UNEVEN, st.just(4)))
def test_each_copy_of_a_parameter_counts_once_whatever_the_plan(case: tuple[Plan, int]) -> None:
    """With a gradient of 1 everywhere at every worker the sum is the number of copies: one a stage
    that holds the parameter, however many ranks it has; each rank's where the ranks' gradients are
    parts of the sum, as those of key-value heads that several hold.
    """
    drawn, kv_heads = case
    config = tiny_config("qwen3", num_key_value_heads=kv_heads)  # tied, with partial gradients
    specs = family_of(config).parameter_specs(config)
    layout = layout_of_plan(drawn, config)
    copies: dict[str, float] = defaultdict(float)
    fakes, syncs = {}, {}
    for stage in (stage for pipeline in drawn.pipelines for stage in pipeline.stages):
        for name in stage_parameter_names(config, stage.first_layer, stage.num_layers):
            ranks = (
                stage.tp_degree
                if specs[name].partial_gradient
                else stage.tp_degree // specs[name].num_units
            )
            copies[name] += (
                max(1, ranks)
                if specs[name].partial_gradient or specs[name].split_dim is not None
                else 1
            )
        for worker in stage.workers:
            units = {n[6:]: u for n, u in layout.units_of(worker).items() if n.startswith("param/")}
            shapes = {n: layout.tensors[f"param/{n}"].local_shape(u) for n, u in units.items()}
            parameters = {n: torch.nn.Parameter(torch.zeros(shape)) for n, shape in shapes.items()}
            fakes[worker] = FakeGroups()
            sync = syncs[worker] = sync_of(drawn, config, worker, fakes[worker], parameters)
            sync.begin()
            torch.autograd.backward([p.sum() for p in parameters.values()])
            sync.finish()
    add_up(fakes)
    squares = sum(float(sync.finish()) for sync in syncs.values())
    for sync in syncs.values():
        for name in sync.local.units:
            gradient = gradient_of(sync, name)
            assert torch.equal(gradient, torch.full_like(gradient, copies[name])), name
    assert squares == sum(copies[n] ** 2 * math.prod(spec.shape) for n, spec in specs.items())


@settings(max_examples=30)
@given(UNEVEN, st.sampled_from((torch.float32, torch.bfloat16)))
def test_gradients_take_one_value_a_parameter_whoever_else_holds_it(
    drawn: Plan, dtype: torch.dtype
) -> None:
    """So the planner counts them.

    Nothing stays beside the buckets after a backward pass, be other holders' slices finer or not.
    """
    config = tiny_config("llama", vocab_size=64, intermediate_size=64)
    layout = layout_of_plan(drawn, config)
    for stage in (stage for pipeline in drawn.pipelines for stage in pipeline.stages):
        for worker in stage.workers:
            units = {n[6:]: u for n, u in layout.units_of(worker).items() if n.startswith("param/")}
            shapes = {n: layout.tensors[f"param/{n}"].local_shape(u) for n, u in units.items()}
            parameters = {
                n: torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
                for n, shape in shapes.items()
            }
            sync = sync_of(drawn, config, worker, FakeGroups(), parameters)
            pieces = sum(len(sync.local.buffers[index].pieces) for index in sync.local.held)
            beside = sum(flat.numel() for flat in sync.flats.values()) - sum(
                math.prod(s) for s in shapes.values()
            )
            assert 0 <= beside < ALIGNMENT * pieces
            sync.begin()
            torch.autograd.backward([p.sum() for p in parameters.values()])
            held = {flat.untyped_storage().data_ptr() for flat in sync.flats.values()}
            left = [p.grad for p in parameters.values() if p.grad is not None]
            assert {gradient.untyped_storage().data_ptr() for gradient in left} <= held


@settings(max_examples=30)
@given(plans(6, 4, uneven=True), st.booleans(), st.sampled_from((1, 2, 4)))
def test_the_planner_knows_every_set_of_holders(drawn: Plan, tied: bool, kv_heads: int) -> None:
    """And merges them as the runtime does: one list of groups, in one order at every worker."""
    changes = {"tie_word_embeddings": tied, "num_key_value_heads": kv_heads}
    config = tiny_config(
        "llama", vocab_size=64, intermediate_size=64, num_hidden_layers=6, **changes
    )
    found = groups_by_holders(drawn, config, plan_buffers(drawn, config), max_sync_groups(drawn))
    assert set(found) <= set(holder_sets(drawn, tied=tied, key_value_units=kv_heads))
    counts = Counter(worker for group in set(found.values()) for worker in group)
    assert max(counts.values(), default=0) <= max_sync_groups(drawn)


def test_it_goes_when_it_is_dropped() -> None:
    """A cycle through a parameter's hooks would keep each generation's gradients, groups and
    threads for good.
    """
    worker = ACROSS.workers[0]
    specs = {
        name: spec
        for name, spec in layout_of_plan(ACROSS, CONFIG).tensors.items()
        if name.startswith("param/")
    }
    units = {name: u for w, name, _, u in held_units(ACROSS, CONFIG) if w == worker}
    parameters = {
        n: torch.nn.Parameter(torch.zeros(specs[f"param/{n}"].local_shape(u)))
        for n, u in units.items()
    }
    sync = sync_of(ACROSS, CONFIG, worker, FakeGroups(), parameters)
    sync.begin()
    sum(parameter.sum() for parameter in parameters.values()).backward()  # type: ignore[union-attr]
    gone = weakref.ref(sync)
    del sync, parameters
    gc.collect()
    assert gone() is None
