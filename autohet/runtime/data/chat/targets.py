"""Targets of conversations: what the assistant wrote, and what ends its turns.

The text is the template's own rendering, as the model sees it. A turn begins where the prompt for
it ends. The template's generation marks are targets unchanged, if it has any.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from autohet.runtime.data.chat.pieces import ASSISTANTS, Rendering
from autohet.runtime.data.chat.template import (
    ChatMessage,
    ChatTemplate,
    Conversation,
    MarkedSpan,
    RenderedText,
    text_of_content,
)
from autohet.runtime.data.records import BrokenRecord

logger = logging.getLogger("autohet.data")
TRAINED_KEYS = ("weight", "train", "trainable", "training", "loss")
_WORD = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]|\s|\w+|.", re.DOTALL)
"""Parts of a prompt that text may agree with: special tokens, words, single other characters."""
PROBE = "Zq4x"
"""Text that occurs in no template."""
_ROLE_MARK = re.compile(r"\s*(<[^<>\s]*>|\[[^\[\]\s]*\])")
REASONING = ("reasoning_content", "thinking", "reasoning")


class _Turns:
    """Spans of the assistant's turns in one rendered conversation."""

    def __init__(self, template: ChatTemplate, conversation: Conversation) -> None:
        self._template = template
        self._conversation = conversation
        self._whole = template.render_pieces(conversation)
        self.text = self._whole.text
        self._add_end()

    def _add_end(self) -> None:
        """Append what ends the last turn once another message follows, where nothing else does."""
        last = self._conversation.messages[-1]
        template = self._template
        is_open = template.end_of_answer is not None and template.end_of_last == ""
        ends_later = template.ends_with_next or is_open
        if last["role"] not in ASSISTANTS or not ends_later or self._whole.tail.strip():
            return
        follower = {"role": "tool" if last.get("tool_calls") else "user", "content": PROBE}
        try:
            longer = template.render_pieces(self._conversation.followed_by(follower))
        except BrokenRecord:
            return
        turn = len(self._conversation.messages) - 1
        printed = longer.of(turn)
        own = self._whole.of(turn)
        if not printed or not own:
            return
        if template.ends_with_next:
            self.text += _role_mark(longer.text, printed[-1].end, PROBE)
            return
        text = longer.text[printed[-1].begin : printed[-1].end]
        ending = self.text[own[-1].begin :]
        if text.startswith(ending):
            self.text += text.removeprefix(ending)
        else:
            # Its reasoning is left out once another message follows.
            self.text += template.end_of_answer or ""

    def spans(self, turn: int) -> list[MarkedSpan]:
        """Return the spans of the assistant's message `turn`: its text and its end.

        Raises:
            BrokenRecord: the turn's text cannot be told apart.
        """
        pieces = self._whole.of(turn)
        if self._is_printed_elsewhere(turn):
            return [self._span_between_prefixes(turn)]
        if not pieces:
            # The template left the message out.
            return []
        start = self.start(turn)
        spans = [(max(start, each.begin), each.end) for each in pieces if each.end > start]
        begin = spans[-1][0] if spans else start
        return self._without_headers([*spans[:-1], (begin, self._end(turn, pieces[-1].end))])

    def _without_headers(self, spans: list[MarkedSpan]) -> list[MarkedSpan]:
        """Leave out headers of further turns that a message prints (calls, then its content)."""
        last = self._template.end_of_last or PROBE
        found = []
        for begin, end in spans:
            after = begin
            while last in self.text[after:end]:
                after = self.text.index(last, after) + len(last)
                written = _agreement(self._template.header, self.text[after:end])
                if written:
                    found.append((begin, after))
                    begin = after + written
            # A further turn without content has its end alone.
            if (begin, end) in spans or self.text[begin:end].strip() != last:
                found.append((begin, end))
        return found

    def _is_printed_elsewhere(self, turn: int) -> bool:
        """Return True if the message's text is not in its own pieces, but in others'."""
        pieces = self._whole.pieces
        contents = [text_of_content(each.get("content")) for each in self._conversation.messages]
        content = contents[turn].strip()
        own = "".join(self.text[each.begin : each.end] for each in self._whole.of(turn))
        if not pieces or content in own:
            return not pieces
        # An equal answer is printed by its own message, though reasoning may be left out here.
        for message, begin, end in pieces:
            is_quote = message is None or content not in contents[message]
            if is_quote and content in self.text[begin:end]:
                return True
        return False

    def start(self, turn: int) -> int:
        """Return the place where the prompt for message `turn` ends.

        Earlier messages may read otherwise in the prompt than in the whole conversation, so the
        texts are compared from the newest message that both print.
        """
        whole = self._whole
        own = whole.of(turn)[0].begin
        prompt = self._prompt(turn)
        shared = 0, 0
        for message in range(turn):
            before, now = prompt.of(message), whole.of(message)
            if before and now:
                shared = before[0].begin, now[0].begin
        place = shared[1] + _agreement(prompt.text[shared[0] :], whole.text[shared[1] :])
        # The prompt may go on with an open turn, or leave the header's white space to the template.
        header = (prompt.tail or self._template.header).lstrip()
        text = whole.text[own:]
        indent = len(text) - len(text.lstrip())
        text = text[indent:]
        agreed = _agreement(header, text)
        for mark in _ROLE_MARK.finditer(header):
            if text.startswith(header[mark.start() :]):
                agreed = max(agreed, len(header) - mark.start())
        return max(place, own + indent + agreed if agreed else own)

    def _prompt(self, turn: int) -> Rendering:
        try:
            return self._template.render_pieces(self._conversation.first(turn), prompt=True)
        except BrokenRecord:
            # A template may refuse to begin with the assistant.
            return Rendering(self._template.header, [])

    def _end(self, turn: int, end: int) -> int:
        messages = self._conversation.messages
        if turn == len(messages) - 1:
            end = self.end
        elif self._template.ends_with_next:
            follower = text_of_content(messages[turn + 1].get("content"))
            end += len(_role_mark(self.text, end, follower))
        # A space belongs to the token of what follows it.
        while self.text[end - 1] == " ":
            end -= 1
        return end

    @property
    def end(self) -> int:
        """Place behind the last message, and behind what follows it but in a prompt."""
        tail = self._whole.tail
        if not tail.strip() or self._template.ends_with_next:
            return len(self.text)
        prompt = self._prompt(len(self._conversation.messages) - 1).tail
        is_of_prompt = _agreement(prompt, tail) == len(tail)
        return len(self.text) - (len(tail) if is_of_prompt else 0)

    def _span_between_prefixes(self, turn: int) -> MarkedSpan:
        """Return the span that a message adds to the rendering of the messages before it."""
        before = self._template.render(self._conversation.first(turn), prompt=True)
        through = self._template.render(self._conversation.first(turn + 1))
        for prefix, count in ((before, turn), (through, turn + 1)):
            if not self.text.startswith(prefix):
                place = _common_length(self.text, prefix)
                raise BrokenRecord(
                    "the chat template prints no message in a loop and renders the first"
                    f" {count} messages otherwise alone than in the whole conversation (at"
                    f" character {place}), so the assistant's text cannot be told apart; name a"
                    " template with {% generation %} marks in data.chat_template"
                )
        return len(before), len(through)

    def marked_spans(self, turns: list[int]) -> list[MarkedSpan]:
        """Return the spans of the template's own generation marks in `turns`.

        Raises:
            BrokenRecord: there are none, or their turns are unknown.
        """
        spans = self._template.render_marked(self._conversation).spans
        spans = [(begin, end) for begin, end in spans if begin < end]
        all_turns = assistant_turns(self._conversation.messages)
        if not spans:
            raise BrokenRecord(
                "the chat template's generation marks hold none of the assistant's turns; fix the"
                " marks in data.chat_template"
            )
        turn_of: Sequence[int | None] = [self._whole.message_at(begin) for begin, _ in spans]
        if not set(turn_of) <= set(all_turns):
            if len(spans) != len(all_turns) and turns != all_turns:
                raise BrokenRecord(
                    f"the chat template has {len(spans)} generation marks for {len(all_turns)}"
                    " turns of the assistant, which cannot be told apart; set data.train_on: all"
                )
            turn_of = [*all_turns, *[all_turns[-1]] * len(spans)][: len(spans)]
        found: list[MarkedSpan] = []
        for place, (begin, end) in enumerate(spans):
            turn = turn_of[place]
            if turn is None or turn not in turns:
                continue
            is_last = turn not in turn_of[place + 1 :]
            if is_last and self._template.marks_leave_end and self._whole.of(turn):
                end = max(end, self._end(turn, self._whole.of(turn)[-1].end))
            found.append((begin, end))
        return found


