"""What records say beside their messages, and every input of a data set in its key."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autohet.runtime.data import prepare_dataset
from autohet.runtime.data.build import find_dataset
from autohet.runtime.data.chat.targets import warn_once
from autohet.runtime.job import DataSection
from planner.errors import ConfigError
from tests.harness.chat_tokenizer import CHATML, MARKED, save_chat_tokenizer, trl_template
from tests.runtime.data.test_chat import documents_of

MakeData = Callable[..., DataSection]
Record = dict[str, Any]
IN_ORDER = "for message in messages"
TOOL_USE = "{{ tools[0]['name'] }}:" + CHATML
MARKS_WITHOUT_END = MARKED.replace(" + '<|im_end|>' }}{% endgen", " }}{% endgen").replace(
    "{{ '\n' }}", "{{ '<|im_end|>\n' }}"
)
NEXT_ROLE_ENDS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def targets(tmp_path: Path, make_data: MakeData) -> Callable[..., tuple[str, list[str]]]:
    """Function from a record to the text that is trained on, and its runs of targets."""

    def find(record: Record, template: Any = CHATML, **keys: Any) -> tuple[str, list[str]]:
        tokenizer = save_chat_tokenizer(tmp_path / "tokenizer", template)
        path = tmp_path / "a.jsonl"
        path.write_text(json.dumps(record))
        data = make_data(path, **{"kind": "chat", "tokenizer": str(tmp_path / "tokenizer"), **keys})
        (document,) = documents_of(prepare_dataset(data, 255))
        runs: list[list[int]] = []
        before = False
        for token, counted in zip(*document, strict=True):
            if counted:
                runs[len(runs) - 1 if before else len(runs) :] = [
                    [*(runs[-1] if before else []), token]
                ]
            before = counted
        return tokenizer.decode(document[0]), [tokenizer.decode(run) for run in runs]

    return find


CALL = {"type": "function", "function": {"name": "f", "parameters": {"a": 1}}}
"""With Llama's name of arguments."""


def turns(*answers: Any) -> list[Record]:
    """Questions with these answers: a text, or a message's keys."""
    messages: list[Record] = []
    for number, each in enumerate(answers):
        messages.append({"role": "user", "content": f"q{number}"})
        keys = each if isinstance(each, dict) else {"content": each}
        messages.append({"role": "assistant", **keys})
    return messages


