"""Recipe of a token dataset: its sources, and the way to read, tokenize and pack them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property

from autohet.runtime.data.dataset import FORMAT_VERSION
from autohet.runtime.data.examples import ExampleKind, begin_tokens, kind_of_examples
from autohet.runtime.data.fields import PlainExamples
from autohet.runtime.data.packing import BestFit, Concat, Packer, Pairs
from autohet.runtime.data.parts import PART_BYTES, READING_VERSION, Part, Reading, divide
from autohet.runtime.data.selection import Selection
from autohet.runtime.data.sources import joined, select_by_source
from autohet.runtime.data.tokenization import NoTokenizer, Tokenizer, load_tokenizer
from autohet.runtime.job import DataSection


def tokenizer_of(data: DataSection) -> Tokenizer:
    """Return the tokenizer of the data.

    A stand-in if rows hold token ids and `data.tokenizer` is left at its default.
    """
    if data.tokens_field is not None and data.tokenizer in ("", "bytes"):
        return NoTokenizer()
    return load_tokenizer(data.tokenizer, data.end_of_document, data.trust_remote_code)


def example_kind(data: DataSection, tokenizer: Tokenizer) -> ExampleKind | None:
    """Return the way to convert records of `data` into examples; None: the records hold text.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    kind = kind_of_examples(data, tokenizer)
    return kind if kind is None or data.tokens_field else PlainExamples(kind, data)


@dataclass(frozen=True)
class Recipe:
    """Sources of a dataset and the way to read, tokenize and pack them."""

    data: DataSection
    selections: list[Selection]
    """Selected files, one selection for each source."""
    reading: Reading
    sequence_length: int

    @classmethod
    def of(cls, data: DataSection, sequence_length: int) -> Recipe:
        """Raises ConfigError for sources or a tokenizer that are missing."""
        selections = select_by_source(data)
        tokenizer = tokenizer_of(data)
        reading = Reading(
            tokenizer,
            str(data.field_of("text")),
            data.skip_broken_lines,
            example_kind(data, tokenizer),
            begin_tokens(data, tokenizer),
            data.marks_rows,
        )
        return cls(data, selections, reading, sequence_length)

    def parts_by_source(self) -> list[list[Part]]:
        """Return all parts in order: one list per source if sources are mixed, else one list."""
        if not self.data.weights:
            return [divide(self.selection.files)]
        groups: list[list[Part]] = []
        number = 0
        for selection in self.selections:
            found = divide(selection.files)
            groups.append([replace(part, index=number + part.index) for part in found])
            number += len(found)
        return groups

    @property
    def selection(self) -> Selection:
        """Files of all sources."""
        return joined(self.selections)

    def packer(self) -> Packer:
        """Return the packer that turns marked documents into rows."""
        row_tokens = self.sequence_length + 1
        padding = self.reading.tokenizer.end_token
        isolate = self.data.isolates
        is_text = self.data.kind == "text"
        if self.data.kind == "preference":
            return Pairs(row_tokens, padding)
        if self.data.packs_best_fit:
            return BestFit(row_tokens, padding, isolate, split=is_text)
        return Concat(row_tokens, padding, isolate, pad=not is_text)

    @cached_property
    def fingerprint(self) -> str:
        """Key of the files' versions, the way to read them, the tokenizer and the row length."""
        files = [file[:4] for file in self.selection.files]
        parts: list[object] = [
            FORMAT_VERSION,
            READING_VERSION,
            PART_BYTES,
            files,
            self.reading.text_field,
            self.reading.tokenizer.identity,
            self.sequence_length,
        ]
        parts += self.reading.additions
        if self.reading.marked:
            parts.append(f"isolated {self.data.isolates}, best fit {self.data.packs_best_fit}")
        if self.data.weights:
            files_by_source = [len(each.files) for each in self.selections]
            parts.append([list(self.data.weights), files_by_source])
        document = json.dumps(parts)
        return hashlib.sha256(document.encode()).hexdigest()
