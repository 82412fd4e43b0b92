"""AutoHet: an elastic trainer for language models on heterogeneous spot GPUs, on Ray."""

__version__ = "0.1.0"
