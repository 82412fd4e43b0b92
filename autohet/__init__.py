"""AutoHet: an elastic trainer for language models on heterogeneous spot GPUs, on Ray."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autohet.driver.job.elastic_trainer import ElasticTrainer

__all__ = ["ElasticTrainer", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Ray and torch are imported when the trainer is first asked for:

    `import autohet` costs nothing.
    """
    if name == "ElasticTrainer":
        return importlib.import_module("autohet.driver.job.elastic_trainer").ElasticTrainer
    raise AttributeError(f"module 'autohet' has no attribute {name!r}")
