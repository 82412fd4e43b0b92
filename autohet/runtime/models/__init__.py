"""Decoder families of `transformers`, cut into stages of the library's own modules.

A new family is one small file in `families/`, with a `FAMILY` value (see `granite.py`, `gpt2.py`).
"""

from autohet.runtime.models.auto import auto_family
from autohet.runtime.models.family import Family

__all__ = ["Family", "auto_family"]
