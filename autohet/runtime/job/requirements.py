"""Checks of the values that a job document gives."""

from typing import Any

from planner.errors import ConfigError


def require(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless `condition`.

    The value is the user's; the message says how to fix it.
    """
    if not condition:
        raise ConfigError(message)


def require_at_least(name: str, value: float | None, minimum: float) -> None:
    """Raise ConfigError if `value` is below `minimum`; None passes (the key was not given)."""
    require(value is None or value >= minimum, f"{name} is {value}, but must be at least {minimum}")


def require_positive(name: str, value: float | None) -> None:
    """Raise ConfigError unless `value` is positive; None passes (the key was not given)."""
    require(value is None or value > 0, f"{name} is {value}, but must be more than 0")


def require_effect(section: Any, name: str, has_effect: bool, needed: str) -> None:
    """Raise ConfigError if a key without effect has another value than its default.

    name: the key with its section, such as `data.text_field`. needed: what it would need.
    """
    key = name.rpartition(".")[2]
    value = getattr(section, key)
    require(
        has_effect or value == type(section).__dataclass_fields__[key].default,
        f"{name} is {value!r}, but has no effect without {needed}; set that, or leave {key} out",
    )