def _role_mark(text: str, place: int, follower: str) -> str:
    """Return the mark of a role that begins at `place`; empty if there is none.

    `follower`: content of the message there, which may be in brackets.
    """
    mark = _ROLE_MARK.match(text, place)
    if mark is None or mark.group(1)[1:-1] in follower:
        return ""
    return mark.group()


def _agreement(prompt: str, text: str) -> int:
    """Return how many characters of `text` the prompt has written; whole words if not all of it."""
    common = _common_length(prompt, text)
    if common == len(prompt):
        return common
    return max((word.end() for word in _WORD.finditer(prompt) if word.end() <= common), default=0)


def _common_length(one: str, other: str) -> int:
    """Return the length of the longest common prefix."""
    known = 0
    limit = min(len(one), len(other))
    while known < limit:
        middle = (known + limit + 1) // 2
        if one[known:middle] == other[known:middle]:
            known = middle
        else:
            limit = middle - 1
    return known


def assistant_turns(messages: Any) -> list[int]:
    """Return the indices of the assistant's messages."""
    return [index for index, each in enumerate(messages) if each["role"] in ASSISTANTS]


def render_chat(template: ChatTemplate, conversation: Conversation, train_on: str) -> RenderedText:
    """Render a conversation, with the text selected by `train_on` as its targets.

    `train_on` selects the assistant's turns (`assistant`), the last of them (`completion`) or all
    the text (`all`). Turns that the data marks as untrained are no targets.

    Raises:
        BrokenRecord: the assistant's text cannot be told apart.
    """
    template = template.chosen_for(conversation.tools)
    conversation = _fitted(template, conversation)
    rendered = _Turns(template, conversation)
    turns = assistant_turns(conversation.messages)
    trained = [turn for turn in turns if is_trained(conversation.messages, turn)]
    if train_on == "all":
        untrained = [turn for turn in turns if turn not in trained]
        return _without(rendered, (0, len(rendered.text)), untrained)
    if train_on == "completion":
        trained = [turn for turn in turns[-1:] if turn in trained]
    if not trained:
        return RenderedText(rendered.text, [])
    if template.has_marks:
        spans = rendered.marked_spans(trained)
    else:
        spans = []
        for turn in trained:
            spans += rendered.spans(turn)
    _warn_of_lost_text(conversation.messages, trained, rendered.text, spans)
    return RenderedText(rendered.text, spans)


