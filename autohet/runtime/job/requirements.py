"""Checks of the values that a job document gives."""

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
