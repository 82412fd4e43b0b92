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

from autohet.runtime.data.chat.template import ChatTemplate
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
