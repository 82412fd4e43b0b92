"""Encode records of chat, of prompt and completion, and of token ids as examples.

An example is token ids, and a mask of those that count as targets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from autohet.runtime.data.chat.targets import (
    render_chat,
    render_completion,
    render_each_turn,
    warn_once,
)
from autohet.runtime.data.chat.template import ChatTemplate, RenderedText
from autohet.runtime.data.conversations import (
    RECORD_FIELDS,
    SYSTEM,
    SYSTEM_PROMPT,
    conversation_of,
    messages_of,
)
from autohet.runtime.data.marks import MAX_TOKEN
from autohet.runtime.data.records import SKIP_REMEDY, BrokenRecord, text_of
from autohet.runtime.data.tokenization import Tokenizer, Tokens
from autohet.runtime.job import DataSection
from planner.errors import ConfigError
from planner.inputs.documents import Document

PROMPT = "prompt"
COMPLETION = "completion"
LABEL = "label"
"""Whether a completion is wanted, in unpaired preferences (TRL's KTO)."""
PADDING_MASK = "attention_mask"
TARGET_MASKS = {PADDING_MASK: 0, "labels": -100, "completion_mask": 0, "assistant_masks": 0}
"""Value by field that leaves a token out of the targets, in rows of token ids."""
CHOSEN = "chosen"
REJECTED = "rejected"
USERS = ("user", "human")


class Example(NamedTuple):
    """Token ids of one document, int64 [n], and a mask of those that count as targets.

    rejected: of a preference, the other answer with its prompt, which shares the row.
    """

    ids: NDArray[np.int64]
    counts: NDArray[np.bool_]
    rejected: Example | None = None


class ExampleKind(Protocol):
    """Conversion of records into examples.

    `columns`: the fields that it reads. `identity` changes whenever an example could change.
    """

    @property
    def columns(self) -> tuple[str, ...]: ...

    @property
    def identity(self) -> str: ...

    def extract(self, record: Any) -> Any:
        """Return the content of a record to encode.

        Raises:
            BrokenRecord: the record lacks that content.
        """

    def encode(self, extracted: Sequence[Any]) -> list[Example]:
        """Return the examples of each extracted content, in order."""


def chat_template_of(data: DataSection) -> ChatTemplate:
    """Return the chat template of the data.

    Raises:
        ConfigError: there is none.
    """
    return ChatTemplate.load(data.tokenizer, data.chat_template, data.template_date)


def kind_of_examples(data: DataSection, tokenizer: Tokenizer) -> ExampleKind | None:
    """Return the way to convert records of `data` into examples; None: the records hold text.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """
    if data.kind in ("chat", "sharegpt"):
        template = chat_template_of(data)
        return ChatExamples(template, tokenizer, str(data.field_of("messages")), data.targets)
    if data.kind == "prompt_completion":
        return CompletionExamples(data, tokenizer)
    if data.kind == "preference":
        return PreferenceExamples(data, tokenizer)
    if data.tokens_field is not None:
        return TokenExamples(data.tokens_field, tokenizer, data.marks_rows)
    return None


@dataclass(frozen=True)
class ChatExamples:
    """Conversations rendered by a chat template, which itself inserts all special tokens."""

    template: ChatTemplate
    tokenizer: Tokenizer
    field: str
    train_on: str

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.field, *RECORD_FIELDS)

    @property
    def identity(self) -> str:
        return f"chat {self.template.identity} {self.field} {self.train_on}"

    def extract(self, record: Any) -> list[RenderedText]:
        conversation = conversation_of(_object(record), self.field)
        if self.train_on == "turns":
            return render_each_turn(self.template, conversation)
        return [render_chat(self.template, conversation, self.train_on)]

    def encode(self, extracted: Sequence[list[RenderedText]]) -> list[Example]:
        return encode_rendered(self.tokenizer, [each for found in extracted for each in found])


def encode_rendered(tokenizer: Tokenizer, rendered: Sequence[RenderedText]) -> list[Example]:
    """Encode rendered texts; a token counts as a target if it holds a character of a span.

    The same rule as transformers' `apply_chat_template` (`return_assistant_tokens_mask`).
    """
    spans = [each.spans for each in rendered]
    encoded = tokenizer.encode_spans([each.text for each in rendered], spans)
    return [Example(ids, counts) for ids, counts in encoded]