@pytest.mark.parametrize("key", ["weight", "train", "trainable", "loss"])
@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["no marks", "marks"])
def test_a_turn_marked_as_untrained_is_no_target(targets: Any, key: str, template: str) -> None:
    messages = turns("one", {"content": "two", key: 0}, {"content": "three", key: 1})
    _, found = targets({"messages": messages}, template)
    assert [each.strip() for each in found] == ["one<|im_end|>", "three<|im_end|>"]
    messages[-1][key] = False
    messages.append({"role": "user", "content": "why?"})
    _, found = targets({"messages": messages}, template, train_on="all")
    assert len(found) == 3
    assert [word in "".join(found) for word in ("two", "three", "why?")] == [False, False, True]
    with pytest.raises(ConfigError, match=f"line 1: message 2 has {key} 0.5"):
        targets({"messages": turns({"content": "one", key: 0.5})}, template)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user", "content": 3}, {"role": "assistant", "content": 4.5}], ["\n3<", "4.5<"]),
        ([*turns("a"), {"role": "tool", "content": {"t": "é"}}], ['tool\n{"t": "é"}<']),
        ([*turns("a"), {"role": "tool", "content": [{"t": 1}]}], ['tool\n[{"t": 1}]<']),
        ([*turns("a"), {"role": "tool", "content": ["x", "y"]}], ['tool\n["x", "y"]<']),
        ([*turns("a"), {"role": "tool", "content": {"text": "x", "n": 1}}], ['"x", "n": 1}<']),
        ([*turns("a"), {"role": "tool", "content": [{"type": "text", "text": "y"}]}], ["tool\ny<"]),
        ([*turns("a"), {"role": "tool", "content": True}], ["tool\ntrue<"]),
        (turns({"content": {"type": "text", "text": "one part"}}), ["\none part<"]),
        (turns({"content": "", "reasoning_content": "Well."}), ["\nWell.<"]),
        (
            turns({"content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}),
            ['"name": "f"', '"arguments": {"a": 1}'],
        ),
        *(
            (
                turns({"content": None, "tool_calls": calls}),
                ['"name": "f"', '"arguments": {"a": 1}'],
            )
            for calls in (CALL, json.dumps(CALL), [json.dumps(CALL)], [CALL["function"]])
        ),
    ],
)
def test_content_of_another_type_is_its_text(
    targets: Any, messages: list[Record], words: list[str]
) -> None:
    """Wrong: a traceback, an answer without a tool's result, or a call that is left out."""
    extra = (
        "(message.reasoning_content or '') + (message.tool_calls or '')|string|replace(\"'\", '\"')"
    )
    template = CHATML.replace("message['content'] +", f"(message['content'] or '') + {extra} +")
    text, _ = targets({"messages": messages}, template)
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": turns("a"), "images": ["a.png"]}, ["'images'", "only text is trained on"]),
        ({"messages": turns({"content": {"a": 1}})}, ["message 2", "only text is trained on"]),
        ({"messages": [{"role": "human", "content": "x"}]}, ["'human'", "'user'"]),
        ({"messages": turns("a"), "system": ["Be brief."]}, ["'system'", "no text"]),
        ({"messages": turns("a"), "tools": {"name": "f"}}, ["'tools'", "a list of tools"]),
        *(
            ({"messages": turns({"tool_calls": calls})}, ["tool call is", "name and arguments"])
            for calls in (7, True, [1], [[CALL]], [{"function": "f"}], [{"function": None}])
        ),
    ],
)
def test_what_no_template_can_show_is_refused(
    targets: Any, record: Record, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        targets(record)
    assert [word for word in ["line 1", *words] if word not in str(caught.value)] == []


def test_the_completion_may_be_untrained_in_parts(targets: Any) -> None:
    chat = turns("one", {"content": "two", "weight": 0}, "three")
    record = {"prompt": chat[:1], "completion": chat[1:]}
    _, found = targets(record, kind="prompt_completion")
    assert [("one" in each, "two" in each, "three" in each) for each in found] == [
        (True, False, False),
        (False, False, True),
    ]


def test_options_and_system_prompts_of_records_reach_the_template(targets: Any) -> None:
    template = "{{ mood }}/" + CHATML
    for options in ({"mood": "calm"}, '{"mood": "calm"}'):
        record = {"conversations": turns("one"), "system": "Be brief."}
        record["chat_template_kwargs"] = options
        text, _ = targets(record, template, messages_field="conversations")
        assert text.startswith("calm/<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    with pytest.raises(ConfigError, match=r"'chat_template_kwargs'.*without messages"):
        targets({"messages": turns("one"), "chat_template_kwargs": {"tools": []}})
    thinking_off = {"messages": turns("one"), "chat_template_kwargs": {"enable_thinking": False}}
    _, found = targets(thinking_off, trl_template("qwen3"))
    assert found == ["one<|im_end|>\n"], "the prompt has written the empty reasoning"


def test_the_template_for_tools_renders_chats_with_tools(targets: Any) -> None:
    named = {"default": CHATML, "tool_use": TOOL_USE}
    tools = [{"name": "weather"}]
    for given in (tools, json.dumps(tools), [json.dumps(tools[0])]):
        assert targets({"messages": turns("a"), "tools": given}, named)[0].startswith("weather:")
    assert targets({"messages": turns("a"), "tools": []}, named)[0].startswith("<|im_start|>")
    with pytest.raises(ConfigError, match=r"chat templates tool_use, but no default"):
        targets({"messages": turns("a")}, {"tool_use": TOOL_USE})


@pytest.mark.parametrize(
    "template", [MARKS_WITHOUT_END, NEXT_ROLE_ENDS], ids=["marks", "next role"]
)
def test_what_ends_a_turn_is_a_target(targets: Any, template: str) -> None:
    text, found = targets({"messages": turns("one", "two")}, template)
    end = "<|user|>" if template == NEXT_ROLE_ENDS else "<|im_end|>\n"
    assert found == [f"one{end}", f"two{end}"]
    assert text.endswith(end)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (
            "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n"
            "{% if loop.last and add_generation_prompt %}<|assistant|>\n{% endif %}{% endfor %}",
            "{}<|endoftext|>\n",
        ),
        (
            "{% for i in range(messages|length) %}{% set m = messages[i] %}"
            "<|{{ m.role }}|>{{ '<last>' if loop.last else '' }}{{ m.content }}<|im_end|>"
            "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
            "{}<|im_end|>",
        ),
        (
            "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
            "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
            " {}<|endoftext|>",
        ),
        (
            "{% macro turn(m) %}<|{{ m.role }}|>{{ m.content | upper }}<|im_end|>{% endmacro %}"
            "{% for m in messages %}{{ turn(m) }}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|><think>{% endif %}",
            "{}<|im_end|>",
        ),
    ],
    ids=["prompt in the loop", "loop over indices", "instructions", "macro, open prompt"],
)
def test_templates_of_any_form(targets: Any, template: str, form: str) -> None:
    _, found = targets({"messages": turns("one", "two")}, template)
    assert [each.replace("<last>", "").lower() for each in found] == [
        form.format("one"),
        form.format("two"),
    ]


