"""Render conversations as text by the model's chat template, with the spans that are trained on.

The template's own generation marks delimit the assistant's text. If the template has no marks, each
assistant turn is the text that its rendering adds to the rendering of the messages before it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from autohet.runtime.data.records import SKIP_REMEDY, BrokenRecord, is_conversation
from autohet.runtime.data.tokenization import split_revision
from planner.errors import ConfigError

ROLES = ("system", "developer", "user", "assistant", "model", "tool", "function", "ipython")
ASSISTANTS = ("assistant", "model")
ROLE_BY_SPEAKER = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
}
"""Roles by ShareGPT's names of the speakers (fields `from`, `value`)."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

ChatMessage = dict[str, Any]
MarkedSpan = tuple[int, int]
"""Range of characters [begin, end)."""


class RenderedText(NamedTuple):
    """A conversation as one text, and the spans of it that are targets, in order."""

    text: str
    spans: list[MarkedSpan]


class ChatTemplate:
    """A Jinja chat template with the special tokens of its tokenizer."""

    def __init__(self, template: str, special_tokens: dict[str, str]) -> None:
        self.template = template
        self._special_tokens = special_tokens
        self.has_marks = _GENERATION.search(template) is not None
        known = json.dumps([template, special_tokens], sort_keys=True)
        self.identity = hashlib.sha256(known.encode()).hexdigest()

    @classmethod
    def load(cls, tokenizer: str, given: str | None) -> ChatTemplate:
        """Load the template `given` (a file, or the template itself), else the tokenizer's.

        Raises:
            ConfigError: there is no template, or the tokenizer cannot be loaded.
        """
        from transformers import AutoTokenizer

        path = Path(tokenizer)
        name = str(path.parent) if path.is_file() else tokenizer
        source, revision = split_revision(name)
        try:
            loaded = AutoTokenizer.from_pretrained(
                source, revision=revision, trust_remote_code=False
            )
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise ConfigError(
                f"data.tokenizer: cannot load {tokenizer!r} for a chat template: {error}. Name a"
                " directory with a Hugging Face tokenizer, or a hub id"
            ) from error
        template = loaded.chat_template if given is None else given_template(given)
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            raise ConfigError(
                f"data.tokenizer {tokenizer!r} has no chat template; name a file with one in"
                " data.chat_template"
            )
        special_tokens = {key: str(token) for key, token in loaded.special_tokens_map.items()}
        return cls(template, special_tokens)

    def render(
        self, messages: Sequence[ChatMessage], tools: Any = None, *, prompt: bool = False
    ) -> str:
        """Render messages as text.

        `prompt`: append the text that the template puts before the assistant's answer.
        """
        return self._rendered(messages, tools, prompt=prompt, marks=False).text

    def render_marked(self, messages: Sequence[ChatMessage], tools: Any) -> RenderedText:
        """Render messages as text, with the spans of the template's own generation marks."""
        return self._rendered(messages, tools, prompt=False, marks=True)

    def _rendered(
        self, messages: Sequence[ChatMessage], tools: Any, *, prompt: bool, marks: bool
    ) -> RenderedText:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        found: Any
        try:
            found = render_jinja_template(
                conversations=[list(messages)],
                tools=tools,
                chat_template=self.template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **cast(Any, self._special_tokens),
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise BrokenRecord(
                f"the chat template refuses the conversation ({error}); fix it, or {SKIP_REMEDY}"
            ) from error
        # One text, and its spans, for each conversation.
        (text,), all_spans = found
        spans: list[MarkedSpan] = []
        if marks:
            for begin, end in all_spans[0]:
                spans.append((begin, end))
        return RenderedText(text, spans)


def given_template(given: str) -> str:
    """Return the template in `data.chat_template`, which is a file's path or the template itself.

    Raises:
        ConfigError: the file cannot be read.
    """
    if "{%" in given or "{{" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"data.chat_template {given!r}: {error.strerror}; name a file with a Jinja template, or"
            " give the template itself"
        ) from error


def messages_of(value: Any, field: str) -> list[ChatMessage]:
    """Return the messages of a record's field, in the form that transformers expects.

    Raises:
        BrokenRecord: the value is no conversation, a role is unknown, or an assistant turn is
        empty.
    """
    if not is_conversation(value):
        raise BrokenRecord(
            f"field {field!r} holds no list of messages (found: {_shown(value)}); set"
            f" data.messages_field, or {SKIP_REMEDY}"
        )
    return [_message(message, number) for number, message in enumerate(value, start=1)]


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return f"{type(value).__name__} {str(value)[:40]!r}"


