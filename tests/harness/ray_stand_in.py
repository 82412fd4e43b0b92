"""What the harness needs of Ray on a machine without it: decorators that leave a class as it is.

The fleet of processes serves the product's agent without Ray around it. A bare GPU machine has no
Ray, and 75 MB of wheels would have to travel there for two decorators.
"""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any


def stand_in_where_missing() -> None:
    """Install the stand-in as `ray` where Ray cannot be imported."""
    try:
        import ray  # noqa: F401
    except ImportError:
        module: Any = ModuleType("ray")
        module.remote = _remote
        module.method = _remote
        sys.modules["ray"] = module


def _remote(**options: Any) -> Callable[[Any], Any]:
    """Ray's decorator of classes and of methods, both called with options."""

    def decorate(decorated: Any) -> Any:
        if isinstance(decorated, type):
            decorated.__ray_metadata__ = SimpleNamespace(  # type: ignore[attr-defined]
                modified_class=decorated
            )
        return decorated

    return decorate
