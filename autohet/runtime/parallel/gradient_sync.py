"""Sums each parameter's gradient over everyone who holds it, however the pipelines are cut.

The gradient of the whole batch is a sum over tokens; each pipeline sums over its own microbatches, and every holder of a shard
(parameter, unit) must end with the whole sum. Shards with the same *holder set* share buckets, flat fp32 tensors, one all-reduce each:

    G[u] = sum over holders w of u:  c_w * g_w[u]        c_w = 1 / t_w where w's tensor-parallel group of t_w ranks holds u whole, else 1

So a worker of two pipelines that are cut differently, or of different TP degree, meets different partners for different layers, and each
pipeline counts once (t_w is a power of two: the division is exact; where each rank's gradient is a part of the sum, c_w = 1). Tied
embeddings need nothing more: first and last stages are holders of one shard. Pipelines need no weights: the trainer divides the sum once by
the number of tokens of the global batch.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import Work
from transformers import PreTrainedConfig

from autohet.runtime.groups import GenerationGroups, Group
from autohet.runtime.layout import held_units
from autohet.runtime.models import family_of
from autohet.runtime.models.family import EMBEDDING, HEAD, ParameterSpec
from planner.communicators import sync_groups
from planner.plan import Plan

BUCKET_BYTES = 32 << 20


@dataclass(frozen=True)
class Piece:
    """Some units of one parameter side by side along its split dimension: row-major, at `offset` elements of its bucket."""

    parameter: str
    units: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Pieces with the same holders, sorted by name; the first holder counts them in the global norm."""

    holders: tuple[str, ...]
    pieces: tuple[Piece, ...]

    @property
    def num_elements(self) -> int:
        return sum(piece.num_elements for piece in self.pieces)


