"""Measurements of one model's layers in a profile."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np

from planner.catalogue import find_gpu_type
from planner.model_spec import ModelSpec
from planner.profile import Measurement, ProfileKey, ProfileTable


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
        if self.model not in names and self.spec.name in names:
            self.model = self.spec.name
        elif self.model not in names and len(names) == 1:
            self.model = next(iter(names))

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
        for other, block in enumerate(self.spec.blocks):
            points = layers.get(f"block:{other}")
            if points and own in (None, block):
                return points
        return {}

    def keys_of(self, gpu_type: str) -> list[ProfileKey]:
        """Return keys of this model on this GPU at this dtype and length, of any TP degree."""
        return [k for k in self.own_keys if k == self.key(gpu_type, k.tp_degree)]

    @cached_property
    def own_keys(self) -> tuple[ProfileKey, ...]:
        """Keys of all measurements of this model."""
        return tuple(key for key in self.profile.keys if key.model == self.model)

    @cached_property
    def load_spread(self) -> float | None:
        """Measured spread of the experts' loads (`experts.load_spread`); None: not measured."""
        rows = (row for row in self.profile.measurements if row.model == self.model)
        found = [row.expert_load_spread for row in rows if row.expert_load_spread is not None]
        return fmean(found) if found else None

    def nearest_key(self, gpu_type: str, name: str) -> ProfileKey | None:
        """Return the nearest measurement of this model's layer on another device, dtype or length.

        Candidates are compared by device, then dtype, then length. None if there is none.
        """
        device = find_gpu_type(gpu_type)
        found = []
        for key in self.own_keys:
            other = find_gpu_type(key.gpu_type)
            if other is None or device is None or not self.points(key, name):
                continue
            apart = abs(math.log(other.peak_flops(self.dtype) / device.peak_flops(self.dtype)))
            length = abs(math.log(key.sequence_length / self.sequence_length))
            has_other_dtype = key.dtype != self.dtype
            rank = apart, has_other_dtype, length, key.tp_degree, key.gpu_type, key.dtype
            found.append((rank, key))
        return min(found)[1] if found else None

    def nearest_degree(
        self, gpu_type: str, tp_degree: int, name: str
    ) -> tuple[int, Mapping[int, Measurement]] | None:
        """The nearest TP degree at which this model's layer was measured on this GPU."""
        degrees = sorted(
            {k.tp_degree for k in self.keys_of(gpu_type)},
            key=lambda degree: (abs(np.log2(degree / tp_degree)), degree),
        )
        for degree in degrees:
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
        for degree in (2**i for i in range(tp_degree.bit_length() - 1)):
            points = self.points(self.key(gpu_type, degree), name)
            if base in points:
                return degree, points[base]
        return None
