"""Specs of small models, each counted once a process."""

import functools
import json
from collections.abc import Mapping
from typing import Any

from autohet.runtime.models.specs.model_spec import model_spec_from_config
from planner.plans.model_spec import ModelSpec


def spec_of(
    name: str, config: Mapping[str, Any], precision: str, *, dropout: bool = False
) -> ModelSpec:
    """Return the spec of a transformers config; it takes about half a second the first time."""
    return _spec_of(name, json.dumps(config), precision, dropout)


@functools.cache
def _spec_of(name: str, config: str, precision: str, dropout: bool) -> ModelSpec:
    return model_spec_from_config(name, json.loads(config), precision=precision, dropout=dropout)
