"""Built-in decoder families: each module of this folder defines one, as `FAMILY`, or several."""

import importlib
import pkgutil
from collections.abc import Mapping

from autohet.runtime.models.family import Family


def _import_families() -> dict[str, Family]:
    families = {}
    for module in pkgutil.iter_modules(__path__, prefix=f"{__name__}."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, Family):
                families[value.model_type] = value
    return families


BUILT_IN: Mapping[str, Family] = _import_families()
"""Families by model type."""
