"""AutoHet: an elastic trainer for language models on heterogeneous spot GPUs, on Ray."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from recovery.release import RELEASE as __version__

if TYPE_CHECKING:
    from autohet.driver.job.elastic_trainer import ElasticTrainer

__all__ = ["ElasticTrainer", "__version__"]


def __getattr__(name: str) -> Any:
    """Ray and torch are imported when the trainer is first asked for:

    `import autohet` costs nothing.
    """
    if name == "ElasticTrainer":
        from autohet.own_packages import require_own_packages

        require_own_packages()
        return importlib.import_module("autohet.driver.job.elastic_trainer").ElasticTrainer
    raise AttributeError(f"module 'autohet' has no attribute {name!r}")
