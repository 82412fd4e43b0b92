"""What a format of frozen weights in fewer bits has to say."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autohet.runtime.models.parameter_spec import ParameterSpec

CHUNK_ELEMENTS = 1 << 22
"""Values that are quantized or dequantized at a time, so that temporary tensors stay small."""
CODES = ".codes"
SCALES = ".scales"
"""Suffixes of what a weight is held as."""


class BaseFormat(ABC):
    """Format of frozen linear maps."""

    @abstractmethod
    def held_as(self, spec: ParameterSpec) -> tuple[ParameterSpec, ...]:
        """Return the specs of what a weight is held as, codes first."""

    @abstractmethod
    def quantize(self, spec: ParameterSpec, weight: Tensor) -> dict[str, Tensor]:
        """Return what a whole weight [out, in] is held as, by the names of `held_as`."""

    def places(
        self, spec: ParameterSpec, units: Sequence[int], device: torch.device
    ) -> tuple[Tensor, ...]:
        """Return what `dequantize` has to know of where a rank's units lie."""
        return ()

    @abstractmethod
    def dequantize(self, parts: Sequence[Tensor], like: Tensor) -> Any:
        """Return a rank's part [m, n] of a weight, in the dtype of `like`.

        parts: what it is held as, and its `places`.
        """
