"""A tensor-parallel group of threads in one process, the one that `check-model` uses."""

from autohet.runtime.models.thread_group import ThreadGroup, run_ranks

__all__ = ["ThreadGroup", "run_ranks"]
