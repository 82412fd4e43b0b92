"""Targets of conversations under real chat templates: TRL's training templates judge.

TRL's mask is right but for what the prompt of a turn has written already. Where TRL's template
renders other text than the model's own, or there is none, each turn rendered alone judges.
"""

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from autohet.runtime.data.chat.targets import render_chat, render_completion, turn_ends
from autohet.runtime.data.chat.template import ChatTemplate, Conversation
from autohet.runtime.data.conversations import conversation_of
from autohet.runtime.data.examples import ChatExamples, Example
from autohet.runtime.data.records import BrokenRecord
from autohet.runtime.data.tokenization import LibraryTokenizer
from tests.harness.chat_tokenizer import (
    TRL_TEMPLATES,
    save_chat_tokenizer,
    special_tokens_of,
    trl_template,
)

Messages = list[dict[str, Any]]
GO_ON_AFTER_CALLS = ("gemma4", "gemma4_v3", "gemma4_v4")
"""Revisions that close a turn of content and calls where the calls are answered alone."""
NAMES = sorted(
    path.stem for path in TRL_TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training")
)
WANT_PARTS = ("idefics3", "llava_next", "smolvlm")
WANT_TEXT_ARGUMENTS = ("deepseekv3", "deepseek_r1_distill")
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "c"}}}
FUNCTION = {"name": "weather", "description": "d", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
THOUGHT = {"reasoning_content": "Hm, let me see."}
SYSTEM = {"role": "system", "content": "Be brief."}
OUTPUT = {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": "rain"}


def ask(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"Question {number}?"}


def answer(number: int, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": f"Answer {number}.", **more}


def call(content: str = "", *, as_text: bool = False) -> dict[str, Any]:
    arguments: Any = {"city": "Oslo"}
    function = {"name": "weather", "arguments": json.dumps(arguments) if as_text else arguments}
    calls = [{"type": "function", "id": "call00001", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


THREE = [ask(1), answer(1), ask(2), answer(2), ask(3), answer(3)]
SHAPES: dict[str, Messages] = {
    "one": THREE[:2],
    "system, three": [SYSTEM, *THREE],
    "ends with a question": THREE[:3],
    "reasoning": [ask(1), answer(1, **THOUGHT), ask(2), answer(2, **THOUGHT)],
    "tools": [ask(1), call("Let me look."), OUTPUT, answer(2), ask(3), answer(3)],
    "calls without content": [SYSTEM, ask(1), call(), OUTPUT, answer(2), ask(3), call()],
    "arguments as text": [ask(1), call(as_text=True), OUTPUT, answer(2)],
    "parts": [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in THREE],
}


@lru_cache(maxsize=1)
def tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    special = special_tokens_of("".join(trl_template(name) for name in NAMES))
    found = save_chat_tokenizer(directory, None, special)
    found.add_special_tokens({"bos_token": "<s>"})
    return found


@pytest.fixture
def library(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return tokenizer(tmp_path_factory.getbasetemp() / "all_templates")


def as_library_takes_it(name: str, messages: Messages) -> Messages:
    """Text, not parts, except for templates that print nothing else; arguments by template."""
    found = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            content = content[0]["text"]
        if name in WANT_PARTS:
            content = [{"type": "text", "text": content}]
        made = {**message, "content": content}
        if "tool_calls" in message:
            made["tool_calls"] = call(as_text=name in WANT_TEXT_ARGUMENTS)["tool_calls"]
        found.append(made)
    return found


@lru_cache(maxsize=2)
def examples_of(library: PreTrainedTokenizerFast, name: str) -> ChatExamples:
    special = {key: str(token) for key, token in library.special_tokens_map.items()}
    template = ChatTemplate(trl_template(name), special)
    encoder = LibraryTokenizer(library.backend_tokenizer, 0, "")
    return ChatExamples(template, encoder, "messages", "assistant")


def ours(library: PreTrainedTokenizerFast, name: str, messages: Messages, tools: Any) -> Example:
    kind = examples_of(library, name)
    (example,) = kind.encode([kind.extract({"messages": messages, "tools": tools})])
    return example


def runs_of(mask: list[bool]) -> list[tuple[int, int]]:
    edges = [at for at in range(len(mask) + 1) if [*mask, False][at] != [False, *mask][at]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def num_common(one: list[int], other: list[int]) -> int:
    unequal = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(unequal, min(len(one), len(other)))


class Judge:
    """The library's rendering of one conversation, and what TRL trains on in it."""

    def __init__(self, library: PreTrainedTokenizerFast, name: str, shape: str) -> None:
        self.library, self.template = library, trl_template(name)
        self.messages = as_library_takes_it(name, SHAPES[shape])
        self.tools = TOOLS if any("tool_calls" in each for each in self.messages) else None
        self.training = TRL_TEMPLATES / f"{name}_training.jinja"

    def ids(self, messages: Messages, *, prompt: bool = False) -> list[int]:
        found: list[int] = self.library.apply_chat_template(
            messages,
            tools=self.tools,
            chat_template=self.template,
            add_generation_prompt=prompt,
            return_dict=False,
        )
        return found

    def trl(self) -> tuple[list[int], list[bool]]:
        """Ids and mask of TRL's training template, whose tool calls are all objects."""
        objects = [
            {**each, "tool_calls": call()["tool_calls"]} if "tool_calls" in each else each
            for each in self.messages
        ]
        found = self.library.apply_chat_template(
            objects,
            tools=self.tools,
            chat_template=self.training.read_text(encoding="utf-8"),
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return found["input_ids"], [bool(each) for each in found["assistant_masks"]]

    def without_prompts(self, ids: list[int], runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """TRL's runs without the tokens at their beginning that a turn's prompt has written."""
        question = self.messages[: 1 + (self.messages[0]["role"] == "system")]
        asked = self.ids(question, prompt=True)
        header = asked[num_common(asked, self.ids(question)) :]
        turns = [at for at, each in enumerate(self.messages) if each["role"] == "assistant"]
        reached = [num_common(self.ids(self.messages[:at], prompt=True), ids) for at in turns]
        found = []
        for begin, end in runs:
            written = [each for each in reached if begin <= each < end]
            begin = max([begin + num_common(header, ids[begin:end]), *written])
            found.append((begin, end))
        return found

    def each_alone(self) -> str:
        """What each turn adds to its prompt if it is the only one, reasoning left out."""
        question = next(each for each in self.messages if each["role"] == "user")
        asked = self.ids([question], prompt=True)
        texts = []
        for turn in self.messages:
            if turn["role"] == "assistant":
                whole = self.ids([question, turn])
                texts.append(self.library.decode(whole[num_common(asked, whole) :]))
        return without_reasoning(texts)


def without_reasoning(texts: list[str]) -> str:
    unwritten = re.compile(r".*?(</think>\s*|<channel\|>)|<\|tool_response>", re.S)
    return "".join(unwritten.sub("", text) for text in texts)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_targets_are_what_the_assistant_wrote(
    library: PreTrainedTokenizerFast, name: str, shape: str
) -> None:
    judge = Judge(library, name, shape)
    try:
        wanted = judge.ids(judge.messages)
    except TemplateError:
        with pytest.raises(BrokenRecord, match="the chat template refuses"):
            ours(library, name, SHAPES[shape], judge.tools)
        return
    example = ours(library, name, SHAPES[shape], judge.tools)
    # Gemma begins the tool's output with it, after the call; TRL leaves it out.
    example.counts[example.ids == library.convert_tokens_to_ids("<|tool_response>")] = False
    ids, runs = example.ids.tolist(), runs_of(example.counts.tolist())
    if not (name == "glm4moe" and shape != "ends with a question"):  # Its end is the next role's.
        assert ids == wanted
    assert ids[: len(wanted)] == wanted
    assert runs
    assert runs[0][0] > 0
    if judge.training.exists():
        trl_ids, mask = judge.trl()
        if trl_ids == ids:
            assert runs == judge.without_prompts(ids, runs_of(mask))
            return
    found = [library.decode(ids[begin:end]) for begin, end in runs]
    alone = judge.each_alone()
    if name in GO_ON_AFTER_CALLS:
        alone = alone.replace("Let me look.", "Let me look.<turn|>\n")
    assert without_reasoning(found) == alone


NULL = {**call(as_text=True), "content": None}
NULLS = {
    "one call": [ask(1), NULL, OUTPUT, answer(2), ask(3), answer(3)],
    "two calls": [
        SYSTEM,
        ask(1),
        {**NULL, "tool_calls": 2 * NULL["tool_calls"]},
        OUTPUT,
        OUTPUT,
        answer(2),
    ],
    "calls in turn": [ask(1), answer(1), NULL, OUTPUT, NULL, OUTPUT, answer(2), ask(3), NULL],
}


@pytest.mark.parametrize("shape", NULLS)
def test_calls_beside_null_are_targets(library: PreTrainedTokenizerFast, shape: str) -> None:
    """Wrong: R1-Distill's calls left out beside an empty text, and its end trained at once.

    The library's tokenizer drops a null and then refuses the calls; its renderer does not.
    """
    name = "deepseek_r1_distill"
    example = ours(library, name, NULLS[shape], TOOLS)
    ids = example.ids.tolist()
    special = library.special_tokens_map
    keys: dict[str, Any] = {"conversations": [NULLS[shape]], "tools": TOOLS, **special}
    (text,), _ = render_jinja_template(chat_template=trl_template(name), **keys)
    training = trl_template(f"{name}_training")
    (same,), (marked,) = render_jinja_template(
        chat_template=training, return_assistant_tokens_mask=True, **keys
    )
    assert text == same == library.decode(ids)
    found = [library.decode(ids[begin:end]) for begin, end in runs_of(example.counts.tolist())]
    written = re.compile(r"(<｜Assistant｜>|<｜tool▁outputs▁end｜>)")
    assert found == [written.sub("", text[begin:end]) for begin, end in marked]


CALLED = "{% if m.tool_calls %}({{ m.tool_calls[0].function.name }}){% endif %}<end>{% endfor %}"
PEEKS = {
    "an earlier call's content": (
        "{% for m in messages %}<{{ m.role }}>{% if loop.last %}{{ m.content }}"
        "{% else %}{{ m.content.split('/')[-1] }}{% endif %}" + CALLED
    ),
    "null as JSON": (
        "{% for m in messages %}<{{ m.role }}>{% set text = m['content'] %}"
        "{{ text if text is string else text | tojson }}" + CALLED
    ),
}
"""As QwQ's and LFM2's."""


@pytest.mark.parametrize("case", PEEKS)
def test_calls_without_content_have_the_form_that_renders_in_a_conversation(case: str) -> None:
    """Wrong: the form that a call alone has, or one that prints null."""
    conversation = conversation_of({"messages": NULLS["one call"], "tools": TOOLS}, "messages")
    made = render_chat(ChatTemplate(PEEKS[case], {}), conversation, "assistant")
    found = [made.text[begin:end].removeprefix("<assistant>") for begin, end in made.spans]
    assert found == ["(weather)<end>", "Answer 2.<end>", "Answer 3.<end>"]


def test_an_answer_that_another_repeats(library: PreTrainedTokenizerFast) -> None:
    """R1-Distill keeps the thought behind a tool's result, and not the one of an equal answer."""
    thought = {"role": "assistant", "content": "<think>Hm.</think>Fine."}
    messages = [ask(1), NULL, OUTPUT, thought, ask(2), thought]
    example = ours(library, "deepseek_r1_distill", messages, TOOLS)
    *_, first, second = runs_of(example.counts.tolist())
    ids = example.ids.tolist()
    end = "<｜end▁of▁sentence｜>"
    assert library.decode(ids[slice(*first)]) == f"<think>Hm.</think>Fine.{end}"
    assert library.decode(ids[slice(*second)]) == f"Fine.{end}"


HEADER = "{% if add_generation_prompt %}<assistant>{% endif %}"
EACH = "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
SEPARATED = EACH + "{% if not loop.last %}<end>{% endif %}{% endfor %}" + HEADER
"""As Apriel's and Hunyuan's: nothing ends the last turn."""
THINKING = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if loop.last and message.reasoning_content %}{{ message.reasoning_content }}/{% endif %}"
    "{{ message.content }}{% if not loop.last %}<end>{% endif %}{% endfor %}" + HEADER
)
"""As Apriel's: the last turn alone has its reasoning, too."""
PROMPTS = EACH + "<end>{% endfor %}<assistant><think>"
"""As Command R7B's: a prompt follows in any case."""
ORDERED = EACH + "<end>{% endfor %}<order>Write<end>" + HEADER
"""As Command R+'s for tools: a prompt has more between the conversation and the turn."""
ENDS_AFTER = EACH + "{% endfor %}{% if not add_generation_prompt %}<end>{% endif %}" + HEADER
"""As Phi-3.5's, whose own end follows the loop."""
ENDS_EACH = EACH + "{% endfor %}<end>"
LOOKS_BACK = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% if message.role == 'tool' %}{% for other in messages %}{% if other.tool_calls %}"
    "{{ other.tool_calls[0].function.name }}{% endif %}{% endfor %}{% endif %}"
    "{% if message.tool_calls %}{{ message.tool_calls[0].function.name }}{% endif %}<end>"
    "{% endfor %}" + HEADER
)
"""As Command R7B's and Solar's: a tool's result has the name of its call."""
CALLS_FIRST = (
    "{% for message in messages %}{% if message.tool_calls %}<assistant>"
    "{{ message.tool_calls[0].function.name }}<end>{% endif %}"
    "{% if message.content is not none %}<{{ message.role }}>{{ message['content'] + '<end>' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}"
)
"""As one of R1-Distill's: the content beside calls is a turn of its own."""
BRACKETS = (
    "{% set open = namespace(turn=false) %}{% for message in messages %}"
    "{% if message.role == 'tool' %}[{{ message.content }}]{% else %}"
    "{% if open.turn and message.role == 'user' %}<end>{% set open.turn = false %}{% endif %}"
    "{% if not open.turn %}<{{ message.role }}>{% endif %}"
    "{% set open.turn = message.role == 'assistant' %}{{ message.content }}"
    "{% if message.tool_calls %}({{ message.tool_calls[0].function.name }}){% endif %}"
    "{% endif %}{% endfor %}" + HEADER
)
"""As Apertus's: a tool's result is in brackets, as marks of roles are elsewhere."""
OWN = {
    "separated": (SEPARATED, "one", ["Answer 1.<end>"]),
    "separated, three": (SEPARATED, "system, three", [f"Answer {n}.<end>" for n in (1, 2, 3)]),
    "separated, reasoning": (
        THINKING,
        "reasoning",
        ["Answer 1.<end>", "Hm, let me see./Answer 2.<end>"],
    ),
    "a prompt follows": (PROMPTS, "one", ["Answer 1.<end>"]),
    "a prompt with more": (ORDERED, "system, three", [f"Answer {n}.<end>" for n in (1, 2, 3)]),
    "an end after all": (ENDS_AFTER, "one", ["Answer 1.<end>"]),
    "an end in any case": (ENDS_EACH, "one", ["<assistant>Answer 1.<end>"]),
    "results name calls": (
        LOOKS_BACK,
        "tools",
        ["Let me look.weather<end>", "Answer 2.<end>", "Answer 3.<end>"],
    ),
    "calls, then content": (
        CALLS_FIRST,
        "tools",
        ["weather<end>", "Let me look.<end>", "Answer 2.<end>", "Answer 3.<end>"],
    ),
    "calls, then nothing": (CALLS_FIRST, "a call", ["weather<end>", "Answer 2.<end>"]),
    "results in brackets": (
        BRACKETS,
        "tools",
        ["Let me look.(weather)", "Answer 2.<end>", "Answer 3.<end>"],
    ),
}


@pytest.mark.parametrize("case", OWN)
def test_targets_of_other_templates(library: PreTrainedTokenizerFast, case: str) -> None:
    """Wrong: prompts, names in results and results that are targets, or a turn without an end."""
    template, shape, expected = OWN[case]
    messages = SHAPES.get(shape, [ask(1), call(), OUTPUT, answer(2)])
    tools = TOOLS if "tools" in shape else None
    made = render_chat(ChatTemplate(template, {}), Conversation(messages, tools), "assistant")
    assert [made.text[begin:end] for begin, end in made.spans] == expected
    whole = Conversation(messages[:-1], tools)
    completion = render_completion(ChatTemplate(template, {}), whole, messages[-1:], "completion")
    assert [completion.text[begin:end] for begin, end in completion.spans] == expected[-1:]


def test_a_turn_without_an_end_has_no_token_as_its_end() -> None:
    """Wrong: the begin token ends generation."""
    template = "{{ bos_token }}" + EACH.replace("<{{ message.role }}>", "{{ message.role }}: ")
    assert turn_ends(ChatTemplate(template + "\n{% endfor %}", {"bos_token": "<s>"})) == []
    assert turn_ends(ChatTemplate(EACH + "{% endfor %}" + HEADER, {})) == ["<user>", "<tool>"]
