"""Chat templates of tokenizers, and the forms of messages that each of them renders."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

from autohet.runtime.data.chat.pieces import MAX_MESSAGES, Rendering, render_pieces
from autohet.runtime.data.records import SKIP_REMEDY, BrokenRecord
from autohet.runtime.data.tokenization import split_revision
from planner.errors import ConfigError
from planner.inputs.documents import Document, Json

_DATE = "strftime_now"
"""Function of templates that prints the present time."""
RULES = "turns-3"
"""Version of the rules that make text and targets of a conversation."""
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_QUESTION, _ANSWER, _MORE = "Zq1x", "Zq2x", "Zq3x"
"""Texts of probes, which occur in no template."""

ChatMessage = Document
MarkedSpan = tuple[int, int]
"""Range of characters [begin, end)."""


class RenderedText(NamedTuple):
    """A conversation as one text, and the spans of it that are targets, in order."""

    text: str
    spans: list[MarkedSpan]


@dataclass(frozen=True)
class Conversation:
    """Messages with what else a chat template takes: tools, and a record's own variables."""

    messages: Sequence[ChatMessage]
    tools: Any = None
    options: Json = field(default_factory=dict)

    def first(self, count: int) -> Conversation:
        """Return the conversation of the first `count` messages."""
        return Conversation(self.messages[:count], self.tools, self.options)

    def followed_by(self, message: ChatMessage) -> Conversation:
        return Conversation([*self.messages, message], self.tools, self.options)


