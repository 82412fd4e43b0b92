"""Labels of a node type in a cluster file: facts that override or complete the catalogue's.

Facts that neither of them states are errors or notes, whose messages are here too.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from planner.errors import ConfigError
from planner.inputs.catalogue import (
    all_instance_types,
    find_instance_type,
    has_part_of_gpu,
    may_have_gpus,
)
from planner.inputs.cluster_documents import LABEL_PREFIX, instance_type_of
from planner.inputs.documents import is_number, parse_number, read_mapping, read_section

_NUMBERS = (
    "gpu-memory-gib",
    "host-memory-gib",
    "intra-node-gbps",
    "inter-node-gbps",
    "usd-per-hour",
)
LABELS = frozenset(LABEL_PREFIX + name for name in ("gpu-type", *_NUMBERS, "spot", "zone"))
RAY_ACCELERATOR_LABEL = "ray.io/accelerator-type"
RAY_MARKET_LABEL = "ray.io/market-type"


def read_labels(entry: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return the labels of a node type's entry.

    Raises:
        ConfigError: a value is no string.
    """
    labels = {}
    for key, value in read_mapping(entry.get("labels") or {}, f"labels of '{name}'").items():
        if not isinstance(value, str):
            raise ConfigError(
                f"label '{key}' of node type '{name}' must be a string (quote it), not {value!r}"
            )
        labels[key] = value
    return labels


def read_num_gpus(value: object, name: str) -> int:
    """Return the GPU resource of a node type as an integer.

    Raises:
        ConfigError: it is no whole number.
    """
    if not is_number(value) or value != int(value):
        raise ConfigError(f"GPU of node type '{name}' must be a whole number, not {value!r}")
    return int(value)


def check_label_names(labels: Mapping[str, str], name: str) -> None:
    """Check that every label with our prefix is one of LABELS.

    Raises:
        ConfigError: one is not.
    """
    for key in labels:
        if key.startswith(LABEL_PREFIX) and key not in LABELS:
            raise ConfigError(
                f"unknown label '{key}' on node type '{name}'; known: {', '.join(sorted(LABELS))}"
            )


def label_text(labels: Mapping[str, str], label: str) -> str | None:
    """Return the value of one of our labels; None if it is absent or empty."""
    return labels.get(LABEL_PREFIX + label) or None


def label_number(
    labels: Mapping[str, str], label: str, name: str, *, zero: bool = False
) -> float | None:
    """Return the number in one of our labels; None if it is absent.

    Raises:
        ConfigError: it is no positive number, nor 0 if `zero` allows it.
    """
    text = label_text(labels, label)
    if text is None:
        return None
    value = parse_number(text)
    is_allowed_zero = zero and value == 0.0
    if not 0.0 < value < float("inf") and not is_allowed_zero:
        raise ConfigError(
            f"label '{LABEL_PREFIX}{label}' of node type '{name}' must be a positive"
            f" number{' or 0' * zero}, not '{text}'"
        )
    return value


def is_spot(labels: Mapping[str, str], name: str) -> bool:
    """Return the spot flag of our own label, else of Ray's market label."""
    if label_text(labels, "spot") is not None:
        return _flag(labels, "spot", name)
    return labels.get(RAY_MARKET_LABEL) == "spot"


def _flag(labels: Mapping[str, str], label: str, name: str) -> bool:
    text = label_text(labels, label)
    if text not in (None, "true", "false"):
        raise ConfigError(
            f"label '{LABEL_PREFIX}{label}' of node type '{name}' must be \"true\" or \"false\","
            f" not '{text}'"
        )
    return text == "true"


def refuse_missing_facts(
    name: str, facts: Mapping[str, object], num_gpus: int | None, instance_type: str | None
) -> None:
    """Check that no fact is unknown.

    facts: by label; None if neither label nor catalogue states it.

    Raises:
        ConfigError: some are; it names all labels that would state them.
    """
    missing = [label for label, value in facts.items() if value is None]
    words = [label.replace("-", " ") for label in missing]
    remedies = [f"'{LABEL_PREFIX}{label}'" for label in missing]
    if num_gpus is None:
        words.append("number of GPUs")
        remedies.append("GPU under resources")
    if not words:
        return
    source = "it names no instance type"
    if instance_type:
        source = f"instance type '{instance_type}' is not in the catalogue"
    label = "label" if len(missing) == 1 else "labels"
    raise ConfigError(
        f"node type '{name}' has no {' and no '.join(words)}: {source}; set the {label}"
        f" {', '.join(remedies)}"
    )


def why_gpus_are_unknown(name: str, entry: Mapping[str, Any]) -> str:
    """Return why nothing is known of a node type's GPUs; empty if file or catalogue states them."""
    instance = instance_type_of(read_section(entry, "node_config"))
    if "GPU" in read_section(entry, "resources"):
        return ""
    if instance is not None and (find_instance_type(instance) or not may_have_gpus(instance)):
        return ""
    return unknown_instance_note(name, instance)


def unknown_instance_note(name: str, instance: str | None) -> str:
    """Return why a node type may have GPUs that are not planned on."""
    if instance is None:
        return f"'{name}' names no instance type; GPUs that it has must be said under resources"
    if has_part_of_gpu(instance):
        return f"instance type '{instance}' of '{name}' has a part of a GPU: it is not planned on"
    hint = ""
    close = get_close_matches(instance, sorted(all_instance_types()), n=1)
    if close:
        hint = f" (did you mean {close[0]}?)"
    return (
        f"instance type '{instance}' of '{name}' is not in the catalogue of GPU instances{hint}, so"
        " it is not planned on: say its GPUs under resources and its facts by labels"
        f" ({', '.join(sorted(LABELS))})"
    )