def test_what_cannot_be_trained_on_is_said(targets: Any, caplog: pytest.LogCaptureFixture) -> None:
    image = [{"type": "text", "text": "See:"}, {"type": "image_url", "image_url": "x"}]
    with pytest.raises(ConfigError, match="line 1: message 2 has a part of type 'image_url'"):
        targets({"messages": turns({"content": image})})
    warn_once.cache_clear()
    call = {"function": {"name": "weather", "arguments": "{"}}
    with pytest.raises(ConfigError, match="arguments of the tool call 'weather' are not valid"):
        targets({"messages": turns({"content": "", "tool_calls": [call]})})
    call["function"]["arguments"] = "{}"
    lost = turns(
        {"content": "a", "reasoning_content": "Hm."}, {"content": "b", "tool_calls": [call]}
    )
    lost[0]["train"] = True
    lost.insert(0, {"role": "developer", "content": "Be brief."})
    with caplog.at_level(logging.WARNING):
        targets(
            {"messages": lost},
            CHATML.replace(IN_ORDER, f"{IN_ORDER} if message['role'] != 'developer'"),
        )
    words = ("reasoning", "tool calls", "the assistant's messages alone", "role 'developer'")
    for word in words:
        assert word in caplog.text


@pytest.mark.parametrize("label", [False, True])
def test_an_unwanted_completion_is_named(
    tmp_path: Path, make_data: MakeData, caplog: pytest.LogCaptureFixture, label: bool
) -> None:
    """Wrong: the unpaired preferences of KTO teach what they advise against, without a word."""
    warn_once.cache_clear()
    path = tmp_path / "a.jsonl"
    record = {"prompt": "2 + 2?", "completion": "5", "label": label}
    path.write_text(f"{json.dumps(record)}\n" * 9)
    with caplog.at_level(logging.WARNING):
        prepare_dataset(make_data(path, kind="prompt_completion"), 7)
    assert ("labelled false" in caplog.text) is not label


