"""A run's identity: the keys of a job that decide its mathematics.

Each checkpoint carries them, so that a run resumes only from its own checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from planner.errors import ConfigError
from planner.inputs.documents import Document, Json

Value = int | float | str | bool | None

MAY_CHANGE = frozenset(
    {
        "training.steps",
        "training.max_epochs",
        "training.row_offset",
        "training.learning_rate",
        "training.muon_learning_rate",
        "training.warmup_steps",
        "training.decay_steps",
        "training.stable_steps",
        "training.min_learning_rate_ratio",
        "training.schedule",
        "training.recompute",
        "training.optimizer_sharding",
        "training.offload",
        "training.compile_blocks",
        "training.kernels",
        "training.replica_check_steps",
        "training.audit_every",
        "training.device",
        "training.profile_steps",
        "training.skip_steps",
        "training.skip_gradient_norm_above",
        "training.max_skipped_steps",
        "data.cache",
        "data.build_timeout_s",
        "data.trust_remote_code",
        # It changes the tokens, whose digest is compared, where a template prints it.
        "data.template_date",
        # It decides how weights are drawn, and a run that goes on has its own.
        "model.config.initializer_range",
    }
)
"""Keys of `training` and `data` that may differ between two parts of a run.

They are those of the learning rate and the end, which are logged, and those that leave the
mathematics as it is.
"""
SECTIONS = ("training", "data")
FREE_SECTIONS = ("checkpoint",)
"""Sections whose every key may change; changes are logged."""
PLACES = frozenset({"storage", "memory_directory", "local_directory", "allow_changes"})
"""Fields of the free sections that say where a run is, not what it is."""
DATA_DIGEST = "data.sha256"
"""SHA-256 of all tokens of the run's dataset."""
DATA_ROWS = "data.rows"
"""Number of rows of the run's dataset."""
DATA_PLACES = frozenset({"data.source", "data.tokenizer"})
"""Places of the data and its tokenizer.

They may change where DATA_DIGEST is recorded, which the nodes compare.
"""
TEMPLATE_DATE = "data.template_date"
PRETRAINED = "model.pretrained"
FROM_SEED = "none: drawn from training.seed"
FAMILY = "model.family"
BUILT_IN_FAMILY = "built in"
ADAPTER = "model.adapter"
REFERENCE = "model.adapter.reference"
"""SHA-256 of the stored adapter with which DPO's reference computes."""
NO_ADAPTER = "none: all weights are trained"


@dataclass(frozen=True)
class KeyChange:
    """A key whose value differs from that in the run's checkpoint."""

    key: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} was {_shown(self.then)} and is {_shown(self.now)}"


def identity_of(sections: Json, weights: str | None) -> dict[str, Value]:
    """Return the identity of a job as a checkpoint's scalars, by key.

    sections: a job's dataclasses by name (`training`, `data`, `checkpoint`); None for one that the
    job lacks. weights: which pretrained weights the run began with; None: unknown.
    """
    found: dict[str, Value] = {} if weights is None else {PRETRAINED: weights}
    for name in SECTIONS + FREE_SECTIONS:
        section = sections.get(name)
        if section is None:
            continue
        for field in dataclasses.fields(section):
            if name not in FREE_SECTIONS or field.name not in PLACES:
                found[f"{name}.{field.name}"] = _scalar(getattr(section, field.name))
    return found


def adapter_identity(section: Any) -> dict[str, Value]:
    """Return the identity of a job's `AdapterSection`, by key; None: the job trains all weights."""
    if section is None:
        return {f"{ADAPTER}.kind": NO_ADAPTER}
    values = dataclasses.asdict(section)
    return {f"{ADAPTER}.{key.rstrip('_')}": _scalar(_listed(values[key])) for key in values}


def decides(key: str) -> bool:
    """Return True if a change of `key` changes the mathematics."""
    is_free = key.startswith(tuple(f"{section}." for section in FREE_SECTIONS))
    return key not in MAY_CHANGE and not is_free


def changes(then: Json, now: Json) -> list[KeyChange]:
    """Return the keys that both have and that differ, sorted.

    An older checkpoint has fewer keys.
    """
    shared = sorted(then.keys() & now.keys())
    return [KeyChange(key, then[key], now[key]) for key in shared if then[key] != now[key]]


def has_effect(key: str, scalars: Json) -> bool:
    """Return False for a key that decides nothing beside the other keys of its run.

    Earlier releases accepted such keys; a job that has left one out goes on all the same.
    """
    if key == "training.router_balance_weight":
        return scalars.get("training.router_balance") == "sequence"
    if key == "training.router_bias_speed":
        return scalars.get("training.router_balance") == "bias"
    if key.startswith("training.muon_"):
        return scalars.get("training.optimizer") == "muon"
    if key == "training.no_decay":
        return scalars.get("training.weight_decay") != 0
    if key in ("training.dpo_beta", "training.orpo_beta"):
        return key == f"training.{scalars.get('training.objective')}_beta"
    kind = scalars.get("data.kind") or "text"
    if key == "data.text_field":
        return kind == "text" and scalars.get("data.tokens_field") is None
    if key == "data.messages_field":
        return kind in ("chat", "sharegpt")
    return True


IMPLIED: Mapping[str, Value] = {
    "training.no_decay": "none",
    "training.optimizer": "adamw",
    "training.objective": "cross_entropy",
    "training.label_smoothing": 0.0,
    "training.z_loss": 0.0,
    "training.router_balance": "none",
    "data.kind": "text",
    "data.train_on": None,
    "data.isolate_documents": None,
    "data.packing": None,
    "data.begin_of_document": None,
    "data.skip_broken_lines": False,
    "model.adapter.base": None,
    "model.adapter.from": None,
    "model.adapter.modules_to_save": "[]",
    REFERENCE: "the model without its adapter",
}
"""Behaviour of releases that lacked these keys: their manifests are of version 2 (autohet 0.1.0).

The first of them recorded no key but the seed.
"""


def with_implied(scalars: Json, now: Json) -> Document:
    """Add to a checkpoint's scalars what its release did, for the missing keys that `now` changes.

    `now` is the job's identity.
    """
    found = dict(scalars)
    records_keys = any(key.startswith("training.") for key in scalars)
    decay = scalars if records_keys else now
    for key, value in IMPLIED.items():
        has_effect = key != "training.no_decay" or decay.get("training.weight_decay")
        # None and False are what a release did that lacked the key.
        if has_effect and now.get(key) not in (None, False):
            found.setdefault(key, value)
    return found


def config_changes(then: Json, now: Json, keys: Collection[str]) -> list[KeyChange]:
    """Return the differing `keys` of two model configs, as `model.config.<key>`."""
    one = {f"model.config.{key}": then[key] for key in keys if key in then}
    other = {f"model.config.{key}": _listed(now[key]) for key in keys if key in now}
    return changes(one, other)


def check_changes(
    found: Collection[KeyChange], allowed: Collection[str], uri: str
) -> list[KeyChange]:
    """Return the changes, to be logged.

    Raises:
        ConfigError: one changes the mathematics and is not allowed.
    """
    for change in found:
        if decides(change.key) and change.key not in allowed:
            raise ConfigError(
                f"{change.key} was {_shown(change.then)} in the run of {uri} and is"
                f" {_shown(change.now)} in the job, which changes the run's mathematics. Set it"
                f" back, name another checkpoint.storage, or add {change.key} to"
                " checkpoint.allow_changes"
            )
    return list(found)


def _scalar(value: Any) -> Value:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return json.dumps(value, sort_keys=True, default=dataclasses.asdict)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
