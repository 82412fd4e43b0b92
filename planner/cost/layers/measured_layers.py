"""Measurements of one model's layers in a profile."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np

from planner.inputs.catalogue import find_gpu_type
from planner.inputs.profile import Measurement, ProfileKey, ProfileTable
from planner.plans.model_spec import ModelSpec


@dataclass
class MeasuredLayers:
    """Measurements of one model at one sequence length and dtype, and those nearest to them.

    model: name in the profile's rows; replaced by the spec's name, or by the profile's only model,
    if no row has it.
    """

    profile: ProfileTable
    spec: ModelSpec
    model: str
    dtype: str
    sequence_length: int

    def __post_init__(self) -> None:
        names = {key.model for key in self.profile.keys}
        if self.model in names:
            return
        if self.spec.name in names:
            self.model = self.spec.name
        elif len(names) == 1:
            (self.model,) = names

    def key(self, gpu_type: str, tp_degree: int) -> ProfileKey:
        return ProfileKey(self.model, gpu_type, self.dtype, self.sequence_length, tp_degree)

    def points(self, key: ProfileKey, name: str) -> Mapping[int, Measurement]:
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
        # blocks of one kind take the same time wherever they are
        for other, block in enumerate(self.spec.blocks):
            points = layers.get(f"block:{other}")
            is_alike = own is None or own == block
            if points and is_alike:
                return points
        return {}

    def keys_of(self, gpu_type: str) -> list[ProfileKey]:
        """Return keys of this model on this GPU at this dtype and length, of any TP degree."""
        return [key for key in self.own_keys if key == self.key(gpu_type, key.tp_degree)]

    @cached_property
    def own_keys(self) -> tuple[ProfileKey, ...]:
        """Keys of all measurements of this model."""
        return tuple(key for key in self.profile.keys if key.model == self.model)

    @cached_property
    def load_spread(self) -> float | None:
        """Measured spread of the experts' loads (`experts.load_spread`); None: not measured."""
        found = []
        for row in self.profile.measurements:
            if row.model == self.model and row.expert_load_spread is not None:
                found.append(row.expert_load_spread)
        return fmean(found) if found else None

    def nearest_key(self, gpu_type: str, name: str) -> ProfileKey | None:
        """Return the nearest measurement of this model's layer on another device, dtype or length.

        Candidates are compared by device, then dtype, then length. None if there is none.
        """
        device = find_gpu_type(gpu_type)
        if device is None:
            return None

        found = []
        for key in self.own_keys:
            other = find_gpu_type(key.gpu_type)
            if other is None or not self.points(key, name):
                continue
            speedup = other.peak_flops(self.dtype) / device.peak_flops(self.dtype)
            growth = key.sequence_length / self.sequence_length
            # a factor and its inverse are as far away; the last three only break ties
            rank = (
                abs(math.log(speedup)),
                key.dtype != self.dtype,
                abs(math.log(growth)),
                key.tp_degree,
                key.gpu_type,
                key.dtype,
            )
            found.append((rank, key))
        if not found:
            return None
        _, nearest = min(found)
        return nearest

    def nearest_degree(
        self, gpu_type: str, tp_degree: int, name: str
    ) -> tuple[int, Mapping[int, Measurement]] | None:
        """The nearest TP degree at which this model's layer was measured on this GPU."""

        def distance(degree: int) -> tuple[float, int]:
            return abs(np.log2(degree / tp_degree)), degree

        degrees = {key.tp_degree for key in self.keys_of(gpu_type)}
        for degree in sorted(degrees, key=distance):
            points = self.points(self.key(gpu_type, degree), name)
            if points:
                return degree, points
        return None

    def smallest_degree(
        self, gpu_type: str, tp_degree: int, name: str, base: int
    ) -> tuple[int, Measurement] | None:
        """Return the smallest TP degree below `tp_degree` with a measurement, and that measurement.

        The layer was measured at microbatch `base`. None if there is no such degree.
        """
        for exponent in range(tp_degree.bit_length() - 1):
            degree = 2**exponent
            points = self.points(self.key(gpu_type, degree), name)
            if base in points:
                return degree, points[base]
        return None
