"""Seconds of every layer by GPU type, TP degree, microbatch, recomputation and share of a rank."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from planner.arrays import Floats
from planner.cost.layers.even_layers import EvenLayerTimes, LayerTimes, own_s
from planner.cost.layers.experts import USUAL_LOAD_SPREAD, imbalance
from planner.cost.layers.measured_layers import MeasuredLayers
from planner.cost.layers.roofline import dequantized_bytes
from planner.cost.memory.offload import host_link_bytes_per_s
from planner.cost.memory.training_bytes import VALUE_BYTES, recomputed_values
from planner.cost.parameters import CostParameters
from planner.errors import ConfigError
from planner.inputs.catalogue import canonical_gpu_type, find_gpu_type
from planner.plans.model_spec import Experts, LayerSpec
from planner.plans.plan import Recompute, TensorShare

# of a block's forward, where the device's memory bandwidth is not known: what `selective` computes
# again
SELECTIVE_FORWARD = 0.2


class _Rank(NamedTuple):
    """One rank of a group of one GPU type. share: its own; None: 1 / TP degree."""

    gpu_type: str
    tp_degree: int
    microbatch: int
    share: TensorShare | None

    @property
    def group(self) -> tuple[str, int, int]:
        return self.gpu_type, self.tp_degree, self.microbatch

    @property
    def fraction(self) -> float:
        """Part that it has of what its group cuts."""
        return 1 / self.tp_degree if self.share is None else self.share.fraction


class LayerTimeModel:
    """Layer times of one model at one sequence length and dtype; results are cached.

    even: times of even groups whose experts have equal loads, from which all others are made.
    tp_communication_s(gpu_type, tp_degree, microbatch): seconds of one block's tensor-parallel
    all-reduces in one direction.
    """

    def __init__(
        self,
        measured: MeasuredLayers,
        parameters: CostParameters,
        tp_communication_s: Callable[[str, int, int], float],
    ) -> None:
        self.measured = measured
        self.even = EvenLayerTimes(measured, parameters, tp_communication_s)
        self._spec = measured.spec
        self._parameters = parameters
        self._cache: dict[tuple[object, ...], LayerTimes] = {}

    def times(
        self,
        gpu_type: str,
        tp_degree: int,
        microbatch: int,
        recompute: Recompute = "none",
        share: TensorShare | None = None,
    ) -> LayerTimes:
        """Return all layers' seconds for one microbatch.

        The forward covers all forward passes of a step (`LayerSpec.forward_passes`), and the
        backward of blocks what it recomputes. share: the worker's share in a group of `tp_degree`
        workers that share the layers unevenly; None: 1 / TP degree.
        """
        rank = _Rank(canonical_gpu_type(gpu_type), tp_degree, microbatch, share)
        found = self._single_pass(rank, recompute)
        passes = self._spec.forward_passes
        return found if passes == 1 else replace(found, forward_s=passes * found.forward_s)

    def _single_pass(self, rank: _Rank, recompute: Recompute) -> LayerTimes:
        """Return `times` for a step with one forward pass."""
        held = self._experts.of_share(rank.share) if self._experts and rank.share else None
        key = (*rank.group, recompute, rank.fraction, held)
        known = self._cache.get(key)
        if known is None:
            if recompute == "none":
                known = self._without_recomputation(rank)
            else:
                known = self._with_recomputation(rank, recompute)
            self._cache[key] = known
        return known

    def _without_recomputation(self, rank: _Rank) -> LayerTimes:
        """Return the times of a worker that recomputes nothing."""
        if rank.share is None:
            times = self.even.times(*rank.group)
        else:
            times = self._interpolate(rank)
        return self._with_largest_load(times, rank)

    def _with_recomputation(self, rank: _Rank, recompute: Recompute) -> LayerTimes:
        """Return the times of a worker whose backward includes what it recomputes."""
        # the runtime does not compile blocks that recompute selectively
        model = self._eager if recompute == "selective" else self
        whole = model._single_pass(rank, "none")
        backward_s = whole.backward_s.copy()
        backward_s[1:-1] += self._again_s(rank, whole.forward_s[1:-1], recompute)
        if recompute != "offload":
            return replace(whole, backward_s=backward_s)

        # copies to and from host memory run beside the passes
        tokens = rank.microbatch * self.measured.sequence_length
        input_bytes = tokens * self._spec.hidden_size * VALUE_BYTES[self.measured.dtype]
        copy_s = input_bytes / host_link_bytes_per_s(rank.gpu_type, self._parameters)
        forward_s = whole.forward_s.copy()
        for seconds in (forward_s, backward_s):
            seconds[1:-1] = np.maximum(seconds[1:-1], copy_s)
        return replace(whole, forward_s=forward_s, backward_s=backward_s)

    def _again_s(self, rank: _Rank, forward_s: Floats, recompute: Recompute) -> Floats:
        """Return seconds that each block takes to recompute.

        `full` and `offload`: its forward pass. `selective`, which keeps products: the memory
        traffic of the rest, each scalar written once and read twice, and of quantized weights;
        or a fixed share of the forward if the device's bandwidth is unknown.
        """
        if recompute != "selective":
            return forward_s
        device = find_gpu_type(rank.gpu_type)
        if device is None:
            return SELECTIVE_FORWARD * forward_s

        tokens = rank.microbatch * self.measured.sequence_length
        cut = 1 / rank.fraction
        values = np.array([recomputed_values(block, cut) for block in self._spec.blocks])
        dtype = self.measured.dtype
        moved_bytes = 3 * values * tokens * VALUE_BYTES[dtype]
        # products are kept, but not the weights that they were made of
        moved_bytes += [dequantized_bytes(block, cut, dtype) for block in self._spec.blocks]
        bytes_per_s = device.memory_bytes_per_s * self._parameters.memory_efficiency
        return np.minimum(forward_s, moved_bytes / bytes_per_s)

    def _interpolate(self, rank: _Rank) -> LayerTimes:
        """Return the times of a worker that has a share of its own of what its group cuts.

        A layer's own time is linear in the share between the two nearest TP degrees that are powers
        of two. The group's communication is added.
        """
        gpu_type, tp_degree, _, _ = rank
        fraction = rank.fraction
        # the TP degrees whose parts are just larger and just smaller than the fraction
        wide = 2 ** int(math.log2(1 / fraction))
        weight = 2 * wide * fraction - 1
        narrow = 2 * wide if weight < 1 else wide
        wide_s, wide_notes = self._eager._without_communication(rank, wide)
        narrow_s, narrow_notes = self._eager._without_communication(rank, narrow)
        forward_s, backward_s, update_s = weight * wide_s + (1 - weight) * narrow_s
        communication_s = self.even.block_communication_s(*rank.group)
        note = (
            f"{fraction:.1%} of a layer on {gpu_type}, TP {tp_degree}: from TP {wide} and TP"
            f" {narrow}, in proportion"
        )
        return LayerTimes(
            forward_s=forward_s + communication_s,
            backward_s=backward_s + communication_s,
            update_s=update_s,
            estimated=tuple(dict.fromkeys((*wide_notes, *narrow_notes, note))),
        )

    def _without_communication(self, rank: _Rank, tp_degree: int) -> tuple[Floats, tuple[str, ...]]:
        """Return the seconds of every layer at a TP degree without communication, and notes.

        Seconds: forward, backward and update, [3, num_layers + 2]. Notes: what is estimated.
        """
        group = rank.gpu_type, tp_degree, rank.microbatch
        times = self.even.times(*group)
        had = self.even.block_communication_s(*group)
        forward_s = own_s(times.forward_s, had)
        backward_s = own_s(times.backward_s, had)
        return np.array([forward_s, backward_s, times.update_s]), times.estimated

    @cached_property
    def _eager(self) -> "LayerTimeModel":
        """Times of blocks that are not compiled though others are (`compiles_blocks`)."""
        if not self._parameters.compiles_blocks:
            return self
        parameters = replace(self._parameters, compiles_blocks=False)
        return LayerTimeModel(self.measured, parameters, self.even.tp_communication_s)

    @cached_property
    def _experts(self) -> Experts | None:
        """Routed experts of the model, looked up once; None: all blocks are dense."""
        return self._spec.experts

    def _with_largest_load(
        self,
        times: LayerTimes,
        rank: _Rank,
    ) -> LayerTimes:
        """Return the times of a rank whose experts have the load of the group's largest.

        The experts' part of a block's own time, by FLOPs, grows with the load. A measurement of a
        whole group already has what more experts on one rank take.
        """
        if self._experts is None or rank.tp_degree == 1:
            return times
        measured = self.measured.load_spread
        spread = USUAL_LOAD_SPREAD if measured is None else measured
        key = self.measured.key(rank.gpu_type, rank.tp_degree)

        # blocks of one kind share a result: a model has hundreds of blocks of one or two kinds
        added: dict[tuple[LayerSpec, bool], float] = {}
        growth = np.zeros(self._spec.num_layers + 2)
        for index, block in enumerate(self._spec.blocks):
            is_measured = rank.share is None and bool(self.measured.points(key, f"block:{index}"))
            kind = block, is_measured
            if kind not in added:
                added[kind] = self._added_by_load(block, rank, spread, is_measured)
            growth[index + 1] = added[kind]

        had = self.even.block_communication_s(*rank.group)
        forward_s = times.forward_s + growth * own_s(times.forward_s, had)
        backward_s = times.backward_s + growth * own_s(times.backward_s, had)
        notes = times.estimated
        if measured is None:
            notes += (f"loads of experts: a spread of {spread:.0%} of their mean is assumed",)
        return replace(times, forward_s=forward_s, backward_s=backward_s, estimated=notes)

    def _added_by_load(
        self,
        block: LayerSpec,
        rank: _Rank,
        spread: float,
        is_measured: bool,
    ) -> float:
        """Return the seconds that unequal loads add to a block, over the block's own seconds."""
        experts = block.experts
        if experts is None:
            return 0.0
        held = experts.on_rank(rank.tp_degree)
        fraction = rank.fraction
        if rank.share is not None:
            held = experts.of_share(rank.share)
        elif is_measured:
            fraction = held / experts.number
        routed = experts.parameters * experts.per_token / experts.number
        flops = 2.0 * routed * self.measured.sequence_length
        load = imbalance(experts, held, fraction, rank.tp_degree, spread)
        return (load - 1.0) * flops / block.forward_flops(self.measured.sequence_length)


def require_dtype(dtype: str) -> None:
    """Raise ConfigError for a precision that the model does not know."""
    if dtype not in VALUE_BYTES:
        raise ConfigError(f"precision is '{dtype}'; known: {', '.join(VALUE_BYTES)}")
