"""The `data` and `evaluation` sections: sources of text, and their conversion to rows.

Paths are as the process that runs the job sees them (with `ray job submit --working-dir DIR`,
relative to DIR).
"""

import os
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Literal

from autohet.runtime.job.requirements import (
    require,
    require_at_least,
    require_effect,
    require_positive,
)
from planner.errors import ConfigError

FIELDS_BY_KIND = {
    "text": ("text",),
    "chat": ("messages", "tools", "system"),
    "sharegpt": ("messages", "tools", "system"),
    "prompt_completion": ("prompt", "completion", "tools"),
    "preference": ("chosen", "prompt", "rejected", "tools"),
}
"""Names in `data.fields` by kind; each record of the kind has the first."""
JOINED_FIELDS = ("prompt", "completion")
"""Names whose text may come from several fields."""
NAMED_BY = {"text": "text_field", "messages": "messages_field"}
"""Keys of `data` that name a field, too."""
TrainOn = Literal["assistant", "completion", "turns", "all"]


@dataclass(frozen=True, kw_only=True)
class SourceEntry:
    """A source of data with its weight, split or subset."""

    path: str
    """Path or URI, as in `data.source`."""
    weight: float | None = None
    """Fraction of the samples, relative to the weights of the other sources.

    All sources have a weight, or none has. Each weighted source has epochs of its own. null: all
    rows are alike, whatever their source.
    """
    split: str = "train"
    """Split of an `hf://` data set, in the datasets library's syntax."""
    subset: str | None = None
    """Configuration of an `hf://` data set; null: its default."""

    def __post_init__(self) -> None:
        require(bool(self.path), "data.source has an entry without a path; give its path")
        require_positive("data.source's weight", self.weight)
        for key in ("split", "subset"):
            is_hub = self.path.startswith("hf://")
            require_effect(self, f"data.source.{key}", is_hub, "a path hf://org/name")


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Sources of text, and their conversion to rows of `sequence_length + 1` tokens."""

    source: str | SourceEntry | tuple[str | SourceEntry, ...]
    """Source of the text, or a list of sources, in order.

    A source is a file, directory, glob, `s3://bucket/prefix`, `hf://org/name` or
    `builtin:python-stdlib`, or a mapping of `path`, `weight`, `split` and `subset`.
    """
    format: Literal["auto", "text", "jsonl", "json", "csv", "parquet", "arrow"] = "auto"
    """File format; auto: by each file's content.

    Of a directory, glob or prefix the files of one kind are taken, never a README, a licence or a
    data card. A text file is one document; `json` is a file that is one JSON value, an array of
    objects; `csv` has a first line with the columns' names.
    """
    kind: Literal["text", "chat", "sharegpt", "prompt_completion", "preference"] = "text"
    """Content of a record: text, a conversation, a `prompt` and its `completion`, or a preference.

    `sharegpt` is a conversation as ShareGPT has it: turns with `from` and `value` in the field
    `conversations`, and a field `system`. A preference is a `prompt` with a `chosen` and a
    `rejected` answer. Each field is a text or a list of messages; beside messages, a text is the
    user's prompt or the assistant's answer. Messages that both answers begin with are the prompt. A
    row holds one preference, each answer with its prompt in half of it.
    """
    fields: dict[str, str | tuple[str, ...]] | None = None
    """Fields of the records that hold what `kind` needs: `{prompt: question, completion: answer}`.

    A list of fields is joined line by line, without the empty ones: `{prompt: [instruction, input],
    completion: output}`. null: the fields have the names that `kind` gives them.
    """
    text_field: str = "text"
    """Field of a JSON object, or column of a Parquet file, that holds a document."""
    tokens_field: str | None = None
    """Field with a document's token ids, for data tokenized before; null: documents are text.

    The ids are taken as they are. With the default tokenizer every id is valid, otherwise only the
    tokenizer's own.
    """
    messages_field: str = "messages"
    """Field that holds a conversation (`kind: chat`, `sharegpt`).

    It is a list of messages with `role` and `content`, or `from` and `value`. The fields `tools`,
    `system` and `chat_template_kwargs` of the record belong to it.
    """
    chat_template: str | None = None
    """File with a Jinja template, or the template itself; null: the tokenizer's.

    The tokenizer's template `tool_use` renders conversations with tools.
    """
    template_date: str | None = None
    """Date that chat templates print with `strftime_now`, such as "2026-11-29".

    null: the day on which the run began. It is recorded, so that all nodes, and a run that goes on,
    make the same rows.
    """
    train_on: TrainOn | None = None
    """Tokens that are targets of the loss.

    assistant: all turns of the assistant; completion: the last of them, or the completion; all:
    every token. turns: all turns of the assistant, each in a document that ends with it, for
    templates that leave out the reasoning of earlier turns. null: `assistant` for chat,
    `completion` for prompt_completion, `all` for text.
    """
    isolate_documents: bool | None = None
    """Mask attention between the documents of a row and restart positions at 0 in each.

    null: false for text, else true.
    """
    packing: Literal["concat", "best_fit"] | None = None
    """Packing of documents into rows.

    concat: documents are joined and cut; best_fit: whole documents are fitted together, with
    padding where none fits. null: `best_fit` for chat and prompt_completion, `concat` for text. A
    preference is never packed.
    """
    begin_of_document: str | None = None
    """Token before each document, unless it is there already; an empty text: none.

    null: what the tokenizer's own post-processor adds to a text; a chat template adds its own.
    """
    skip_broken_lines: bool = False
    """Leave out and count lines and rows without a document (broken JSON, null, no text).

    A file of which little can be read is an error. false: the first such line ends the preparation.
    """
    tokenizer: str = ""
    """Tokenizer: `bytes`, a tokenizers JSON file, a Hugging Face directory, `id` or `id@revision`.

    bytes: UTF-8 bytes 0-255, end of document = 0. Empty: that of `model.pretrained`, or bytes for a
    model made from `model.config`.
    """
    trust_remote_code: bool = False
    """Let the tokenizer's own code run; `model.trust_remote_code` sets this key too."""
    end_of_document: str | None = None
    """Token after each document; null: the tokenizer's own end token."""
    cache: str | None = None
    """Directory of built token datasets, kept between runs.

    null: $AUTOHET_CACHE, else ~/.cache/autohet.
    """
    build_timeout_s: float = 3600.0
    """Seconds that a worker waits while another process of its node builds the same dataset."""
    held_out: float = 0.0
    """Share of each source's rows that is not trained on; `evaluation.split` sets this key too."""
    reads_held_out: bool = False
    """Read the rows that are held out instead of the others, as an evaluation does."""

    def __post_init__(self) -> None:
        require(
            bool(self.source),
            "data.source is empty; name a file, directory, glob, s3:// prefix or builtin",
        )
        require_positive("data.build_timeout_s", self.build_timeout_s)
        require(
            0 <= self.held_out < 1 and (self.held_out > 0 or not self.reads_held_out),
            f"data.held_out is {self.held_out}, but must be in [0, 1), and above 0 to be read",
        )
        self._check_fields()
        self._check_date()
        self._check_kind()

    def _check_date(self) -> None:
        if self.template_date is None:
            return
        try:
            date.fromisoformat(self.template_date)
        except ValueError:
            raise ConfigError(
                f"data.template_date is {self.template_date!r}; give a date such as 2026-11-29"
            ) from None
        is_rendered = self.kind != "text"
        require_effect(self, "data.template_date", is_rendered, "another data.kind than text")

    def _check_fields(self) -> None:
        known = FIELDS_BY_KIND[self.kind]
        for name, given in (self.fields or {}).items():
            require(
                name in known,
                f"data.fields names {name!r}, which data.kind {self.kind} does not read; known"
                f" here: {', '.join(known)}",
            )
            require(
                bool(given) and (name in JOINED_FIELDS or isinstance(given, str)),
                f"data.fields.{name} is {given!r}; give one field, or a list for"
                f" {' or '.join(JOINED_FIELDS)}",
            )
            require(
                name not in NAMED_BY or getattr(self, NAMED_BY[name]) == name,
                f"data.fields names {name!r}, and data.{NAMED_BY.get(name)} too; leave one out",
            )
        require(
            "text" not in (self.fields or {}) or self.tokens_field is None,
            "data.fields names 'text', but data.tokens_field is given; leave one out",
        )

    def _check_kind(self) -> None:
        require(
            len(self.weights) in (0, len(self.entries)),
            f"data.source has {len(self.entries)} sources, {len(self.weights)} with a weight; give"
            " every one a weight, or none",
        )
        is_text = self.kind == "text"
        require(
            not is_text or self.train_on in (None, "all"),
            f"data.train_on is {self.train_on}, but data.kind is text, which is trained on whole;"
            " set data.kind to chat or prompt_completion, or leave train_on out",
        )
        require(
            self.kind != "prompt_completion" or self.train_on not in ("assistant", "turns"),
            f"data.train_on is {self.train_on}, which data.kind prompt_completion does not tell"
            " apart; use completion or all",
        )
        if self.kind == "preference":
            for key, taken in (
                ("train_on", (None, "completion")),
                ("isolate_documents", (None, True)),
                ("packing", (None,)),
            ):
                value = getattr(self, key)
                require(
                    value in taken,
                    f"data.{key} is {str(value).lower()}, but data.kind is preference, whose rows"
                    f" hold one pair of answers each; leave {key} out",
                )
        require_effect(self, "data.text_field", is_text, "data.kind: text")
        is_tokenized = self.tokens_field is not None
        require_effect(self, "data.text_field", not is_tokenized, "data.tokens_field: null")
        has_messages = self.kind in ("chat", "sharegpt")
        require_effect(self, "data.messages_field", has_messages, "data.kind: chat")
        require(
            is_text or self.tokens_field is None,
            f"data.tokens_field is for data.kind text, not {self.kind}; leave one out",
        )
        require(
            not is_text or self.chat_template is None,
            "data.chat_template is given, but data.kind is text; set data.kind: chat",
        )
        require(
            is_text or self.format != "text",
            f"data.format is text, but data.kind {self.kind} needs records; leave format out",
        )

    @property
    def targets(self) -> TrainOn:
        """`train_on`, given or by kind."""
        if self.train_on is not None:
            return self.train_on
        by_kind: dict[str, TrainOn] = {
            "chat": "assistant",
            "prompt_completion": "completion",
            "preference": "completion",
            "sharegpt": "assistant",
        }
        return by_kind.get(self.kind, "all")

    @property
    def isolates(self) -> bool:
        """`isolate_documents`, given or by kind."""
        given = self.isolate_documents
        return self.kind != "text" if given is None else given

    @property
    def packs_best_fit(self) -> bool:
        """True if `packing`, given or by kind, is best_fit."""
        if self.packing is not None:
            return self.packing == "best_fit"
        return self.kind != "text"

    @property
    def marks_rows(self) -> bool:
        """True if rows carry marks of targets and pieces beside their tokens."""
        return self.kind != "text" or self.isolates or self.packs_best_fit

    def field_of(self, name: str) -> str | tuple[str, ...]:
        """Return the field of a record, or the fields, for a name of `fields`."""
        if name in (self.fields or {}):
            return (self.fields or {})[name]
        named = str(getattr(self, NAMED_BY[name])) if name in NAMED_BY else name
        if self.kind == "sharegpt" and named == "messages":
            return "conversations"
        return named

    @property
    def record_field(self) -> str:
        """Field that a record must have to be data."""
        if self.tokens_field is not None:
            return self.tokens_field
        field = self.field_of(FIELDS_BY_KIND[self.kind][0])
        return field if isinstance(field, str) else field[0]

    @property
    def entries(self) -> tuple[SourceEntry, ...]:
        """Sources of the section, each as an entry."""
        source = self.source
        given = (source,) if isinstance(source, str | SourceEntry) else source
        entries = []
        for each in given:
            if isinstance(each, str):
                each = SourceEntry(path=each)
            entries.append(each)
        return tuple(entries)

    @property
    def sources(self) -> tuple[str, ...]:
        """Paths of all sources."""
        return tuple(entry.path for entry in self.entries)

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights of the sources; empty if they are not weighted."""
        return tuple(float(each.weight) for each in self.entries if each.weight is not None)

    @property
    def cache_root(self) -> Path:
        """Directory of the built token datasets."""
        chosen = self.cache or os.environ.get("AUTOHET_CACHE") or "~/.cache/autohet"
        return Path(chosen).expanduser()


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """Loss on rows that are not trained on, by forward passes through the training plan."""

    source: str | SourceEntry | tuple[str | SourceEntry, ...] | None = None
    """Source of the evaluation rows, as `data.source`; null: `split` gives them.

    All other keys of `data` hold for it too. Its rows are read in their order, without weights.
    """
    split: float | None = None
    """Share of the rows of `data` to evaluate instead of training on them, such as 0.02.

    They are drawn from each source, in an order that depends on the data alone. Documents of a kind
    other than text are in one row; a text that is cut at a row's end may be in two.
    """
    every_steps: int = 100
    """Steps between evaluations; one more follows the last step."""
    at_start: bool = False
    """True: also evaluate the state before the first step."""
    max_sequences: int | None = None
    """Limit on the rows that an evaluation reads, from the first on; null: all."""
    early_stopping_patience: int | None = None
    """Evaluations in a row without improvement after which the run ends, with a checkpoint.

    All workers decide it from the losses alone, so that a change of the fleet or a restart changes
    nothing. null: never.
    """
    early_stopping_threshold: float = 0.0
    """Least decrease below the lowest loss so far that counts as an improvement."""

    def __post_init__(self) -> None:
        require(
            bool(self.source) != (self.split is not None),
            "evaluation needs one of source (files) and split (a share of data's rows)",
        )
        require(
            self.split is None or 0 < self.split < 1,
            f"evaluation.split is {self.split}, but must be a share between 0 and 1, such as 0.02",
        )
        require_at_least("evaluation.every_steps", self.every_steps, 1)
        require_at_least("evaluation.max_sequences", self.max_sequences, 1)
        patience = self.early_stopping_patience
        require_at_least("evaluation.early_stopping_patience", patience, 1)
        require_at_least("evaluation.early_stopping_threshold", self.early_stopping_threshold, 0)
        require_effect(
            self,
            "evaluation.early_stopping_threshold",
            patience is not None,
            "an evaluation.early_stopping_patience",
        )

    def is_due(self, step: int, last_step: int) -> bool:
        """Return True if a run of `last_step` steps evaluates the state after `step` updates."""
        if step == 0:
            return self.at_start
        return step % self.every_steps == 0 or step == last_step
