"""Seconds of every layer on even groups whose experts have equal loads.

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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from planner.arrays import Floats
from planner.cost.layers.curves import Curve, PointSplit, make_curve
from planner.cost.layers.estimate import (
    Estimate,
    estimate_layer,
    estimate_muon_s,
    estimate_update_s,
    is_measured,
    rates_of,
)
from planner.cost.layers.measured_layers import MeasuredLayers
from planner.cost.layers.roofline import LayerWork, fp8_ratios
from planner.cost.parameters import CostParameters
from planner.inputs.catalogue import canonical_gpu_type, find_gpu_type
from planner.inputs.profile import Measurement, ProfileKey, default_profile
from planner.plans.model_spec import LayerSpec

LEAST_OWN = 0.2
"""Least share of a layer's time that is not communication, whatever links predict for that."""
MOST_COMMUNICATION = 0.6
"""Largest share of a layer's only measurement that counts as communication."""
S = TypeVar("S", float, Floats)


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
class LayerOnGroup:
    """One layer with one microbatch size on an even group of one GPU type.

    name: as in profiles, such as block:3.
    """

    name: str
    layer: LayerSpec
    gpu_type: str
    tp_degree: int
    microbatch: int

    @property
    def kind(self) -> str:
        """embedding, block or head."""
        return self.name.split(":")[0]

    @property
    def index(self) -> int:
        """Index in the arrays of all layers."""
        kind, _, number = self.name.partition(":")
        if kind == "block":
            return int(number) + 1
        return {"embedding": 0, "head": -1}[kind]