Completion = RenderedText | tuple[str, str]
"""A prompt and its completion: rendered messages, or two texts."""


class _Completions:
    """Prompts and their completions: both texts, or both messages."""

    def __init__(self, data: DataSection, tokenizer: Tokenizer) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._template: ChatTemplate | None = None
        self._all = data.targets == "all"
        self.identity = f"{data.kind} {data.targets} {self._known()} {tokenizer.end_token}"

    def _known(self) -> str:
        """Return the identity of the chat template; empty if the data can only be texts."""
        if self._data.chat_template is not None:
            return self._loaded().identity
        if self._data.tokenizer == "bytes":
            return ""
        try:
            return self._loaded().identity
        except ConfigError:
            return ""

    def _loaded(self) -> ChatTemplate:
        if self._template is None:
            self._template = chat_template_of(self._data)
        return self._template

    def _of(self, record: Document, field: str) -> Completion:
        """Return the record's prompt with the completion in `field`."""
        prompt = record.get(PROMPT)
        completion = record.get(field)
        if isinstance(prompt, list) and isinstance(completion, list):
            if prompt and completion[: len(prompt)] == prompt:
                completion = completion[len(prompt) :]
            return render_completion(
                self._loaded(),
                conversation_of(record, PROMPT),
                messages_of(completion, field),
                self._data.targets,
            )
        text = text_of(record, field)
        before = text_of(record, PROMPT)
        for name in (SYSTEM, SYSTEM_PROMPT):
            if record.get(name) and name not in self._data.field_of(PROMPT):
                warn_once(
                    f"{name!r} has no effect on prompts that are texts; name it in data.fields:"
                    f" {{prompt: [{name}, ...]}}"
                )
        if not text.strip():
            raise BrokenRecord(f"the {field} is empty; remove the line, or {SKIP_REMEDY}")
        return before, text

    def _encoded(self, extracted: Sequence[Completion]) -> list[Example]:
        """Encode messages in one call and texts in another, and return all in their order."""
        rendered: dict[int, RenderedText] = {}
        texts: dict[int, tuple[str, str]] = {}
        for place, each in enumerate(extracted):
            if isinstance(each, RenderedText):
                rendered[place] = each
            else:
                texts[place] = each
        of_messages = encode_rendered(self._tokenizer, list(rendered.values()))
        of_texts = self._encode_texts(list(texts.values()))
        examples = dict(zip(rendered, of_messages, strict=True))
        examples |= zip(texts, of_texts, strict=True)
        return [examples[place] for place in range(len(extracted))]

    def _encode_texts(self, texts: Sequence[tuple[str, str]]) -> list[Example]:
        """Encode each prompt with its completion, and append the end token.

        The completion begins where these ids part from those of the prompt alone, as in TRL.
        """
        begins = self._tokenizer.begin_tokens if self._data.begin_of_document is None else ()
        prompts = self._tokenizer.encode([prompt for prompt, _ in texts])
        wholes = self._tokenizer.encode([prompt + completion for prompt, completion in texts])
        examples = []
        for prompt, whole in zip(prompts, wholes, strict=True):
            before = begun(prompt, begins)
            ids = _ended(begun(whole, begins).astype(np.int64), self._tokenizer)
            num_shared = min(len(before), len(ids))
            parts = before[:num_shared] != ids[:num_shared]
            if parts.any():
                num_shared = int(parts.argmax())
                warn_once(
                    "the ends of some prompts merge with their completions into tokens that the"
                    " model does not see when it answers; end prompts without a space, and begin"
                    " completions with it"
                )
            first_target = 0 if self._all else num_shared
            examples.append(Example(ids, np.arange(len(ids)) >= first_target))
        return examples


