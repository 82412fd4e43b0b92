"""Qwen3 (dense): as Llama, with a norm on each head's query and key."""

from autohet.runtime.models.family import Family

FAMILY = Family("qwen3", has_programs=True)