@dataclass
class EvenLayerTimes:
    """Layer times of one model at one sequence length and dtype; results are cached.

    tp_communication_s(gpu_type, tp_degree, microbatch): seconds of one block's tensor-parallel
    all-reduces in one direction. borrow: times that are measured on no such GPU may come from
    measurements on others.
    """

    measured: MeasuredLayers
    parameters: CostParameters
    tp_communication_s: Callable[[str, int, int], float]
    borrow: bool = True
    _times: dict[tuple[str, int, int], LayerTimes] = field(default_factory=dict)
    _curves: dict[tuple[ProfileKey, str, bool], Curve] = field(default_factory=dict)
    _elsewhere: dict[tuple[str, int, bool], "EvenLayerTimes"] = field(default_factory=dict)

    def times(self, gpu_type: str, tp_degree: int, microbatch: int) -> LayerTimes:
        """Return all layers' seconds for one microbatch, in one forward and backward pass."""
        key = gpu_type, tp_degree, microbatch
        if key not in self._times:
            self._times[key] = self._compute(gpu_type, tp_degree, microbatch)
        return self._times[key]

    def block_communication_s(self, gpu_type: str, tp_degree: int, microbatch: int) -> Floats:
        """Return seconds of each layer's all-reduces in one direction, (num_layers + 2,).

        Embedding and head have none.
        """
        found = np.zeros(self.measured.spec.num_layers + 2)
        if tp_degree > 1:
            found[1:-1] = self.tp_communication_s(gpu_type, tp_degree, microbatch)
        return found

    def basis(self, gpu_type: str) -> tuple[str, str]:
        """Return `measured` or `estimated`, and the source of a device's block times."""
        gpu_type = canonical_gpu_type(gpu_type)
        dtype = self.measured.dtype
        if self.measured.keys_of(gpu_type):
            return "measured", "this model's own layers"
        if dtype == "fp8":
            _, source = self._in_bf16.basis(gpu_type)
            return "estimated", f"times in bf16, with products at the rate of fp8; bf16: {source}"
        if is_measured((self.measured.profile, default_profile()), gpu_type, dtype):
            return "measured", "blocks of other models on this GPU, scaled by FLOPs"
        if self.borrow and self.measured.nearest_key(gpu_type, "block") is not None:
            return "estimated", "this model's layers elsewhere, by measured rates of both GPUs"
        return "estimated", rates_of(gpu_type, dtype, self.parameters)

    def _compute(self, gpu_type: str, tp_degree: int, microbatch: int) -> LayerTimes:
        measured = self.measured
        key = measured.key(gpu_type, tp_degree)
        has_several_kinds = len(set(measured.spec.blocks)) > 1
        row_of_all = measured.profile.layers(key).get("block")
        notes: list[str] = []
        found: dict[object, tuple[float, float, float]] = {}
        rows = []
        for name, layer in self._layers():
            points = measured.points(key, name)
            if has_several_kinds and points and points is row_of_all:
                notes.append(
                    f"blocks on {gpu_type}: the profile has one time for"
                    f" {len(set(measured.spec.blocks))} kinds of blocks; measure each kind (autohet"
                    " profile)"
                )
            asked = LayerOnGroup(name, layer, gpu_type, tp_degree, microbatch)
            # layers with one row, or of one kind without a row, take the same time
            identity: object = id(points) if points else (asked.kind, layer)
            if identity not in found:
                found[identity] = self._layer(asked, points, notes)
            rows.append(found[identity])

        forward_s, backward_s, update_s = np.array(rows).T
        # many layers may have the same note
        return LayerTimes(forward_s, backward_s, update_s, tuple(dict.fromkeys(notes)))

    def _layers(self) -> Iterator[tuple[str, LayerSpec]]:
        """Yield the name, as in profiles, and the spec of each layer."""
        spec = self.measured.spec
        yield "embedding", spec.embedding
        for number, block in enumerate(spec.blocks):
            yield f"block:{number}", block
        yield "head", spec.head

    def _layer(
        self, asked: LayerOnGroup, points: Mapping[int, Measurement], notes: list[str]
    ) -> tuple[float, float, float]:
        """Return forward, backward and update seconds; add what is estimated to `notes`."""
        if points:
            forward, backward = self._from_measurements(asked, points)
        else:
            forward, backward = self._estimate_or_borrow(asked, notes)
        update = _first_update_s(points)
        if update is None:
            update = self._update_at_other_degree_s(asked)
        if update is None:
            update = estimate_update_s(
                asked.gpu_type, asked.layer, asked.tp_degree, self.parameters
            )
            notes.append(f"optimizer of {asked.kind} on {asked.gpu_type}: from memory bandwidth")
        muon_s = estimate_muon_s(asked.gpu_type, asked.layer, asked.tp_degree, self.parameters)
        if muon_s:
            notes.append(f"Muon of {asked.kind} on {asked.gpu_type}: from FLOPs in bf16")
        return forward, backward, update + muon_s

    def _update_at_other_degree_s(self, asked: LayerOnGroup) -> float | None:
        """Return the update's seconds from those measured at another TP degree, by parameters."""
        other = self.measured.nearest_degree(asked.gpu_type, asked.tp_degree, asked.name)
        if other is None:
            return None
        degree, points = other
        update_s = _first_update_s(points)
        if update_s is None:
            return None
        here = asked.layer.parameters_per_worker(asked.tp_degree)
        there = asked.layer.parameters_per_worker(degree)
        return update_s * (here / max(there, 1))

    def _from_measurements(
        self, asked: LayerOnGroup, points: Mapping[int, Measurement]
    ) -> tuple[float, float]:
        """Return forward and backward seconds from this layer's measurements at this TP degree."""
        forward_points = {}
        backward_points = {}
        for microbatch, point in points.items():
            forward_points[microbatch] = point.forward_s
            if point.backward_s is not None:
                backward_points[microbatch] = point.backward_s

        backward_share = asked.layer.backward_share
        if len(points) == 1 and not backward_points:
            split = self._split(asked, points)
            return split.at(asked.microbatch, self.parameters, backward_share)

        key = self.measured.key(asked.gpu_type, asked.tp_degree)
        exposure = self.parameters.launch_exposure
        curve = self._curve(key, asked.name, True, forward_points)
        forward_s = curve.in_run(asked.microbatch, exposure)
        if backward_points:
            curve = self._curve(key, asked.name, False, backward_points)
            backward_s = curve.in_run(asked.microbatch, exposure)
        else:
            backward_s = self.parameters.backward_ratio * backward_share * forward_s
        return forward_s, backward_s

    def _split(self, asked: LayerOnGroup, points: Mapping[int, Measurement]) -> PointSplit:
        """Return launch, work and communication of a layer with one measured forward.

        At the smallest measured TP degree the launch is `launch_s`; at larger ones the work is
        divided, and the rest is launch.
        """
        ((base, measurement),) = points.items()
        at_base = replace(asked, microbatch=base)
        # links may be predicted slower than they were in the measurement
        most = MOST_COMMUNICATION * measurement.forward_s
        communication = min(self._communication_s(at_base), most)
        rest = measurement.forward_s - communication
        if asked.kind != "block":
            return PointSplit(base, 0.0, rest, communication)
        # launches do not shrink with the work, so a smaller degree tells them apart
        smallest = self.measured.smallest_degree(asked.gpu_type, asked.tp_degree, asked.name, base)
        if smallest is None:
            launch = min(self.parameters.launch_s, self.parameters.launch_limit * rest)
            return PointSplit(base, launch, rest - launch, communication)
        degree, other = smallest
        narrow = self._split(replace(asked, tp_degree=degree), {base: other})
        work = min(rest, narrow.work_s * degree / asked.tp_degree)
        return PointSplit(base, rest - work, work, communication)

    def _curve(
        self, key: ProfileKey, name: str, forward: bool, points: Mapping[int, float]
    ) -> Curve:
        cache_key = (key, name, forward)
        if cache_key not in self._curves:
            self._curves[cache_key] = make_curve(points)
        return self._curves[cache_key]

    def _communication_s(self, asked: LayerOnGroup) -> float:
        if asked.tp_degree == 1 or asked.kind != "block":
            return 0.0
        return self.tp_communication_s(asked.gpu_type, asked.tp_degree, asked.microbatch)

    def _estimate_or_borrow(self, asked: LayerOnGroup, notes: list[str]) -> tuple[float, float]:
        measured = self.measured
        if measured.dtype == "fp8" and not measured.keys_of(asked.gpu_type):
            return self._from_bf16(asked, notes)
        other = measured.nearest_degree(asked.gpu_type, asked.tp_degree, asked.name)
        if other is not None:
            return self._from_other_degree(asked, *other, notes)
        if self.borrow:
            source = measured.nearest_key(asked.gpu_type, asked.name)
            if source is not None:
                return self._borrow(source, asked, notes)

        found = self._estimate(asked)
        notes.append(
            f"{asked.kind} on {asked.gpu_type} ({measured.dtype}, TP {asked.tp_degree}):"
            f" {found.reason}"
        )
        communication = self._communication_s(asked)
        return found.forward_s + communication, found.backward_s + communication

    def _from_other_degree(
        self,
        asked: LayerOnGroup,
        degree: int,
        points: Mapping[int, Measurement],
        notes: list[str],
    ) -> tuple[float, float]:
        """Return seconds by those measured at another TP degree, with this degree's communication.

        points: those of `degree`.
        """
        there = replace(asked, tp_degree=degree)
        forward, backward = self._from_measurements(there, points)
        had_s = self._communication_s(there)
        added_s = self._communication_s(asked)
        ratio = degree / asked.tp_degree
        notes.append(
            f"{asked.kind} on {asked.gpu_type} at TP {asked.tp_degree}: from TP {degree} by FLOPs"
            " and link bandwidth"
        )
        forward_s = own_s(forward, had_s) * ratio + added_s
        backward_s = own_s(backward, had_s) * ratio + added_s
        return forward_s, backward_s

    def _estimate(self, asked: LayerOnGroup) -> Estimate:
        measured = self.measured
        tables = (measured.profile, default_profile())
        work = self._work(asked, measured.dtype)
        found = estimate_layer(tables, asked.gpu_type, work, measured.spec, self.parameters)
        # Measured models are trained whole.
        return replace(found, backward_s=found.backward_s * asked.layer.backward_share)

    def _work(self, asked: LayerOnGroup, dtype: str) -> LayerWork:
        length = self.measured.sequence_length
        return LayerWork(asked.kind, asked.layer, dtype, length, asked.microbatch, asked.tp_degree)

    def _borrow(
        self, source: ProfileKey, asked: LayerOnGroup, notes: list[str]
    ) -> tuple[float, float]:
        """Scale this model's own times at `source` by the ratio of the estimates here and there."""
        there = self._at(source.dtype, source.sequence_length, False)
        times = there.times(source.gpu_type, asked.tp_degree, asked.microbatch)
        here = self._estimate(asked)
        estimate_there = there._estimate(replace(asked, gpu_type=source.gpu_type))
        notes.append(
            f"{asked.kind} on {asked.gpu_type} ({self.measured.dtype}, length"
            f" {self.measured.sequence_length}): from its time on {source.gpu_type}"
            f" ({source.dtype}, length {source.sequence_length}) by measured speeds of other"
            " models, FLOPs and bandwidth"
        )
        forward = float(times.forward_s[asked.index])
        backward = float(times.backward_s[asked.index])
        # a frozen layer may have no backward at all
        backward_ratio = 0.0
        if estimate_there.backward_s:
            backward_ratio = here.backward_s / estimate_there.backward_s
        return forward * here.forward_s / estimate_there.forward_s, backward * backward_ratio

    def _from_bf16(self, asked: LayerOnGroup, notes: list[str]) -> tuple[float, float]:
        """Return a layer's time in fp8: a block's in bf16 with its products at fp8's rate.

        Embedding and head take the time that they take in bf16, in which they compute.
        """
        times = self._in_bf16.times(asked.gpu_type, asked.tp_degree, asked.microbatch)
        forward_s = float(times.forward_s[asked.index])
        backward_s = float(times.backward_s[asked.index])
        notes += [note for note in times.estimated if note.startswith(asked.kind)]
        device = find_gpu_type(asked.gpu_type)
        if asked.kind != "block" or device is None:
            return forward_s, backward_s

        work = self._work(asked, "bf16")
        forward_ratio, backward_ratio = fp8_ratios(device, work, self.parameters)
        notes.append(
            f"block on {asked.gpu_type} (fp8): from its time in bf16 by the rates of products"
        )
        # all-reduces carry bf16 in either format
        communication_s = self._communication_s(asked)
        own_forward_s = own_s(forward_s, communication_s)
        own_backward_s = own_s(backward_s, communication_s)
        return (
            communication_s + own_forward_s * forward_ratio,
            communication_s + own_backward_s * backward_ratio,
        )

    @property
    def _in_bf16(self) -> "EvenLayerTimes":
        return self._at("bf16", self.measured.sequence_length, self.borrow)

    def _at(self, dtype: str, sequence_length: int, borrow: bool) -> "EvenLayerTimes":
        """Return the same model at another dtype or length."""
        key = dtype, sequence_length, borrow
        if key not in self._elsewhere:
            measured = replace(self.measured, dtype=dtype, sequence_length=sequence_length)
            self._elsewhere[key] = EvenLayerTimes(
                measured, self.parameters, self.tp_communication_s, borrow
            )
        return self._elsewhere[key]


def own_s(seconds: S, communication_s: S) -> S:
    """Return layers' seconds without communication, which links may predict too long."""
    found: S = np.maximum(LEAST_OWN * seconds, seconds - communication_s)
    return found


def _first_update_s(points: Mapping[int, Measurement]) -> float | None:
    """Return the update's seconds at the smallest microbatch size that has them."""
    for _, point in sorted(points.items()):
        if point.update_s is not None:
            return point.update_s
    return None