@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_a_system_prompt_beside_texts_is_named(
    tmp_path: Path, make_data: MakeData, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Wrong: the column of `orca_dpo_pairs` is left out without a word."""
    path = tmp_path / "a.jsonl"
    record = {name: "Be brief.", "prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
    path.write_text(f"{json.dumps(record)}\n" * 9)
    for fields in (None, {"prompt": (name, "prompt")}):
        warn_once.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            prepare_dataset(make_data(path, kind="preference", fields=fields), 99)
        assert (f"'{name}' has no effect" in caplog.text) is (fields is None)


@pytest.mark.parametrize("role", ["user", "system"])
def test_a_system_prompt_that_no_library_reads_is_named(
    targets: Any, caplog: pytest.LogCaptureFixture, role: str
) -> None:
    warn_once.cache_clear()
    first = [{"role": "system", "content": "Be brief."}] if role == "system" else []
    messages = [*first, {"role": "user", "content": "2 + 2?"}, *turns("4")[-1:]]
    with caplog.at_level(logging.WARNING):
        targets({"messages": messages, "system_prompt": "Be brief."})
    assert ("'system_prompt' has no effect" in caplog.text) is (role == "user")


@pytest.mark.parametrize("calls", [[], "", "[]", "null", None])
def test_a_list_without_calls_says_nothing(targets: Any, calls: Any) -> None:
    """Wrong: Llama 3.1's template refuses a member that a table gives to all messages."""
    messages = turns({"content": "one", "tool_calls": calls})
    assert targets({"messages": messages}, trl_template("llama3_1"))[1] == ["one<|eot_id|>"]


def test_functions_are_tools(targets: Any) -> None:
    """The older form, beside `function_call`."""
    function = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
    messages = turns("one")
    template = "{{ tools[0].function.name }}" + CHATML
    text, _ = targets({"messages": messages, "functions": [function]}, template)
    assert text.startswith("weather<|im_start|>")


def test_each_turn_may_be_a_document(tmp_path: Path, make_data: MakeData) -> None:
    """Under Qwen3's template, whose earlier turns lose their reasoning in the whole text."""
    library = save_chat_tokenizer(tmp_path / "tokenizer", trl_template("qwen3"))
    thoughts = [{"content": f"a{turn}", "reasoning_content": f"r{turn}"} for turn in range(3)]
    messages = turns(thoughts[0], {**thoughts[1], "weight": 0}, thoughts[2])
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": messages}))
    keys = {"kind": "chat", "tokenizer": str(tmp_path / "tokenizer"), "train_on": "turns"}
    wanted = []
    for last in (0, 2):
        so_far = messages[: 2 * last + 1]
        prompt = library.apply_chat_template(so_far, add_generation_prompt=True, return_dict=False)
        ids = library.apply_chat_template(messages[: 2 * last + 2], return_dict=False)
        assert ids[: len(prompt)] == prompt
        assert library.decode(ids[len(prompt) :]).startswith(f"<think>\nr{last}\n</think>")
        wanted.append((ids, [place >= len(prompt) for place in range(len(ids))]))
    assert sorted(documents_of(prepare_dataset(make_data(path, **keys), 255))) == sorted(wanted)


RECORD = {
    "text": "q",
    "messages": turns("a"),
    "prompt": turns("a")[:1],
    "completion": turns("a")[1:],
    "chosen": turns("a")[1:],
    "rejected": turns("b")[1:],
}
INPUTS: dict[str, dict[str, Any]] = {
    "chat": {"messages_field": "prompt", "train_on": "all"},
    "prompt_completion": {"train_on": "all"},
    "preference": {},
    "text": {"text_field": "other", "isolate_documents": True},
}


@pytest.mark.parametrize("kind", INPUTS)
def test_each_input_is_in_the_key(tmp_path: Path, make_data: MakeData, kind: str) -> None:
    """Wrong: rows of another template, tokenizer, file or key are trained on."""
    path = tmp_path / "a.jsonl"
    tokenizer = tmp_path / "tokenizer"
    keys = {"kind": kind, "tokenizer": str(tokenizer)}
    length = 3 if kind == "text" else 127

    def is_known(**more: Any) -> bool:
        return find_dataset(make_data(path, **{**keys, **more}), length) is not None

    save_chat_tokenizer(tokenizer, CHATML)
    path.write_text("".join(json.dumps(RECORD) + "\n" for _ in range(40)))
    prepare_dataset(make_data(path, **keys), length)
    assert is_known()
    changes = {**INPUTS[kind], "begin_of_document": "<s>", "end_of_document": "<s>"}
    for key, value in changes.items():
        assert not is_known(**{key: value}), key
    if kind == "text":
        return
    assert not is_known(chat_template=MARKED)
    for template in (MARKED, {"default": CHATML, "tool_use": TOOL_USE}):
        save_chat_tokenizer(tokenizer, template)
        assert not is_known(), "the tokenizer's own template"
    library = save_chat_tokenizer(tokenizer, CHATML)
    assert is_known()
    library.add_special_tokens({"bos_token": "<s>"})
    library.save_pretrained(tokenizer)
    assert not is_known(), "a template may print it"