class CompletionExamples(_Completions):
    """Records with `prompt` and `completion`."""

    columns = (PROMPT, COMPLETION, LABEL, *RECORD_FIELDS)

    def extract(self, record: Any) -> Completion:
        label = _object(record).get(LABEL)
        if str(label).lower() == "false" and self._data.field_of(COMPLETION) != LABEL:
            warn_once(
                f"{LABEL!r} has no effect: a completion labelled false is trained on as the others"
                " are; remove such records"
            )
        return self._of(with_messages(_object(record)), COMPLETION)

    def encode(self, extracted: Sequence[Completion]) -> list[Example]:
        return self._encoded(extracted)


class PreferenceExamples(_Completions):
    """Records with `prompt`, `chosen` and `rejected`, or with two conversations that part."""

    columns = (PROMPT, CHOSEN, REJECTED, *RECORD_FIELDS)

    def extract(self, record: Any) -> tuple[Completion, Completion]:
        record = _with_prompt(_object(record))
        return self._of(record, CHOSEN), self._of(record, REJECTED)

    def encode(self, extracted: Sequence[tuple[Completion, Completion]]) -> list[Example]:
        chosen = self._encoded([one for one, _ in extracted])
        rejected = self._encoded([other for _, other in extracted])
        for one, other in zip(chosen, rejected, strict=True):
            # Both begin where one of them parts from their prompt, as in TRL.
            firsts = [int(each.counts.argmax()) for each in (one, other)]
            for each, first in zip((one, other), firsts, strict=True):
                each.counts[min(firsts) : first] = True
        return [one._replace(rejected=other) for one, other in zip(chosen, rejected, strict=True)]


def _with_prompt(record: Document) -> Document:
    """Return a preference with its prompt: what both answers begin with, if it has none.

    These are messages, or whole words of a text. A prompt that is a text beside conversations
    repeats the user's message among them, or is that message.

    Raises:
        BrokenRecord: without a prompt the answers share no message, or one is a beginning of the
        other.
    """
    chosen = record.get(CHOSEN)
    rejected = record.get(REJECTED)
    prompt = record.get(PROMPT)
    if prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
        return {**record, **_split_texts(chosen, rejected)}
    are_conversations = isinstance(chosen, list) and isinstance(rejected, list)
    if isinstance(prompt, list) or not are_conversations:
        return with_messages(record)
    chosen = cast(list[Any], chosen)
    rejected = cast(list[Any], rejected)
    shortest = min(len(chosen), len(rejected))
    shared = 0
    while shared < shortest and chosen[shared] == rejected[shared]:
        shared += 1
    if isinstance(prompt, str) and not shared:
        return with_messages(record)
    if not 0 < shared < shortest:
        raise BrokenRecord(
            f"no prompt, and fields {CHOSEN!r} and {REJECTED!r} share {shared} messages of"
            f" {len(chosen)} and {len(rejected)}; give a prompt, or {SKIP_REMEDY}"
        )
    begins = chosen[:shared]
    if isinstance(prompt, str) and not any(_is_of_user(each) for each in begins):
        begins = [*begins, {"role": "user", "content": prompt}]
    parts = {PROMPT: begins, CHOSEN: chosen[shared:], REJECTED: rejected[shared:]}
    return {**record, **parts}


def _split_texts(chosen: str, rejected: str) -> dict[str, str]:
    """Return the words that both texts begin with as the prompt, and the rest of each."""
    shortest = min(len(chosen), len(rejected))
    pairs = zip(chosen, rejected, strict=False)
    num_shared = next((place for place, (a, b) in enumerate(pairs) if a != b), shortest)
    # A space belongs to the answer, as in TRL.
    begin = re.sub(r" ?\S*\Z", "", chosen[:num_shared])
    if not begin.strip():
        raise BrokenRecord(
            f"no prompt, and the texts of {CHOSEN!r} and {REJECTED!r} begin with no common word;"
            f" give a prompt, or {SKIP_REMEDY}"
        )
    return {PROMPT: begin, CHOSEN: chosen[len(begin) :], REJECTED: rejected[len(begin) :]}


def with_messages(record: Document) -> Document:
    """Return a record whose texts beside messages are messages, of the user or the assistant."""
    given = {name: record.get(name) for name in (PROMPT, COMPLETION, CHOSEN, REJECTED)}
    if not any(isinstance(value, list) for value in given.values()):
        return record
    found = dict(record)
    for name, value in given.items():
        if isinstance(value, str):
            role = "user" if name == PROMPT else "assistant"
            found[name] = [{"role": role, "content": value}]
    return found


