"""Parameters of a stage, in the modules that compute with them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autohet.runtime.models.parameter_spec import local_shape
from autohet.runtime.models.stages.stage_spec import StageSpec


@dataclass(frozen=True)
class StageWeights:
    """This rank's slices of a stage's parameters, by checkpoint name; no storage until `load`.

    modules: (path in the library's model, module) of the stage's parts.
    """

    spec: StageSpec
    modules: Sequence[tuple[str, nn.Module]]

    def places(self) -> dict[str, list[tuple[nn.Module, str]]]:
        """Map checkpoint names to the modules with the parameter, and its attribute there.

        A tied head on one stage has two places.
        """
        found: dict[str, list[tuple[nn.Module, str]]] = {}
        for root_path, root in self.modules:
            for path, module in root.named_modules():
                module_path = f"{root_path}.{path}" if path else root_path
                for attribute, parameter in module._parameters.items():
                    # An absent bias is an attribute that is None.
                    if parameter is not None:
                        name = f"{module_path}.{attribute}"
                        found.setdefault(name, []).append((module, attribute))
        return found

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Use these local slices as the stage's parameters.

        The stage computes on the given tensors themselves if they have the compute dtype and the
        device, else on copies.
        """
        spec = self.spec
        places_by_name = self.places()
        missing = sorted(set(places_by_name) - set(parameters))
        assert not missing, (
            f"the stage of layers {spec.layers.start}+{len(spec.layers)} was not given"
            f" {missing[:3]}"
        )
        for name, places in places_by_name.items():
            given = tuple(parameters[name].shape)
            expected = self._local_shape(name)
            assert given == expected, f"{name}: this rank holds {expected}, not {given}"
            parameter_spec = spec.parameters[name]
            dtype = parameter_spec.compute_dtype(spec.dtype)
            used = parameters[name].detach().to(device=spec.device, dtype=dtype)
            parameter = nn.Parameter(used, requires_grad=parameter_spec.trainable)
            for module, attribute in places:
                module._parameters[attribute] = parameter

    def unload(self) -> None:
        """Free the parameters' storage."""
        for places in self.places().values():
            for module, attribute in places:
                held = module._parameters[attribute]
                assert held is not None
                empty = nn.Parameter(held.detach().to("meta"), requires_grad=held.requires_grad)
                module._parameters[attribute] = empty

    @torch.no_grad()
    def renew_copies(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy these local slices again, if the stage computes on copies of them."""
        places_by_name = self.places()
        for name, given in parameters.items():
            module, attribute = places_by_name[name][0]
            used = module._parameters[attribute]
            assert used is not None
            is_copy = used.data_ptr() != given.data_ptr()
            if is_copy:
                used.copy_(given)

    @contextmanager
    def replaced_by(self, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Compute with these local slices inside the returned context, without gradients."""
        places_by_name = self.places()
        replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
        for name, given in parameters.items():
            for module, attribute in places_by_name[name]:
                held = module._parameters[attribute]
                assert held is not None
                replaced.append((module, attribute, held))
                module._parameters[attribute] = nn.Parameter(given.to(held), requires_grad=False)
        try:
            yield
        finally:
            for module, attribute, held in replaced:
                module._parameters[attribute] = held

    def local_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of this rank's slices."""
        return {name: self._local_shape(name) for name in self.places()}

    def _local_shape(self, name: str) -> tuple[int, ...]:
        spec = self.spec.parameters[name]
        return local_shape(spec, self.spec.units(name))

    def local_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's slices of trained parameters.

        `.grad` accumulates over microbatches.
        """
        found: dict[str, Any] = {}
        for name, places in self.places().items():
            if self.spec.parameters[name].trainable:
                module, attribute = places[0]
                found[name] = module._parameters[attribute]
        return found