class ChatTemplate:
    """A Jinja chat template with the special tokens of its tokenizer.

    `for_tools`: the tokenizer's other template, for conversations with tools. date: day that
    templates print as the present one (`strftime_now`); None: today.
    """

    def __init__(
        self,
        template: str,
        special_tokens: dict[str, str],
        for_tools: str | None = None,
        date: str | None = None,
    ) -> None:
        self.template = template
        self._for_tools = None
        if for_tools is not None:
            self._for_tools = ChatTemplate(for_tools, special_tokens, date=date)
        self.has_marks = _GENERATION.search(template) is not None
        known: list[Any] = [RULES, template, special_tokens, for_tools]
        self._special_tokens = special_tokens
        self._day: datetime.date | None = None
        if _DATE in template or _DATE in (for_tools or ""):
            today = datetime.date.today().isoformat()
            self._day = datetime.date.fromisoformat(date or today)
            known.append(self._day.isoformat())
        self.identity = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()

    @classmethod
    def load(cls, tokenizer: str, given: str | None, date: str | None = None) -> ChatTemplate:
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
        own = loaded.chat_template
        named = own if isinstance(own, dict) else {"default": own}
        template = named.get("default")
        for_tools = named.get("tool_use")
        if given is not None:
            template = given_template(given)
            for_tools = None
        if not template:
            known = ", ".join(name for name, content in named.items() if content)
            found = f" chat templates {known}, but no default" if known else " no chat template"
            raise ConfigError(
                f"data.tokenizer {tokenizer!r} has{found}; name a file with one in"
                " data.chat_template"
            )
        special_tokens = {key: str(token) for key, token in loaded.special_tokens_map.items()}
        return cls(template, special_tokens, for_tools, date)

    def chosen_for(self, tools: Any) -> ChatTemplate:
        """Return the template for conversations with `tools`."""
        if tools is None or self._for_tools is None:
            return self
        return self._for_tools

    def render(self, conversation: Conversation, *, prompt: bool = False) -> str:
        """Render a conversation as text.

        `prompt`: append the text that the template puts before the assistant's answer.

        Raises:
            BrokenRecord: the template refuses the conversation.
        """
        return self._rendered(conversation, prompt=prompt, marks=False).text

    def render_marked(self, conversation: Conversation) -> RenderedText:
        """Render a conversation, with the spans of the template's own generation marks."""
        return self._rendered(conversation, prompt=False, marks=True)

    def render_pieces(self, conversation: Conversation, *, prompt: bool = False) -> Rendering:
        """Render a conversation, with the message that each piece of the text belongs to.

        Without pieces: the template does not print messages in a loop.
        """
        text = self.render(conversation, prompt=prompt)
        unknown = Rendering(text, [])
        if len(conversation.messages) > MAX_MESSAGES:
            return unknown
        from jinja2.exceptions import TemplateError

        variables = {
            "tools": conversation.tools,
            "documents": None,
            "add_generation_prompt": prompt,
            **self._special_tokens,
            **conversation.options,
        }
        self._set_date()
        try:
            found = render_pieces(self.template, conversation.messages, variables)
        except (TemplateError, ImportError, AttributeError, LookupError, TypeError, ValueError):
            # A template may look into text that has marks in it.
            return unknown
        is_known = any(piece.message is not None for piece in found.pieces)
        return found if is_known and found.text == text else unknown

    def _rendered(self, conversation: Conversation, *, prompt: bool, marks: bool) -> RenderedText:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        variables: Document = {**self._special_tokens, **conversation.options}
        found: Any
        self._set_date()
        try:
            found = render_jinja_template(
                conversations=[list(conversation.messages)],
                tools=conversation.tools,
                chat_template=self.template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **cast(Any, variables),
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

    def _set_date(self) -> None:
        """Give the template its day: the library's own function prints today's."""
        if self._day is not None:
            from transformers.utils.chat_template_utils import _compile_jinja_template

            # The library keeps one environment for each template.
            environment = _compile_jinja_template(self.template).environment
            environment.globals[_DATE] = self._day.strftime

    def fit(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Return messages in the forms that the template renders.

        Content is text or a list of parts, the arguments of tool calls are objects or JSON text.
        """
        return [self._fitted(message) for message in messages]

    def _fitted(self, message: ChatMessage) -> ChatMessage:
        content = message.get("content")
        if isinstance(content, list) and not self._renders_parts:
            content = text_of_content(content)
        if isinstance(content, str) and self._needs_part:
            content = _part(content)
        fitted = message if content is None else {**message, "content": content}
        if "tool_calls" not in message:
            return fitted
        wants_text, content_beside = self._form_of_tool_calls
        calls = [_with_arguments(call, wants_text) for call in message["tool_calls"]]
        return {**content_beside, **fitted, "tool_calls": calls}

    @cached_property
    def _needs_part(self) -> bool:
        """True if the template prints a part of content, but not the same text alone."""
        text = self.probe(_user(_QUESTION), _assistant(_ANSWER))
        part = self.probe(_user(_part(_QUESTION)), _assistant(_part(_ANSWER)))
        return not _is_printed(text) and _is_printed(part)

    @cached_property
    def _renders_parts(self) -> bool:
        more = _part(_MORE)
        text = self.probe(_user(_part(_QUESTION) + more), _assistant(_part(_ANSWER) + more))
        # Templates without parts print Python's form of the list, or its JSON.
        is_list = re.search(r"[\"']type[\"']", text) is not None
        return _is_printed(text) and text.count(_MORE) == 2 and not is_list

    @cached_property
    def _form_of_tool_calls(self) -> tuple[bool, Document]:
        """True if the template needs arguments as JSON text, and the content that it needs beside.

        The first form that prints the call, which R1-Distill's does beside null alone.
        """
        result = {"role": "tool", "name": _MORE, "tool_call_id": "call00001", "content": _MORE}
        beside: tuple[Document, ...] = {}, {"content": None}, {"content": ""}
        rendered: list[tuple[bool, Document]] = []
        # Some templates look into the content of calls that others follow.
        followers = [result], [_user(_MORE)], list[ChatMessage]()
        for after, wants_text, content in product(followers, (False, True), beside):
            function = {"name": _ANSWER, "arguments": {_MORE: _MORE}}
            call = {"type": "function", "id": "call00001", "function": function}
            calls = [_with_arguments(call, wants_text)]
            message = {"role": "assistant", "tool_calls": calls, **content}
            printed = self.probe(_user(_QUESTION), message, *after)
            if _ANSWER in printed and not re.search("None|null", printed):
                return wants_text, content
            if printed and content != beside[1]:
                rendered.append((wants_text, content))
        return rendered[0] if rendered else (False, {})

    def probe(self, *messages: ChatMessage) -> str:
        """Return the rendering of a few messages; empty if the template refuses them."""
        try:
            return self.render(Conversation(messages))
        except BrokenRecord:
            return ""

    @cached_property
    def ends_with_next(self) -> bool:
        """True if a turn of the assistant ends only with the mark of the role that follows."""
        return self.end_of_answer is not None and not self.end_of_answer.strip()

    @cached_property
    def end_of_last(self) -> str | None:
        """Text after an answer that no message follows; None if it is unknown."""
        _, answer, after = self.probe(*self._example[:2]).rpartition(_ANSWER)
        return after.strip() if answer else None

    @cached_property
    def marks_leave_end(self) -> bool:
        """True if the template's generation marks leave out what ends a turn."""
        if not self.has_marks or self.end_of_answer is None:
            return False
        rendered = self.render_marked(Conversation(self._example))
        last = max((end for _, end in rendered.spans), default=0)
        answer_end = rendered.text.index(_ANSWER) + len(_ANSWER)
        left_out = self.end_of_answer[max(0, last - answer_end) :]
        return bool(rendered.spans) and (bool(left_out.strip()) or self.ends_with_next)

    @cached_property
    def header(self) -> str:
        """Text that the template puts before an answer to the first question; empty: none."""
        try:
            question = Conversation(self.fit([_user(_QUESTION)]))
            return self.render_pieces(question, prompt=True).tail
        except BrokenRecord:
            return ""

    @property
    def _example(self) -> list[ChatMessage]:
        return self.fit([_user(_QUESTION), _assistant(_ANSWER), _user(_MORE)])

    @cached_property
    def end_of_answer(self) -> str | None:
        """Text that the assistant's message prints after its content; None if it is unknown."""
        if not self.probe(*self._example):
            return None
        rendering = self.render_pieces(Conversation(self._example))
        for piece in rendering.of(1):
            _, found, after = rendering.text[piece.begin : piece.end].partition(_ANSWER)
            if found:
                return after
        return None


def _part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _is_printed(text: str) -> bool:
    return _QUESTION in text and _ANSWER in text


def text_of_content(content: Any) -> str:
    """Return the text of a message's content; empty if it has none."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return content or ""


def _user(content: Any) -> ChatMessage:
    return {"role": "user", "content": content}


def _assistant(content: Any) -> ChatMessage:
    return {"role": "assistant", "content": content}


def _with_arguments(call: Document, wants_text: bool) -> Document:
    """Return a tool call with its arguments as JSON text, or as the value of that text.

    `parameters` is Llama's name of arguments.
    """
    function = call.get("function", call)
    if "arguments" not in function:
        names = {"parameters": "arguments"}
        function = {names.get(key, key): value for key, value in function.items()}
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    if wants_text and not isinstance(arguments, str):
        arguments = json_text(arguments)
    if not wants_text and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise BrokenRecord(
                f"the arguments of the tool call {function.get('name')!r} are not valid JSON"
                f" ({error}); fix them, or {SKIP_REMEDY}"
            ) from error
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def json_text(value: Any) -> str:
    """Return a value of a message as JSON text.

    Raises:
        BrokenRecord: a table holds a date, bytes or a decimal number there.
    """
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError as error:
        raise BrokenRecord(
            f"a message holds {str(value)[:40]!r} ({error}); store it as text, or {SKIP_REMEDY}"
        ) from error


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
