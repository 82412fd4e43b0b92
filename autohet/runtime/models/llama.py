"""Llama 1 to 3 and whatever shares its architecture."""

from autohet.runtime.models.family import Family

FAMILY = Family("llama", has_programs=True)