def render_each_turn(template: ChatTemplate, conversation: Conversation) -> list[RenderedText]:
    """Render the conversation up to each turn of the assistant, with that turn as the target.

    One rendering without a target if the data marks all turns as untrained.
    """
    messages = conversation.messages
    found = []
    for turn in assistant_turns(messages):
        if is_trained(messages, turn):
            found.append(render_chat(template, conversation.first(turn + 1), "completion"))
    return found or [render_chat(template, conversation, "completion")]


def render_completion(
    template: ChatTemplate, prompt: Conversation, completion: list[ChatMessage], train_on: str
) -> RenderedText:
    """Render a prompt and its completion, both messages, with the completion as the target.

    `train_on`: `all` makes the prompt a target too.

    Raises:
        BrokenRecord: the completion's text cannot be told apart.
    """
    template = template.chosen_for(prompt.tools)
    messages = [*prompt.messages, *completion]
    whole = _fitted(template, Conversation(messages, prompt.tools, prompt.options))
    rendered = _Turns(template, whole)
    untrained = [turn for turn in assistant_turns(messages) if not is_trained(messages, turn)]
    if train_on == "all":
        return _without(rendered, (0, len(rendered.text)), untrained)
    first = len(prompt.messages)
    before = template.render(whole.first(first), prompt=True)
    begin = len(before)
    if not rendered.text.startswith(before):
        begin = rendered.spans(first)[0][0]
    untrained = [turn for turn in untrained if turn >= first]
    return _without(rendered, (begin, rendered.end), untrained)