def plan_buckets(plan: Plan, config: PreTrainedConfig, bucket_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """All buckets of a plan: the same list at every worker, in the order in which backward passes complete them (last layers first)."""
    specs: dict[str, ParameterSpec] = {}
    holders: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for worker, name, spec, units in held_units(plan, config):
        specs[name] = spec
        for unit in units:
            holders[name][unit].append(worker)
    full: list[Bucket] = []
    open_pieces: dict[tuple[str, ...], list[Piece]] = defaultdict(list)
    for name in sorted(specs, key=lambda name: (_backward_rank(specs[name]), name)):
        for members, units in _group_units(holders[name]).items():
            pieces = open_pieces[members]
            offset = pieces[-1].offset + pieces[-1].num_elements if pieces else 0
            shape = _shape(specs[name], units)
            if pieces and 4 * (offset + math.prod(shape)) > bucket_bytes:
                full.append(Bucket(members, tuple(pieces)))
                pieces.clear()
                offset = 0
            pieces.append(Piece(name, units, shape, offset))
    return (*full, *(Bucket(members, tuple(pieces)) for members, pieces in open_pieces.items() if pieces))


def _backward_rank(spec: ParameterSpec) -> float:
    return {HEAD: -math.inf, EMBEDDING: math.inf}.get(spec.layer, float(-spec.layer))


def _group_units(holders: Mapping[int, list[str]]) -> dict[tuple[str, ...], tuple[int, ...]]:
    grouped: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for unit in sorted(holders):
        grouped[tuple(sorted(holders[unit]))].append(unit)
    return {members: tuple(units) for members, units in grouped.items()}


def _shape(spec: ParameterSpec, units: tuple[int, ...]) -> tuple[int, ...]:
    if spec.split_dim is None:
        return tuple(spec.shape)
    size = sum(spec.cuts[unit + 1] - spec.cuts[unit] for unit in units)
    return (*spec.shape[: spec.split_dim], size, *spec.shape[spec.split_dim + 1 :])


def groups_by_holders(
    plan: Plan, config: PreTrainedConfig, most: int | None = None
) -> dict[tuple[str, ...], tuple[str, ...]]:
    """The group of each set of two or more holders that some shard has: these workers, or a superset where a worker would be in more
    than `most` groups. All workers build the groups in sorted order.
    """
    tied = family_of(config).tied_head(config)
    group_of = sync_groups(plan, tied=tied, most=most)
    return {b.holders: group_of[b.holders] for b in plan_buckets(plan, config) if len(b.holders) > 1}


@dataclass(frozen=True)
class _Run:
    """Some units side by side of a local gradient, along its split dimension, and where their bucket has them."""

    dim: int
    start: int
    length: int
    view: Tensor

    def of(self, gradient: Tensor) -> Tensor:
        return gradient.narrow(self.dim, self.start, self.length)


class _LocalPiece:
    """A piece on this worker: its view of the bucket, and which runs of the local gradient that is."""

    def __init__(
        self, piece: Piece, spec: ParameterSpec, local_units: tuple[int, ...], flat: Tensor, weight: float
    ) -> None:
        self.parameter, self.weight = piece.parameter, weight
        self.view = flat[piece.offset : piece.offset + piece.num_elements].view(piece.shape)
        self.is_whole = piece.units == local_units
        self.runs = [_Run(0, 0, piece.shape[0], self.view)] if self.is_whole else self._runs(piece, spec, local_units)

    def _runs(self, piece: Piece, spec: ParameterSpec, local_units: tuple[int, ...]) -> list[_Run]:
        assert spec.split_dim is not None, f"{piece.parameter} has units apart, but is not split"
        runs, start, position = list[_Run](), 0, 0
        for mine, units in itertools.groupby(local_units, piece.units.__contains__):
            length = sum(spec.cuts[unit + 1] - spec.cuts[unit] for unit in units)
            if mine:
                runs.append(_Run(spec.split_dim, start, length, self.view.narrow(spec.split_dim, position, length)))
                position += length
            start += length
        return runs


class GradientSync:
    """This worker's fp32 gradients of one step: accumulated over microbatches, then summed over their holders.

    Built by every worker of the plan, in the same order of groups. Per step: `begin`; backward passes, `last_backward` called before the
    last one (with `overlap`, a bucket's sum starts as soon as that pass has completed it); `finish`. From then on `gradient` gives the sums
    of the local slices, the same bits at every holder, until the next `begin`. Gradients lie in the buckets alone: where a worker holds
    exactly one piece of a parameter, its gradient is a view of the bucket; where other holders have finer slices, each microbatch's is
    added to the pieces.
    """

    def __init__(
        self, plan: Plan, config: PreTrainedConfig, me: str, groups: GenerationGroups, parameters: Mapping[str, nn.Parameter],
        tp_degree: int,
        *, overlap: bool = True,
    ) -> None:  # fmt: skip
        self._me, self._parameters, self._overlap = me, dict(parameters), overlap
        members = groups_by_holders(plan, config, groups.back_end.max_sync_groups(plan))
        built = {each: groups.group(each) for each in sorted(set(members.values())) if me in each}
        self.buckets = tuple(
            bucket for bucket in plan_buckets(plan, config) if me in members.get(bucket.holders, bucket.holders)
        )
        self._groups: list[Group | None] = [
            built[members[bucket.holders]] if bucket.holders in members else None for bucket in self.buckets
        ]
        held = {name: (spec, units) for worker, name, spec, units in held_units(plan, config) if worker == me}
        assert set(held) == set(self._parameters), sorted(set(held) ^ set(self._parameters))
        device = next(iter(self._parameters.values())).device if self._parameters else groups.device
        self._device = device
        self._flats = [
            torch.zeros(bucket.num_elements if me in bucket.holders else 0, dtype=torch.float32, device=device)
            for bucket in self.buckets
        ]
        self._pieces = [
            [
                _LocalPiece(piece, *held[piece.parameter], flat, _weight(held[piece.parameter][0], tp_degree))
                for piece in bucket.pieces
                if me in bucket.holders
            ]
            for bucket, flat in zip(self.buckets, self._flats, strict=True)
        ]
        mine = [piece for pieces in self._pieces for piece in pieces]
        self._whole = {piece.parameter: piece.view for piece in mine if piece.is_whole}
        self._runs: dict[str, list[_Run]] = defaultdict(list)
        for piece in mine:
            self._runs[piece.parameter] += piece.runs
        self._buckets_of = {
            name: [i for i, b in enumerate(self.buckets) if any(p.parameter == name for p in b.pieces)] for name in held
        }
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), name))  # type: ignore[no-untyped-call]
        self._reset()

    def _reset(self) -> None:
        self._is_last, self._next = False, 0
        self._works: list[Work | None] = []
        self._missing = [len(pieces) for pieces in self._pieces]

    def begin(self) -> None:
        """Forget the last step's gradients."""
        for flat in self._flats:
            flat.zero_()
        for name, parameter in self._parameters.items():  # fp32: autograd adds straight into the buffer
            parameter.grad = self._whole.get(name) if parameter.dtype == torch.float32 else None
        self._reset()

    def last_backward(self) -> None:
        """The next backward pass is the step's last."""
        self._is_last = True

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        found = parameter.grad
        if found is not None and found is not self._whole.get(name):
            for run in self._runs[name]:
                run.view.add_(run.of(found))
            parameter.grad = None
        if self._is_last and self._overlap:
            for index in self._buckets_of[name]:
                self._missing[index] -= 1
            while self._next < len(self.buckets) and self._missing[self._next] <= 0:
                self._start(self._next)

    def _start(self, index: int) -> None:
        """Start a bucket's sum; always in the order of `buckets`, which all holders share."""
        self._next = index + 1
        for piece in self._pieces[index]:
            if piece.weight != 1.0:
                piece.view.mul_(piece.weight)
        group, bucket = self._groups[index], self.buckets[index]
        if group is not None and self._me not in bucket.holders:
            # A group of several sets of holders: zeros for a bucket of others, forgotten as soon as the stream has sent them.
            zeros = torch.zeros(bucket.num_elements, dtype=torch.float32, device=self._device)
            group.all_reduce(zeros)
            group = None
        self._works.append(None if group is None else group.start_all_reduce(self._flats[index]))

    def finish(self) -> Tensor:
        """Start what has not started, wait for all; every holder calls it; blocks. Raises PeerLost, Interrupted.

        Returns this worker's part of the squared norm of the summed gradient, float64: the sum of squares of the shards of which it is the
        first holder, so that over all workers each shard counts once. Finite exactly when those gradients are.
        """
        while self._next < len(self.buckets):
            self._start(self._next)
        total = torch.zeros((), dtype=torch.float64, device=self._flats[0].device if self._flats else None)
        for index, (bucket, work) in enumerate(zip(self.buckets, self._works, strict=True)):
            group = self._groups[index]
            if group is not None:
                group.wait_on_stream(work)
            if bucket.holders[0] == self._me:
                for part in torch.split(self._flats[index], 1 << 20):
                    total += part.double().square_().sum()
        self._works = [None] * len(self.buckets)
        return total

    @property
    def names(self) -> Collection[str]:
        """Of the parameters that this worker holds."""
        return self._parameters.keys()

    def gradient(self, name: str) -> Tensor:
        """Of the local slice; a copy where it lies in several pieces."""
        if name in self._whole:
            return self._whole[name]
        put_together = torch.empty_like(self._parameters[name], dtype=torch.float32, requires_grad=False)
        for run in self._runs[name]:
            run.of(put_together).copy_(run.view)
        return put_together


def _hook(sync: weakref.ref[GradientSync], name: str) -> Callable[[Tensor], None]:
    """Weak: the garbage collector does not see through a parameter's hooks, and a generation's buffers and groups would stay for good."""

    def accumulated(parameter: Tensor) -> None:
        alive = sync()
        if alive is not None:
            alive._accumulated(name, parameter)

    return accumulated


def _weight(spec: ParameterSpec, tp_degree: int) -> float:
    return 1.0 if spec.split_dim is not None or spec.partial_gradient else 1.0 / tp_degree
