"""Conversations of records: messages, tools and marks in the form that chat templates take."""

from __future__ import annotations

import contextlib
import difflib
import json
from typing import Any

from autohet.runtime.data.chat.pieces import ASSISTANTS
from autohet.runtime.data.chat.targets import REASONING, TRAINED_KEYS, warn_once
from autohet.runtime.data.chat.template import (
    ChatMessage,
    Conversation,
    json_text,
    text_of_content,
)
from autohet.runtime.data.records import SKIP_REMEDY, BrokenRecord, is_conversation, remedy_for
from planner.inputs.documents import Document

ROLES = ("system", "developer", "user", "assistant", "model", "tool", "function", "ipython")
TOOLS = ("tool", "function", "ipython")
"""Roles of the results of tools."""
ROLE_BY_SPEAKER = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
}
"""Roles by ShareGPT's names of the speakers (fields `from`, `value`)."""
CONTENT_NAMES = ("value", "text")
"""Other names of a message's content."""
SYSTEM = "system"
OPTIONS = "chat_template_kwargs"
IMAGES = ("image", "images")
FUNCTIONS = "functions"
"""The older form of `tools`."""
SYSTEM_PROMPT = "system_prompt"
"""Field of some data sets that no library reads."""
RECORD_FIELDS = (SYSTEM, SYSTEM_PROMPT, "tools", FUNCTIONS, OPTIONS, *IMAGES)
"""Fields of a record that belong to its conversation, beside the messages."""
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "chat_template")


def conversation_of(record: Document, field: str) -> Conversation:
    """Return the conversation in a record's field, with the record's system prompt and tools.

    Raises:
        BrokenRecord: it is no conversation (`messages_of`), or what belongs to it is broken.
    """
    if field not in record:
        names = ", ".join(sorted(record)[:8])
        key = "set data.messages_field"
        raise BrokenRecord(f"no field {field!r} (found: {names}); {remedy_for(record, key)}")
    messages = messages_of(record[field], field)
    for name in IMAGES:
        if record.get(name):
            raise BrokenRecord(
                f"field {name!r} is not empty, and only text is trained on; remove the record, or"
                f" {SKIP_REMEDY}"
            )
    system = record.get(SYSTEM)
    if system and not isinstance(system, str):
        raise BrokenRecord(f"field {SYSTEM!r} holds {str(system)[:40]!r}, no text; fix the line")
    if system and system.strip() and messages[0]["role"] != SYSTEM:
        messages = [{"role": SYSTEM, "content": system}, *messages]
    elif record.get(SYSTEM_PROMPT) and messages[0]["role"] != SYSTEM:
        warn_once(f"{SYSTEM_PROMPT!r} has no effect on conversations; call the field {SYSTEM!r}")
    for message in messages:
        if message["role"] not in ASSISTANTS and any(message.get(key) for key in TRAINED_KEYS):
            warn_once(
                f"{', '.join(TRAINED_KEYS)} have an effect on the assistant's messages alone; other"
                " messages are not trained on"
            )
    return Conversation(messages, tools_of(record), _options_of(record))


def messages_of(value: Any, field: str) -> list[ChatMessage]:
    """Return the messages of a record's field, in the form that transformers expects.

    Raises:
        BrokenRecord: the value is no conversation, a role is unknown, or an assistant turn is
        empty.
    """
    if not is_conversation(value):
        raise BrokenRecord(
            f"field {field!r} holds no list of messages (found: {_shown(value)}); set"
            f" data.messages_field or data.fields, or {SKIP_REMEDY}"
        )
    return [_message(message, number) for number, message in enumerate(value, start=1)]


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str) and value.lstrip()[:2] in ("[{", "[["):
        return f"text {value[:40]!r} that is no JSON, which has double quotes"
    return f"{type(value).__name__} {str(value)[:40]!r}"


