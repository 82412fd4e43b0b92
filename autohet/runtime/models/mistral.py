"""Mistral: as Llama, with a sliding attention window."""

from autohet.runtime.models.family import Family

FAMILY = Family("mistral", has_programs=True)