def _is_of_user(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role", message.get("from")) in USERS


def _ended(ids: NDArray[np.int64], tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Append the end token, unless `ids` ends with it already."""
    if len(ids) and ids[-1] == tokenizer.end_token:
        return ids
    return np.append(ids, tokenizer.end_token)


@dataclass(frozen=True)
class TokenExamples:
    """Rows of token ids, used unchanged but for padding, with the record's own masks of targets.

    `marked`: rows carry marks; else every token is a target.
    """

    field: str
    tokenizer: Tokenizer
    marked: bool

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.field, *TARGET_MASKS)

    @property
    def identity(self) -> str:
        return f"tokens {self.field}"

    def extract(self, record: Any) -> Example:
        ids = self._ids(record)
        counts = np.ones(len(ids), np.bool_)
        present = counts
        for name, left_out in TARGET_MASKS.items():
            mask = record.get(name)
            if name == self.field or not isinstance(mask, list):
                continue
            num_values = sum(isinstance(each, int | float) for each in mask)
            if num_values != len(ids) or len(mask) != len(ids):
                raise BrokenRecord(
                    f"field {name!r} holds {num_values} values for {len(ids)} tokens; fix the line,"
                    f" or {SKIP_REMEDY}"
                )
            counts = counts & (np.asarray(mask) != left_out)
            if name == PADDING_MASK:
                present = counts
            if not self.marked and not counts[present].all():
                left_out_here = (present & ~counts).sum()
                raise BrokenRecord(
                    f"field {name!r} leaves out {left_out_here} of {len(ids)} tokens, which rows"
                    " without marks train on; set data.packing: best_fit, or remove the field"
                )
        return Example(ids[present], counts[present])

    def _ids(self, record: Any) -> NDArray[np.int64]:
        value = _object(record).get(self.field)
        if not isinstance(value, list) or not value:
            raise BrokenRecord(
                f"field {self.field!r} holds no list of token ids; set data.tokens_field, or"
                f" {SKIP_REMEDY}"
            )
        try:
            ids = np.array(value)
        except ValueError:
            # Lists of unequal lengths are no array; an empty one of floats is refused below.
            ids = np.empty(0)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise BrokenRecord(f"field {self.field!r} holds {str(value)[:40]}, no token ids")
        limit = min(self.tokenizer.vocab_size, MAX_TOKEN)
        outside = ids[(ids < 0) | (ids >= limit)]
        if outside.size:
            raise BrokenRecord(
                f"field {self.field!r} holds token id {outside[0]}, outside the {limit} of"
                " data.tokenizer; name the tokenizer that made the rows"
            )
        return ids.astype(np.int64)

    def encode(self, extracted: Sequence[Example]) -> list[Example]:
        return list(extracted)


def _object(record: Any) -> Document:
    if not isinstance(record, dict):
        raise BrokenRecord(
            f"the line holds a {type(record).__name__}, not an object; remove it, or {SKIP_REMEDY}"
        )
    return record


def begin_tokens(data: DataSection, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token ids before each document.

    They are that of `data.begin_of_document` or, for text, those that the tokenizer itself adds.
    Prompts that are texts get the latter where they are encoded, and chat templates have their own.

    Raises:
        ConfigError: the tokenizer does not have the token.
    """
    if data.begin_of_document is None:
        is_text = data.kind == "text" and data.tokens_field is None
        return tokenizer.begin_tokens if is_text else ()
    if not data.begin_of_document:
        return ()
    token = tokenizer.token_id(data.begin_of_document)
    if token is None:
        raise ConfigError(
            f"data.begin_of_document is {data.begin_of_document!r}, which data.tokenizer"
            f" {data.tokenizer} does not have; name one of its special tokens"
        )
    return (token,)


def begun(tokens: Tokens, begin: tuple[int, ...]) -> Tokens:
    """Prepend the tokens that begin a document, unless they are there already."""
    if not begin or tuple(tokens[: len(begin)].tolist()) == begin:
        return tokens
    return np.concatenate([np.array(begin, np.int64), tokens])