def _message(given: Document, number: int) -> ChatMessage:
    # A table of messages has null where a message has no such field.
    message = {key: value for key, value in given.items() if value is not None}
    if "role" not in message and "from" in message:
        message["role"] = message.pop("from")
        known = str(message["role"]).lower()
        message["role"] = ROLE_BY_SPEAKER.get(known, known if known in ROLES else message["role"])
    for name in CONTENT_NAMES:
        if "content" not in message and name in message:
            message["content"] = message.pop(name)
    role = message.get("role")
    if role not in ROLES:
        near = [ROLE_BY_SPEAKER.get(str(role)), *difflib.get_close_matches(str(role), ROLES)]
        hint = f"known: {', '.join(ROLES)}"
        if isinstance(role, int):
            hint = "read a directory whose data card has the names of roles as hf://DIRECTORY"
        elif any(near):
            hint = f"did you mean {next(filter(None, near))!r}?"
        raise BrokenRecord(f"message {number} has the unknown role {role!r}; {hint}")
    if "content" in message:
        message["content"] = _content(message["content"], role, number)
    function = _parsed(message.pop("function_call", None), "function_call")
    older = function and {"type": "function", "function": function}
    message["tool_calls"] = _calls(message.get("tool_calls") or older)
    if not message["tool_calls"]:
        del message["tool_calls"]
    if role in ASSISTANTS and not _has_content(message):
        raise BrokenRecord(
            f"message {number} is an empty turn of the assistant; remove the turn, or {SKIP_REMEDY}"
        )
    return message


def _content(content: Any, role: str, number: int) -> str | list[dict[str, str]]:
    """Return content as text or parts; a number, and a tool's result, as its JSON text."""
    if isinstance(content, str):
        return content
    parts = [content] if isinstance(content, dict) else content
    are_parts = isinstance(parts, list)
    if role in TOOLS and are_parts:
        are_parts = all(isinstance(part, dict) and "type" in part for part in parts)
    if not are_parts:
        return json_text(content)
    return [_text_part(part, number) for part in parts]


def _text_part(part: Any, number: int) -> dict[str, str]:
    """Return a part of content as `{type: text, text: ...}`."""
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        raise BrokenRecord(
            f"message {number} has a part of type {kind!r} in its content, and only text is trained"
            f" on; remove the part, or {SKIP_REMEDY}"
        )
    return {"type": "text", "text": text}


def _calls(value: Any) -> list[Document]:
    """Return tool calls, given as a list, as one call, or as JSON text of either.

    Raises:
        BrokenRecord: a call is no object, or has no name.
    """
    given = _parsed(value, "tool_calls") or []
    given = given if isinstance(given, list) else [given]
    calls = [_parsed(each, "tool_calls") for each in given]
    for call in calls:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or "name" not in function:
            raise BrokenRecord(
                f"a tool call is {str(call)[:40]!r}; give an object with name and"
                f" arguments, or {SKIP_REMEDY}"
            )
    return calls


def _has_content(message: ChatMessage) -> bool:
    text = text_of_content(message.get("content")).strip()
    return bool(text) or any(message.get(key) for key in ("tool_calls", *REASONING))


def tools_of(record: Document) -> Any:
    """Return the tools of a record, given as a list or as JSON text; None if it has none."""
    tools = _parsed(record.get("tools"), "tools")
    if not isinstance(tools or [], list):
        raise BrokenRecord(f"field 'tools' holds {str(tools)[:40]!r}; give a list of tools")
    with contextlib.suppress(BrokenRecord):
        functions = _parsed(record.get(FUNCTIONS), FUNCTIONS)
        if not tools and is_conversation(functions):
            tools = [{"type": "function", "function": each} for each in functions]
    return [_parsed(tool, "tools") for tool in tools or ()] or None


def _options_of(record: Document) -> Document:
    """Return the variables that a record gives to its chat template."""
    options = _parsed(record.get(OPTIONS), OPTIONS) or {}
    known = isinstance(options, dict) and not set(options) & set(_RESERVED)
    if not known:
        raise BrokenRecord(
            f"field {OPTIONS!r} holds {str(options)[:40]!r}; give an object without"
            f" {', '.join(_RESERVED)}"
        )
    return {key: value for key, value in options.items() if value is not None}


def _parsed(value: Any, field: str) -> Any:
    """Return a field's value, which may be given as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value or "null")
    except ValueError as error:
        raise BrokenRecord(f"field {field!r} is not valid JSON ({error}); fix it") from error
