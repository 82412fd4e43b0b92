"""Sums each parameter's gradient over everyone who holds it, however the pipelines are cut.

The unit of the sum is the shard (parameter, unit). Shards with the same set of holders share buckets, flat fp32 tensors, one all-reduce each;
so a worker of two pipelines that are cut differently, or of different TP degree, meets different partners for different layers. A parameter
that all t ranks of a tensor-parallel group hold whole is contributed as gradient / t by each, so that every pipeline counts once (whole, where
each rank's gradient is a part of the sum). Tied embeddings need nothing more: first and last stages are holders of one shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from autohet.runtime.groups import GenerationGroups, Group
from autohet.runtime.layout import held_units
from planner.plan import Plan

BUCKET_BYTES = 32 << 20


@dataclass(frozen=True)
class Slice:
    """One shard of a local gradient: where it lies in the local tensor and by what the local gradient is multiplied before the sum."""

    parameter: str
    dim: int
    start: int
    length: int
    weight: float
    num_elements: int


@dataclass(frozen=True)
class Bucket:
    """Slices with the same holders."""

    holders: tuple[str, ...]
    slices: tuple[Slice, ...]

    @property
    def num_elements(self) -> int:
        return sum(piece.num_elements for piece in self.slices)


def make_buckets(plan: Plan, config: PreTrainedConfig, me: str, bucket_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """This worker's buckets, in an order that all holders of a bucket share."""
    holders: dict[tuple[str, int], list[str]] = defaultdict(list)
    mine: dict[tuple[str, int], Slice] = {}
    degree = {worker: stage.tp_degree for pipeline in plan.pipelines for stage in pipeline.stages for worker in stage.workers}
    for worker, name, spec, units in held_units(plan, config):
        for unit in units:
            holders[name, unit].append(worker)
        if worker == me:
            weight = 1.0 if spec.split_dim is not None or spec.partial_gradient else 1.0 / degree[me]
            position = 0
            for unit in units:
                dim = spec.split_dim or 0
                length = spec.shape[dim] if spec.split_dim is None else spec.cuts[unit + 1] - spec.cuts[unit]
                elements = length * int(torch.Size(spec.shape).numel()) // spec.shape[dim]
                mine[name, unit] = Slice(name, dim, position, length, weight, elements)
                position += length
    by_holders: dict[tuple[str, ...], list[Slice]] = defaultdict(list)
    for key in sorted(mine):
        by_holders[tuple(sorted(holders[key]))].append(mine[key])
    return [bucket for members in sorted(by_holders) for bucket in _cut(members, by_holders[members], bucket_bytes)]


def _cut(holders: tuple[str, ...], slices: Sequence[Slice], limit: int) -> list[Bucket]:
    buckets: list[list[Slice]] = [[]]
    size = 0
    for piece in slices:
        if buckets[-1] and size + 4 * piece.num_elements > limit:
            buckets.append([])
            size = 0
        buckets[-1].append(piece)
        size += 4 * piece.num_elements
    return [Bucket(holders, tuple(pieces)) for pieces in buckets]


class GradientSync:
    """One worker's part of the gradient sums of one generation. Built by every worker of the plan in the same order of groups."""

    def __init__(self, plan: Plan, config: PreTrainedConfig, me: str, groups: GenerationGroups) -> None:
        self.buckets = make_buckets(plan, config, me)
        self._groups: dict[tuple[str, ...], Group] = {
            holders: groups.group(holders) for holders in group_order(plan, config) if me in holders
        }

    def run(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Sum `gradients` (fp32, local slices by parameter name) over their holders, in place; blocks.

        Returns this worker's part of the squared norm of the summed gradient: each shard's sum of squares over its number of
        holders, float64; all parts together are the exact square of the global norm.
        """
        flats = [self._pack(bucket, gradients) for bucket in self.buckets]
        works = [(self._groups[b.holders], self._groups[b.holders].start_all_reduce(f)) for b, f in zip(self.buckets, flats, strict=True) if len(b.holders) > 1]
        for group, work in works:
            group.wait(work)
        device = flats[0].device if flats else torch.device("cpu")
        total = torch.zeros((), dtype=torch.float64, device=device)
        for bucket, flat in zip(self.buckets, flats, strict=True):
            total += flat.double().square().sum() / len(bucket.holders)
            self._unpack(bucket, flat, gradients)
        return total

    @staticmethod
    def _views(bucket: Bucket, flat: Tensor, gradients: Mapping[str, Tensor]) -> list[tuple[Slice, Tensor, Tensor]]:
        views, position = [], 0
        for piece in bucket.slices:
            local = gradients[piece.parameter].narrow(piece.dim, piece.start, piece.length)
            views.append((piece, local, flat[position : position + piece.num_elements].view(local.shape)))
            position += piece.num_elements
        return views

    def _pack(self, bucket: Bucket, gradients: Mapping[str, Tensor]) -> Tensor:
        device = gradients[bucket.slices[0].parameter].device
        flat = torch.empty(bucket.num_elements, dtype=torch.float32, device=device)
        for piece, local, place in self._views(bucket, flat, gradients):
            torch.mul(local, piece.weight, out=place) if piece.weight != 1.0 else place.copy_(local)
        return flat

    def _unpack(self, bucket: Bucket, flat: Tensor, gradients: Mapping[str, Tensor]) -> None:
        if len(bucket.holders) == 1 and all(piece.weight == 1.0 for piece in bucket.slices):
            return
        for _, local, place in self._views(bucket, flat, gradients):
            local.copy_(place)


def group_order(plan: Plan, config: PreTrainedConfig) -> list[tuple[str, ...]]:
    """Every set of two or more holders that some shard has, in the order in which all workers build the groups."""
    holders: dict[tuple[str, int], list[str]] = defaultdict(list)
    for worker, name, _, units in held_units(plan, config):
        for unit in units:
            holders[name, unit].append(worker)
    return sorted({tuple(sorted(members)) for members in holders.values() if len(members) > 1})