def _message(given: dict[str, Any], number: int) -> ChatMessage:
    # A table of messages has null where a message has no such field.
    message = {key: value for key, value in given.items() if value is not None}
    if "role" not in message and "from" in message:
        speaker = message.pop("from")
        message["role"] = ROLE_BY_SPEAKER.get(speaker, speaker)
        message["content"] = message.pop("value", "")
    role = message.get("role")
    if role not in ROLES:
        near = difflib.get_close_matches(str(role), ROLES, n=1)
        hint = f"known: {', '.join(ROLES)}"
        if near:
            hint = f"did you mean {near[0]!r}?"
        raise BrokenRecord(f"message {number} has the unknown role {role!r}; {hint}")
    if role in ASSISTANTS and not _has_content(message):
        raise BrokenRecord(
            f"message {number} is an empty turn of the assistant; remove the turn, or {SKIP_REMEDY}"
        )
    return message


def _has_content(message: ChatMessage) -> bool:
    content = message.get("content")
    if isinstance(content, str):
        content = content.strip()
    return bool(content or message.get("tool_calls"))


def tools_of(record: dict[str, Any]) -> Any:
    """Return the tools of a record, given as a list or as JSON text; None if it has none."""
    tools = record.get("tools")
    if not isinstance(tools, str):
        return tools or None
    try:
        return json.loads(tools) or None
    except ValueError as error:
        raise BrokenRecord(f"field 'tools' is not valid JSON ({error}); fix it") from error


def render_chat(
    template: ChatTemplate, messages: list[ChatMessage], tools: Any, train_on: str
) -> RenderedText:
    """Render a conversation, with the text selected by `train_on` as its targets.

    `train_on` selects the assistant's turns (`assistant`), the last of them (`completion`) or all
    the text (`all`).

    Raises:
        BrokenRecord: the template marks nothing, or does not render a prefix as a prefix.
    """
    if train_on == "all":
        text = template.render(messages, tools)
        return RenderedText(text, [(0, len(text))])
    turns = [index for index, each in enumerate(messages) if each["role"] in ASSISTANTS]
    if not turns:
        return RenderedText(template.render(messages, tools), [])
    if template.has_marks:
        rendered = template.render_marked(messages, tools)
        spans = [(begin, end) for begin, end in rendered.spans if begin < end]
        if not spans:
            raise BrokenRecord(
                "the chat template's generation marks hold none of the assistant's turns; fix the"
                " marks in data.chat_template"
            )
        if train_on == "completion":
            spans = spans[-1:]
        return RenderedText(rendered.text, spans)
    text = template.render(messages, tools)
    if train_on == "completion":
        turns = turns[-1:]
    spans = [_turn_span(template, text, messages, tools, turn) for turn in turns]
    return RenderedText(text, spans)


def _turn_span(
    template: ChatTemplate, text: str, messages: list[ChatMessage], tools: Any, index: int
) -> MarkedSpan:
    """Return the span that message `index` adds to the rendering of the messages before it."""
    before = template.render(messages[:index], tools, prompt=True)
    through = template.render(messages[: index + 1], tools)
    _require_prefix(text, before, index)
    _require_prefix(text, through, index + 1)
    return len(before), len(through)


def _require_prefix(text: str, prefix: str, num_messages: int) -> None:
    if text.startswith(prefix):
        return
    place = 0
    while place < min(len(text), len(prefix)) and text[place] == prefix[place]:
        place += 1
    raise BrokenRecord(
        f"the chat template renders the first {num_messages} messages otherwise alone than in the"
        f" whole conversation (at character {place}: {prefix[place : place + 20]!r}, not"
        f" {text[place : place + 20]!r}), so the assistant's text cannot be told apart; name a"
        " template with {% generation %} marks in data.chat_template"
    )


def render_completion(
    template: ChatTemplate, prompt: list[ChatMessage], completion: list[ChatMessage], tools: Any
) -> RenderedText:
    """Render a prompt and its completion, both messages, with the completion as the target.

    Raises:
        BrokenRecord: the template does not render the prompt as a prefix.
    """
    text = template.render([*prompt, *completion], tools)
    before = template.render(prompt, tools, prompt=True)
    _require_prefix(text, before, len(prompt))
    return RenderedText(text, [(len(before), len(text))])
