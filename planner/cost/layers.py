"""Seconds of every layer by GPU type, TP degree and microbatch.

They are measured, interpolated, or an estimate that says so.

Order of preference, for one (GPU type, dtype, sequence length, TP degree):
1. Measured points of this model: piecewise linear in the microbatch, kept non-decreasing, extended
by the slope of its last half.
2. One measured point: split into launch, work and tensor-parallel communication, of which only the
last two grow (`PointSplit`).
3. Another TP degree of this model and GPU: work divided, communication added from the link
(flagged).
4. `estimate.py`: a measured model of the same GPU, scaled by FLOPs, else measured rates of the
GPU's parts (flagged).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.catalogue import canonical_gpu_type, find_gpu_type
from planner.cost.estimate import (
    Estimate,
    estimate_layer,
    estimate_update_s,
    is_measured,
    rates_of,
)
from planner.cost.experts import USUAL_LOAD_SPREAD, imbalance
from planner.cost.memory import VALUE_BYTES, recomputed_values
from planner.cost.parameters import CostParameters
from planner.cost.roofline import LayerWork, fp8_ratios
from planner.errors import ConfigError
from planner.model_spec import Experts, LayerSpec, ModelSpec
from planner.plan import Recompute, TensorShare
from planner.profile import Measurement, ProfileKey, ProfileTable, default_profile

Floats = NDArray[np.float64]
# of a layer's measured time, that is its own at the least, whatever the link's model says of its
# communication
LEAST_OWN = 0.2
# of a block's forward, where the device's memory bandwidth is not known: what `selective` computes
# again
SELECTIVE_FORWARD = 0.2


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one microbatch in every layer.

    Arrays (num_layers + 2,): embedding, blocks, head. update_s: seconds of one optimizer step.
    estimated: the values that were not measured, one sentence each.
    """

    forward_s: Floats
    backward_s: Floats
    update_s: Floats
    estimated: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by microbatch: increasing `microbatches`, non-decreasing `seconds`."""

    microbatches: Floats
    seconds: Floats

    def at(self, microbatch: int) -> float:
        """Return seconds at a microbatch size: piecewise linear between the points.

        Outside the points: the straight line through the nearer half of them, never negative.
        """
        x = self.microbatches
        y = self.seconds
        if len(x) == 1:
            return float(y[0] * microbatch / x[0])
        if microbatch > x[-1]:
            half = max(2, len(x) // 2)
            slope = max(0.0, float(np.polyfit(x[-half:], y[-half:], 1)[0]))
            return float(y[-1] + slope * (microbatch - x[-1]))
        if microbatch < x[0]:
            slope = float(y[1] - y[0]) / float(x[1] - x[0])
            return max(float(y[0] * microbatch / x[0]), float(y[0] - slope * (x[0] - microbatch)))
        return float(np.interp(microbatch, x, y))

    def in_run(self, microbatch: int, launch_exposure: float) -> float:
        """Return `at`, with only a share `launch_exposure` of the launch time.

        Launch time: the seconds beyond work in proportion to the largest measured microbatch.
        """
        seconds = self.at(microbatch)
        work = float(self.seconds[-1]) * microbatch / float(self.microbatches[-1])
        return seconds - (1.0 - launch_exposure) * max(0.0, seconds - work)


def make_curve(points: Mapping[int, float]) -> Curve:
    """Return a curve through measured points.

    It is made non-decreasing by pooling neighbours that fall (isotonic regression).
    """
    x = np.array(sorted(points), dtype=np.float64)
    blocks: list[tuple[float, int]] = []
    for value in (points[int(b)] for b in x):
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, n), (b, m) = blocks[-2:]
            blocks[-2:] = [((a * n + b * m) / (n + m), n + m)]
    return Curve(x, np.array([value for value, count in blocks for _ in range(count)]))


@dataclass
class LayerTimeModel:
    """Layer times of one model at one sequence length and dtype; results are cached.

    tp_communication_s(gpu_type, tp_degree, microbatch): seconds of one block's tensor-parallel
    all-reduces in one direction.
    """

    profile: ProfileTable
    spec: ModelSpec
    model: str
    dtype: str
    sequence_length: int
    parameters: CostParameters
    tp_communication_s: Callable[[str, int, int], float]
    borrow: bool = True
    _cache: dict[tuple[object, ...], LayerTimes] = field(default_factory=dict)
    _balanced_times: dict[tuple[str, int, int], LayerTimes] = field(default_factory=dict)
    _curves: dict[tuple[ProfileKey, str, bool], Curve] = field(default_factory=dict)
    _sources: dict[tuple[str, int, bool], "LayerTimeModel"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = {key.model for key in self.profile.keys}
        if self.model not in names and self.spec.name in names:
            self.model = self.spec.name
        elif self.model not in names and len(names) == 1:
            self.model = next(iter(names))

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
        found = self._single_pass(gpu_type, tp_degree, microbatch, recompute, share)
        passes = self.spec.forward_passes
        return found if passes == 1 else replace(found, forward_s=passes * found.forward_s)

    def _single_pass(
        self,
        gpu_type: str,
        tp_degree: int,
        microbatch: int,
        recompute: Recompute = "none",
        share: TensorShare | None = None,
    ) -> LayerTimes:
        """Return `times` for a step with one forward pass."""
        gpu_type = canonical_gpu_type(gpu_type)
        fraction = 1 / tp_degree if share is None else share.fraction
        held = self._experts.of_share(share) if self._experts and share else None
        key = (gpu_type, tp_degree, microbatch, recompute, fraction, held)
        if key not in self._cache:
            if recompute == "none" and share is None:
                found = self._balanced(gpu_type, tp_degree, microbatch)
                self._cache[key] = self._unbalanced(found, gpu_type, tp_degree, microbatch)
            elif recompute == "none":
                found = self._between(gpu_type, tp_degree, microbatch, fraction)
                self._cache[key] = self._unbalanced(found, gpu_type, tp_degree, microbatch, share)
            else:
                model = self._eager if recompute == "selective" else self
                whole = model._single_pass(gpu_type, tp_degree, microbatch, share=share)
                again = self._again_s(
                    gpu_type, 1 / fraction, microbatch, whole.forward_s[1:-1], recompute
                )
                backward = whole.backward_s.copy()
                backward[1:-1] += again
                self._cache[key] = replace(whole, backward_s=backward)
        return self._cache[key]

    def _again_s(
        self,
        gpu_type: str,
        tp_degree: float,
        microbatch: int,
        forward_s: Floats,
        recompute: Recompute,
    ) -> Floats:
        """Return seconds that each block takes to recompute.

        `full`: its forward pass. `selective`, which keeps products: the memory traffic of the rest,
        each scalar written once and read twice, or a fixed share of the forward if the device's
        bandwidth is unknown.
        """
        device = find_gpu_type(gpu_type)
        if recompute == "full":
            return forward_s
        if device is None:
            return SELECTIVE_FORWARD * forward_s
        tokens = microbatch * self.sequence_length
        values = np.array([recomputed_values(block, tp_degree) for block in self.spec.blocks])
        moved = 3 * values * tokens * VALUE_BYTES[self.dtype]
        return np.minimum(
            forward_s, moved / (device.memory_bytes_per_s * self.parameters.memory_efficiency)
        )

    def _between(
        self, gpu_type: str, tp_degree: int, microbatch: int, fraction: float
    ) -> LayerTimes:
        """Return the times of a worker that has `fraction` of what a group of `tp_degree` cuts.

        A layer's own time is linear in the fraction between the two nearest TP degrees that are
        powers of two. The group's communication is added.
        """
        wide = 2 ** int(math.log2(1 / fraction))
        weight = 2 * wide * fraction - 1
        narrow = 2 * wide if weight < 1 else wide
        one, other = (self._eager._alone(gpu_type, each, microbatch) for each in (wide, narrow))
        mixed = weight * one[0] + (1 - weight) * other[0]
        mixed[:2] += self._block_communication(gpu_type, tp_degree, microbatch)
        note = (
            f"{fraction:.1%} of a layer on {gpu_type}, TP {tp_degree}: from TP {wide} and TP"
            f" {narrow}, in proportion"
        )
        return LayerTimes(
            mixed[0], mixed[1], mixed[2], tuple(dict.fromkeys((*one[1], *other[1], note)))
        )

    def _alone(
        self, gpu_type: str, tp_degree: int, microbatch: int
    ) -> tuple[Floats, tuple[str, ...]]:
        """Return the seconds of every layer without communication, and what is estimated.

        Seconds: forward, backward and update, [3, num_layers + 2].
        """
        times = self._balanced(gpu_type, tp_degree, microbatch)
        had = self._block_communication(gpu_type, tp_degree, microbatch)
        own = [
            np.maximum(LEAST_OWN * each, each - had) for each in (times.forward_s, times.backward_s)
        ]
        return np.array([*own, times.update_s]), times.estimated

    def _block_communication(self, gpu_type: str, tp_degree: int, microbatch: int) -> Floats:
        """Return seconds of each layer's all-reduces in one direction, (num_layers + 2,).

        Embedding and head have none.
        """
        found = np.zeros(self.spec.num_layers + 2)
        found[1:-1] = self._communication(gpu_type, tp_degree, microbatch, "block")
        return found

    @cached_property
    def _num_kinds(self) -> int:
        """Number of different blocks, such as dense ones and such with experts."""
        return len(set(self.spec.blocks))

    @cached_property
    def _eager(self) -> "LayerTimeModel":
        """Times of blocks that are not compiled though others are (`compiles_blocks`)."""
        if not self.parameters.compiles_blocks:
            return self
        return self._like(parameters=replace(self.parameters, compiles_blocks=False))

    @cached_property
    def _experts(self) -> Experts | None:
        """Routed experts of the model, looked up once; None: all blocks are dense."""
        return self.spec.experts

    @cached_property
    def load_spread(self) -> float | None:
        """Measured spread of the experts' loads (`experts.load_spread`); None: not measured."""
        rows = (row for row in self.profile.measurements if row.model == self.model)
        found = [row.expert_load_spread for row in rows if row.expert_load_spread is not None]
        return fmean(found) if found else None

    def _balanced(self, gpu_type: str, tp_degree: int, microbatch: int) -> LayerTimes:
        """Return the times of an even group whose experts have equal loads."""
        key = gpu_type, tp_degree, microbatch
        if key not in self._balanced_times:
            self._balanced_times[key] = self._compute(gpu_type, tp_degree, microbatch)
        return self._balanced_times[key]

    def _unbalanced(
        self,
        times: LayerTimes,
        gpu_type: str,
        tp_degree: int,
        microbatch: int,
        share: TensorShare | None = None,
    ) -> LayerTimes:
        """Return the times of a rank whose experts have the load of the group's largest.

        The experts' part of a block's own time, by FLOPs, grows with the load. A measurement of a
        whole group already has what more experts on one rank take.
        """
        if self._experts is None or tp_degree == 1:
            return times
        measured = self.load_spread
        spread = USUAL_LOAD_SPREAD if measured is None else measured
        key = self._key(gpu_type, tp_degree)
        added: dict[tuple[LayerSpec, bool], float] = {}
        growth = np.zeros(self.spec.num_layers + 2)
        for index, block in enumerate(self.spec.blocks):
            is_measured = share is None and bool(self._points(key, f"block:{index}"))
            kind = block, is_measured
            if kind not in added:
                added[kind] = self._added_by_load(block, tp_degree, share, spread, is_measured)
            growth[index + 1] = added[kind]
        had = self._block_communication(gpu_type, tp_degree, microbatch)
        forward, backward = (
            each + growth * np.maximum(LEAST_OWN * each, each - had)
            for each in (times.forward_s, times.backward_s)
        )
        notes = times.estimated
        if measured is None:
            notes += (f"loads of experts: a spread of {spread:.0%} of their mean is assumed",)
        return replace(times, forward_s=forward, backward_s=backward, estimated=notes)

    def _added_by_load(
        self,
        block: LayerSpec,
        tp_degree: int,
        share: TensorShare | None,
        spread: float,
        is_measured: bool,
    ) -> float:
        """Return the seconds that unequal loads add to a block, over the block's own seconds."""
        experts = block.experts
        if experts is None:
            return 0.0
        held = experts.on_rank(tp_degree)
        fraction = 1.0 / tp_degree
        if share is not None:
            held = experts.of_share(share)
            fraction = share.fraction
        elif is_measured:
            fraction = held / experts.number
        routed = experts.parameters * experts.per_token / experts.number
        flops = 2.0 * routed * self.sequence_length
        load = imbalance(experts, held, fraction, tp_degree, spread)
        return (load - 1.0) * flops / block.forward_flops(self.sequence_length)

    def _compute(self, gpu_type: str, tp_degree: int, microbatch: int) -> LayerTimes:
        key = self._key(gpu_type, tp_degree)
        notes: list[str] = []
        layers = [
            ("embedding", self.spec.embedding),
            *((f"block:{i}", b) for i, b in enumerate(self.spec.blocks)),
        ]
        layers.append(("head", self.spec.head))
        found: dict[object, tuple[float, float, float]] = {}
        rows = []
        for name, layer in layers:
            points = self._points(key, name)
            if self._num_kinds > 1 and points and points is self.profile.layers(key).get("block"):
                notes.append(
                    f"blocks on {gpu_type}: the profile has one time for {self._num_kinds} kinds of"
                    " blocks; measure each kind (autohet profile)"
                )
            identity: object = id(points) if points else (name.split(":")[0], layer)
            if identity not in found:
                found[identity] = self._layer(
                    gpu_type, tp_degree, microbatch, name, layer, points, notes
                )
            rows.append(found[identity])
        table = np.array(rows)
        return LayerTimes(table[:, 0], table[:, 1], table[:, 2], tuple(dict.fromkeys(notes)))

    def _points(self, key: ProfileKey, name: str) -> Mapping[int, Measurement]:
        """Return the measurements of a layer by microbatch; empty if there are none.

        A block without a row takes the row of all blocks, else that of a block of its own kind. The
        name `block` alone stands for any block.
        """
        layers = self.profile.layers(key)
        kind, _, index = name.partition(":")
        found = layers.get(name) or layers.get(kind)
        if found or not layers or kind != "block":
            return found or {}
        own = self.spec.blocks[int(index)] if index else None
        for other, block in enumerate(self.spec.blocks):
            points = layers.get(f"block:{other}")
            if points and own in (None, block):
                return points
        return {}

    def _key(self, gpu_type: str, tp_degree: int) -> ProfileKey:
        return ProfileKey(self.model, gpu_type, self.dtype, self.sequence_length, tp_degree)

    def _layer(
        self,
        gpu_type: str,
        tp_degree: int,
        microbatch: int,
        name: str,
        layer: LayerSpec,
        points: Mapping[int, Measurement] | None,
        notes: list[str],
    ) -> tuple[float, float, float]:
        kind = name.split(":")[0]
        if points:
            forward, backward = self._measured(
                gpu_type, tp_degree, microbatch, name, points, layer.backward_share
            )
            update = next(
                (p.update_s for _, p in sorted(points.items()) if p.update_s is not None), None
            )
        else:
            forward, backward = self._unmeasured(
                gpu_type, tp_degree, microbatch, name, layer, notes
            )
            update = None
        if (
            update is None
            and (elsewhere := self._measured_degree(gpu_type, tp_degree, name)) is not None
        ):
            degree, others = elsewhere
            share = layer.parameters_per_worker(tp_degree) / max(
                layer.parameters_per_worker(degree), 1
            )
            update = next(
                (p.update_s * share for _, p in sorted(others.items()) if p.update_s is not None),
                None,
            )
        if update is None:
            update = estimate_update_s(gpu_type, layer, tp_degree, self.parameters)
            notes.append(f"optimizer of {kind} on {gpu_type}: from memory bandwidth")
        return forward, backward, update

    def _measured(
        self,
        gpu_type: str,
        tp_degree: int,
        microbatch: int,
        name: str,
        points: Mapping[int, Measurement],
        backward_share: float,
    ) -> tuple[float, float]:
        forward_points = {b: p.forward_s for b, p in points.items()}
        backward_points = {b: p.backward_s for b, p in points.items() if p.backward_s is not None}
        if len(points) == 1 and not backward_points:
            split = self._split(gpu_type, tp_degree, name, points)
            return split.at(microbatch, self.parameters, backward_share)
        key = self._key(gpu_type, tp_degree)
        exposure = self.parameters.launch_exposure
        forward = self._curve(key, name, True, forward_points).in_run(microbatch, exposure)
        if backward_points:
            return forward, self._curve(key, name, False, backward_points).in_run(
                microbatch, exposure
            )
        return forward, self.parameters.backward_ratio * backward_share * forward

    def _split(
        self, gpu_type: str, tp_degree: int, name: str, points: Mapping[int, Measurement]
    ) -> "PointSplit":
        """Launch, work and communication of a layer with one measured forward.

        At the smallest measured TP degree the launch is `launch_s`; at larger ones the work is
        divided, and the rest is launch.
        """
        ((base, measurement),) = points.items()
        communication = min(
            self._communication(gpu_type, tp_degree, base, name), 0.6 * measurement.forward_s
        )
        rest = measurement.forward_s - communication
        if not name.startswith("block"):
            return PointSplit(base, 0.0, rest, communication)
        smallest = self._smallest_degree(gpu_type, tp_degree, name, base)
        if smallest is None:
            launch = min(self.parameters.launch_s, self.parameters.launch_limit * rest)
            return PointSplit(base, launch, rest - launch, communication)
        degree, other = smallest
        work = min(
            rest, self._split(gpu_type, degree, name, {base: other}).work_s * degree / tp_degree
        )
        return PointSplit(base, rest - work, work, communication)

    def _smallest_degree(
        self, gpu_type: str, tp_degree: int, name: str, base: int
    ) -> tuple[int, Measurement] | None:
        """Return the smallest TP degree below `tp_degree` with a measurement, and that measurement.

        The layer was measured at microbatch `base`. None if there is no such degree.
        """
        for degree in (2**i for i in range(tp_degree.bit_length() - 1)):
            points = self._points(self._key(gpu_type, degree), name)
            if base in points:
                return degree, points[base]
        return None

    def _curve(
        self, key: ProfileKey, name: str, forward: bool, points: Mapping[int, float]
    ) -> Curve:
        cache_key = (key, name, forward)
        if cache_key not in self._curves:
            self._curves[cache_key] = make_curve(points)
        return self._curves[cache_key]

    def _communication(self, gpu_type: str, tp_degree: int, microbatch: int, name: str) -> float:
        if tp_degree == 1 or not name.startswith("block"):
            return 0.0
        return self.tp_communication_s(gpu_type, tp_degree, microbatch)

    def _unmeasured(
        self,
        gpu_type: str,
        tp_degree: int,
        microbatch: int,
        name: str,
        layer: LayerSpec,
        notes: list[str],
    ) -> tuple[float, float]:
        kind = name.split(":")[0]
        if self.dtype == "fp8" and not self._keys_of(gpu_type):
            return self._from_bf16(gpu_type, tp_degree, microbatch, name, layer, notes)
        other = self._measured_degree(gpu_type, tp_degree, name)
        if other is not None:
            degree, points = other
            forward, backward = self._measured(
                gpu_type, degree, microbatch, name, points, layer.backward_share
            )
            had = self._communication(gpu_type, degree, microbatch, name)
            add = self._communication(gpu_type, tp_degree, microbatch, name)
            ratio = degree / tp_degree
            notes.append(
                f"{kind} on {gpu_type} at TP {tp_degree}: from TP {degree} by FLOPs and link"
                " bandwidth"
            )
            forward, backward = (
                max(LEAST_OWN * each, each - had) * ratio + add for each in (forward, backward)
            )
            return forward, backward
        source = self._nearest_key(gpu_type, name) if self.borrow else None
        if source is not None:
            return self._borrowed(source, gpu_type, tp_degree, microbatch, name, layer, notes)
        found = self._estimate(gpu_type, tp_degree, microbatch, kind, layer)
        communication = self._communication(gpu_type, tp_degree, microbatch, name)
        notes.append(f"{kind} on {gpu_type} ({self.dtype}, TP {tp_degree}): {found.reason}")
        return found.forward_s + communication, found.backward_s + communication

    def _estimate(
        self, gpu_type: str, tp_degree: int, microbatch: int, kind: str, layer: LayerSpec
    ) -> Estimate:
        tables = (self.profile, default_profile())
        work = LayerWork(kind, layer, self.dtype, self.sequence_length, microbatch, tp_degree)
        found = estimate_layer(tables, gpu_type, work, self.spec, self.parameters)
        # Measured models are trained whole.
        return replace(found, backward_s=found.backward_s * layer.backward_share)

    def basis(self, gpu_type: str) -> tuple[str, str]:
        """Return `measured` or `estimated`, and the source of a device's block times."""
        gpu_type = canonical_gpu_type(gpu_type)
        if self._keys_of(gpu_type):
            return "measured", "this model's own layers"
        if self.dtype == "fp8":
            _, source = self._elsewhere("bf16", self.sequence_length, self.borrow).basis(gpu_type)
            return "estimated", f"times in bf16, with products at the rate of fp8; bf16: {source}"
        if is_measured((self.profile, default_profile()), gpu_type, self.dtype):
            return "measured", "blocks of other models on this GPU, scaled by FLOPs"
        if self.borrow and self._nearest_key(gpu_type, "block") is not None:
            return "estimated", "this model's layers elsewhere, by measured rates of both GPUs"
        return "estimated", rates_of(gpu_type, self.dtype, self.parameters)

    def _keys_of(self, gpu_type: str) -> list[ProfileKey]:
        """Return keys of this model on this GPU at this dtype and length, of any TP degree."""
        return [k for k in self._own_keys if k == self._key(gpu_type, k.tp_degree)]

    @cached_property
    def _own_keys(self) -> tuple[ProfileKey, ...]:
        """Keys of all measurements of this model."""
        return tuple(key for key in self.profile.keys if key.model == self.model)

    def _nearest_key(self, gpu_type: str, name: str) -> ProfileKey | None:
        """Return the nearest measurement of this model's layer on another device, dtype or length.

        Candidates are compared by device, then dtype, then length. None if there is none.
        """
        device = find_gpu_type(gpu_type)
        found = []
        for key in self._own_keys:
            other = find_gpu_type(key.gpu_type)
            if other is None or device is None or not self._points(key, name):
                continue
            apart = abs(math.log(other.peak_flops(self.dtype) / device.peak_flops(self.dtype)))
            length = abs(math.log(key.sequence_length / self.sequence_length))
            found.append(
                (
                    (
                        apart,
                        key.dtype != self.dtype,
                        length,
                        key.tp_degree,
                        key.gpu_type,
                        key.dtype,
                    ),
                    key,
                )
            )
        return min(found)[1] if found else None

    def _borrowed(
        self,
        source: ProfileKey,
        gpu_type: str,
        tp_degree: int,
        microbatch: int,
        name: str,
        layer: LayerSpec,
        notes: list[str],
    ) -> tuple[float, float]:
        """Scale this model's own times at `source` by the ratio of the estimates here and there."""
        kind = name.split(":")[0]
        there = self._elsewhere(source.dtype, source.sequence_length, False)
        times = there._balanced(source.gpu_type, tp_degree, microbatch)
        index = _index_of(name)
        here = self._estimate(gpu_type, tp_degree, microbatch, kind, layer)
        beside = there._estimate(source.gpu_type, tp_degree, microbatch, kind, layer)
        notes.append(
            f"{kind} on {gpu_type} ({self.dtype}, length {self.sequence_length}): from its time on"
            f" {source.gpu_type} ({source.dtype}, length {source.sequence_length}) by measured"
            " speeds of other models, FLOPs and bandwidth"
        )
        forward = float(times.forward_s[index])
        backward = float(times.backward_s[index])
        return (
            forward * here.forward_s / beside.forward_s,
            backward * (here.backward_s / beside.backward_s if beside.backward_s else 0.0),
        )

    def _from_bf16(
        self,
        gpu_type: str,
        tp_degree: int,
        microbatch: int,
        name: str,
        layer: LayerSpec,
        notes: list[str],
    ) -> tuple[float, float]:
        """Return a layer's time in fp8: a block's in bf16 with its products at fp8's rate.

        Embedding and head take the time that they take in bf16, in which they compute.
        """
        index = _index_of(name)
        kind = name.split(":")[0]
        own = self._elsewhere("bf16", self.sequence_length, self.borrow)
        times = own._balanced(gpu_type, tp_degree, microbatch)
        forward_s = float(times.forward_s[index])
        backward_s = float(times.backward_s[index])
        notes += [note for note in times.estimated if note.startswith(kind)]
        device = find_gpu_type(gpu_type)
        if kind != "block" or device is None:
            return forward_s, backward_s
        work = LayerWork(kind, layer, "bf16", self.sequence_length, microbatch, tp_degree)
        forward, backward = fp8_ratios(device, work, self.parameters)
        had = self._communication(gpu_type, tp_degree, microbatch, name)
        notes.append(f"block on {gpu_type} (fp8): from its time in bf16 by the rates of products")
        return (
            had + max(LEAST_OWN * forward_s, forward_s - had) * forward,
            had + max(LEAST_OWN * backward_s, backward_s - had) * backward,
        )

    def _elsewhere(self, dtype: str, sequence_length: int, borrow: bool) -> "LayerTimeModel":
        """Return the same model at another dtype or length."""
        key = dtype, sequence_length, borrow
        if key not in self._sources:
            self._sources[key] = self._like(
                dtype=dtype, sequence_length=sequence_length, borrow=borrow
            )
        return self._sources[key]

    def _like(self, **changes: Any) -> "LayerTimeModel":
        """Return a model with other values of some fields, and with caches of its own."""
        mine = {each.name: getattr(self, each.name) for each in fields(self)}
        inputs = {name: value for name, value in mine.items() if not name.startswith("_")}
        return LayerTimeModel(**(inputs | changes))

    def _measured_degree(
        self, gpu_type: str, tp_degree: int, name: str
    ) -> tuple[int, Mapping[int, Measurement]] | None:
        """The nearest TP degree at which this model's layer was measured on this GPU."""
        degrees = sorted(
            {k.tp_degree for k in self._keys_of(gpu_type)},
            key=lambda degree: (abs(np.log2(degree / tp_degree)), degree),
        )
        for degree in degrees:
            points = self._points(self._key(gpu_type, degree), name)
            if points:
                return degree, points
        return None


