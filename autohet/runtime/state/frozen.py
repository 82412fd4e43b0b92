"""Frozen weights, used but not trained by a run: each worker's slices, in the job's precision.

They never change, so recovery does not hold them: no snapshot, copy or checkpoint contains them. A
worker keeps its slices from one generation to the next. It reads missing slices from the *origin*
of the run's first weights: the pretrained source at its revision, or the seed.
"""

import gc
import threading
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from autohet.runtime.job import Job, ModelSection
from autohet.runtime.job.identity import REFERENCE, Value
from autohet.runtime.models.adapter_files import stored_digest, stored_matrices
from autohet.runtime.models.initialization import initial_parameters
from autohet.runtime.models.layers.adapters import is_adapter
from autohet.runtime.models.parameter_spec import ParameterSpec, take_units
from autohet.runtime.models.pretrained import pretrained_parameters, weights_identity
from autohet.runtime.models.quantized.weight import held_as, quantize
from autohet.runtime.models.registry import family_of, held_specs
from recovery.errors import Cancelled


def first_weights(
    model: ModelSection, config: PreTrainedConfig, names: Collection[str], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole fp32 tensor on the CPU) of parameters before the first step.

    Pretrained parameters and the adapter of `model.adapter.from` are read; new models and adapters
    are drawn from the seed.

    Raises:
        ConfigError: the checkpoint or a tensor is missing, or does not fit the config.
    """
    rest = set(names)
    if model.adapter is not None and model.adapter.from_ is not None:
        specs = family_of(config).parameter_specs(config)
        stored = {name for name in names if specs[name].trainable}
        yield from stored_matrices(model.adapter.from_, config, stored)
        rest -= stored
    drawn = {name for name in rest if model.pretrained is None or is_adapter(name)}
    yield from initial_parameters(config, drawn, seed)
    read = rest - drawn
    if model.pretrained is not None and read:
        family = family_of(config)
        yield from pretrained_parameters(model.pretrained, config, family, read, model.revision)


def run_identity(job: Job) -> dict[str, Value]:
    """Return the identity of a job, of the weights that it begins with and of its reference."""
    model = job.model
    weights = None
    if model.pretrained is not None:
        weights = weights_identity(model.pretrained, model.revision)
    found = job.identity(weights)
    stored = None if model.adapter is None else model.adapter.from_
    if stored is not None and model.keeps_reference(job.training.objective):
        found[REFERENCE] = stored_digest(stored)
    return found


def held_weights(
    model: ModelSection,
    config: PreTrainedConfig,
    names: Collection[str],
    seed: int,
    like: Tensor,
) -> Iterator[tuple[str, Tensor]]:
    """Yield `first_weights` as workers hold them: of quantized ones the parts (`held_specs`).

    like: a weight is rounded to its dtype before it is quantized, as transformers does, and
    quantized on its device.
    """
    specs = family_of(config).parameter_specs(config)
    wanted = set(names)
    origins = {name for name in specs if wanted & {part.name for part in held_as(specs[name])}}
    for name, whole in first_weights(model, config, origins, seed):
        if specs[name].base_format is None:
            yield name, whole
            continue
        for part, tensor in quantize(specs[name], whole.to(like)).items():
            if part in wanted:
                yield part, tensor


class FrozenWeights:
    """Frozen slices of one worker, kept across generations.

    Only the generation's thread calls `hold`.

    tensors: local slices by parameter name.
    """

    def __init__(
        self,
        model: ModelSection,
        config: PreTrainedConfig,
        seed: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._model = model
        self._config = config
        self._seed = seed
        self._device = device
        self._dtype = dtype
        self._specs: Mapping[str, ParameterSpec] = held_specs(config)
        self._units: dict[str, tuple[int, ...]] = {}
        self.tensors: dict[str, Tensor] = {}

    def hold(self, units: Mapping[str, tuple[int, ...]], cancelled: threading.Event) -> int:
        """Hold exactly these units, by parameter; return the number of bytes read from the origin.

        The next call reuses the slices that an interrupted call has read. Memory beyond the slices:
        one whole tensor on the host.

        Raises:
            Cancelled: `cancelled` was set.
            ConfigError: the origin lacks a weight.
        """
        for name in set(self._units) - set(units):
            self._drop(name)
        for name, held in list(self._units.items()):
            if set(units[name]) < set(held):
                self._narrow(name, units[name])

        lacking = [name for name, wanted in units.items() if self._units.get(name) != wanted]
        for name in lacking:
            self._drop(name)
        if lacking:
            # Frees stages of ended generations, whose parts refer to each other.
            gc.collect()

        read_bytes = 0
        for name, whole in self._read(lacking):
            if cancelled.is_set():
                raise Cancelled("the frozen weights are no longer wanted")
            spec = self._specs[name]
            local = take_units(spec, units[name], whole)
            kept = local.to(device=self._device, dtype=spec.compute_dtype(self._dtype))
            self.tensors[name] = kept
            self._units[name] = units[name]
            read_bytes += kept.nbytes
        return read_bytes

    def reload(self, names: Collection[str]) -> None:
        """Read held slices of these parameters from the origin again, into the same memory."""
        for name, whole in self._read(names):
            # A name for the slice would keep it alive while the next whole tensor is read.
            self.tensors[name].copy_(take_units(self._specs[name], self._units[name], whole))

    def _read(self, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
        like = torch.empty(0, dtype=self._dtype, device=self._device)
        return held_weights(self._model, self._config, names, self._seed, like)

    def _drop(self, name: str) -> None:
        self._units.pop(name, None)
        self.tensors.pop(name, None)

    def _narrow(self, name: str, wanted: tuple[int, ...]) -> None:
        """Keep only the wanted units of a parameter."""
        spec = self._specs[name]
        assert spec.split_dim is not None
        held = self._units[name]
        sizes = [spec.cuts[unit + 1] - spec.cuts[unit] for unit in held]
        parts = self.tensors[name].split(sizes, spec.split_dim)

        kept = [part for unit, part in zip(held, parts, strict=True) if unit in wanted]
        self.tensors[name] = torch.cat(kept, spec.split_dim)
        self._units[name] = wanted