def turn_ends(template: ChatTemplate) -> list[str]:
    """Return the special tokens that end the assistant's last turn; none: a text ends it.

    Several where a turn ends with the role that follows it: a user, or a tool.
    """
    question = {"role": "user", "content": PROBE}
    answer: ChatMessage = {"role": "assistant", "content": PROBE}
    call = {"type": "function", "id": "call00001", "function": {"name": PROBE, "arguments": {}}}
    answers = [answer]
    if template.ends_with_next:
        answers.append({**answer, "tool_calls": [call]})
    found = []
    for message in answers:
        try:
            text = _Turns(template, _fitted(template, Conversation([question, message]))).text
        except BrokenRecord:
            continue
        after = text.rpartition(PROBE)[2]
        marks = _ROLE_MARK.findall(after)
        if template.ends_with_next:
            found += marks[-1:]
        elif _ROLE_MARK.match(after):
            found += marks[:1]
    return list(dict.fromkeys(found))


def _fitted(template: ChatTemplate, conversation: Conversation) -> Conversation:
    messages = template.fit(conversation.messages)
    return Conversation(messages, conversation.tools, conversation.options)


def _without(rendered: _Turns, span: MarkedSpan, untrained: list[int]) -> RenderedText:
    """Return the text of `span` as targets, without the turns that are not trained."""
    spans: list[MarkedSpan] = []
    begin, end = span
    for turn in untrained:
        for left_out_begin, left_out_end in rendered.spans(turn):
            spans.append((begin, left_out_begin))
            begin = left_out_end
    spans.append((begin, end))
    return RenderedText(rendered.text, [each for each in spans if each[0] < each[1]])


def is_trained(messages: Any, turn: int) -> bool:
    """Return True unless a message is marked as untrained (`weight: 0`, `train: false`, ...).

    Raises:
        BrokenRecord: a mark is neither 0 nor 1.
    """
    for key in TRAINED_KEYS:
        value = messages[turn].get(key)
        if value is not None and value not in (0, 1):
            raise BrokenRecord(
                f"message {turn + 1} has {key} {value!r}; a turn is trained on whole or not at all,"
                " so give 0 or 1"
            )
        if value == 0:
            return False
    return True


def _warn_of_lost_text(messages: Any, turns: list[int], text: str, spans: list[MarkedSpan]) -> None:
    written = "".join(text[begin:end] for begin, end in spans)
    for message in messages:
        content = text_of_content(message.get("content")).strip()
        if message["role"] in ("system", "developer", "user") and content not in text:
            warn_once(
                f"the chat template leaves out messages of role '{message['role']}', or their"
                " text; the model does not see it"
            )
    for turn in turns:
        message = messages[turn]
        if text_of_content(message.get("content")).strip() not in text:
            warn_once(
                "the chat template leaves out text of some answers (beside tool calls, or reasoning"
                " in it), which is not trained on; data.train_on: turns renders each as the last"
            )
        for key in REASONING:
            if str(message.get(key) or "").strip() not in written:
                warn_once(
                    "the chat template leaves out the reasoning of some turns, which is not trained"
                    " on; data.train_on: turns renders each turn as the last one"
                )
        for call in message.get("tool_calls", ()):
            if str(call.get("function", call).get("name", "")) not in written:
                warn_once(
                    "the chat template leaves out tool calls, which are not trained on; a turn of"
                    " calls alone is trained on as an empty answer"
                )


@lru_cache(maxsize=64)
def warn_once(message: str) -> None:
    """Log a warning about the data, once in this process."""
    logger.warning("Data: %s", message)