@dataclass(frozen=True, slots=True)
class PointSplit:
    """Parts of a single forward measured at microbatch `base`, in seconds.

    Launches do not grow with the microbatch; work and communication grow in proportion.
    """

    base: int
    launch_s: float
    work_s: float
    communication_s: float

    def at(
        self, microbatch: int, parameters: CostParameters, backward_share: float = 1.0
    ) -> tuple[float, float]:
        """Forward and backward seconds.

        Backward: each part times its ratio, the work also times `LayerSpec.backward_share`, the
        communication once.
        """
        scale = microbatch / self.base
        launch = parameters.launch_exposure * self.launch_s
        forward = launch + (self.work_s + self.communication_s) * scale
        work = parameters.backward_ratio * backward_share * self.work_s
        growing = (work + self.communication_s) * scale
        return forward, parameters.launch_backward_ratio * launch + growing


def _index_of(name: str) -> int:
    """Return a layer's index in the arrays of all layers; `name` as in profiles."""
    kind, _, number = name.partition(":")
    return int(number) + 1 if kind == "block" else {"embedding": 0, "head": -1}[kind]


def require_dtype(dtype: str) -> None:
    """Raise ConfigError for a precision that the model does not know."""
    if dtype not in VALUE_BYTES:
        raise ConfigError(f"precision is '{dtype}'; known: {', '.join(VALUE_BYTES)}")
