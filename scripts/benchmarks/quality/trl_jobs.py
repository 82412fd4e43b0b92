"""Jobs of the guides, and what TRL is told for the same: records, model, data and training."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

STEPS = 8
BATCH = 8
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
Record = dict[str, Any]


def ask(draw: random.Random) -> Record:
    return {"role": "user", "content": f"What is {draw.randint(1, 999)} plus two?"}


def answer(draw: random.Random, words: int = 1) -> Record:
    text = " ".join(f"It is {draw.randint(1, 9999)}." for _ in range(words))
    return {"role": "assistant", "content": text}


def chat(draw: random.Random) -> Record:
    """Three turns after a system prompt."""
    messages: list[Record] = [{"role": "system", "content": "You are helpful."}]
    for _ in range(3):
        messages += [ask(draw), answer(draw, 6)]
    return {"messages": messages}


def plain_chat(draw: random.Random) -> Record:
    return {"messages": chat(draw)["messages"][1:]}


def tool_chat(draw: random.Random) -> Record:
    """Three turns, the second with a call of a tool and its result."""
    messages = plain_chat(draw)["messages"]
    function = {"name": "weather", "arguments": {"city": f"Rome {draw.randint(1, 99)}"}}
    call = {"type": "function", "id": "call00001", "function": function}
    result = {
        "role": "tool",
        "name": "weather",
        "tool_call_id": "call00001",
        "content": str(draw.randint(1, 40)),
    }
    messages[3:3] = [{"role": "assistant", "content": "", "tool_calls": [call]}, result]
    return {"messages": messages, "tools": TOOLS}


def pair(draw: random.Random) -> Record:
    return {"prompt": ask(draw)["content"], "completion": " " + answer(draw, 12)["content"]}


def message_pair(draw: random.Random) -> Record:
    return {"prompt": [ask(draw), answer(draw), ask(draw)], "completion": [answer(draw, 12)]}


def text(draw: random.Random) -> Record:
    return {"text": answer(draw, 14)["content"]}


def preference(draw: random.Random) -> Record:
    return {
        "prompt": ask(draw)["content"],
        "chosen": " " + answer(draw, 2)["content"],
        "rejected": " " + answer(draw, 3)["content"],
    }


def message_preference(draw: random.Random) -> Record:
    """Whole conversations without a prompt, as `ultrafeedback_binarized` has them."""
    begin = [ask(draw), answer(draw), ask(draw)]
    return {"chosen": [*begin, answer(draw, 2)], "rejected": [*begin, answer(draw, 4)]}


@dataclass(frozen=True)
class Job:
    """One job as a guide describes it, and what TRL is told for the same."""

    make: Callable[[random.Random], Record]
    data: Record
    trl: Record = field(default_factory=dict)
    training: Record = field(default_factory=dict)
    family: str = "qwen3"
    template: str = "qwen3"
    trl_template: bool = False
    """`data.chat_template` is the template with which TRL replaces the model's."""
    choice: str = ""
    """Reason why TRL trains on other targets; empty: the losses are equal."""
    adapter: bool = False
    begins: bool = False
    """The tokenizer's post-processor begins each text with a token."""
    length: int | None = None
    """Tokens of a row, which several records share; None: each row holds one."""
    evaluation: bool = False

    @property
    def is_preference(self) -> bool:
        return self.data["kind"] == "preference"

    @property
    def objective(self) -> str:
        return str(self.training.get("objective", "cross_entropy"))


CHAT = {"kind": "chat"}
ASSISTANT = {"assistant_only_loss": True}
PAIRS = {"kind": "preference"}
LINEAR = {"schedule": "linear", "warmup_steps": 3}
COSINE = {"schedule": "cosine", "warmup_steps": 2, "min_learning_rate_ratio": 0.1}
TRL_COSINE = {
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "warmup_steps": 2,
}
TRL_LINEAR = {"lr_scheduler_type": "linear", "warmup_steps": 3}
HEADER = "TRL also trains on what the prompt of a turn has written; guide: own_data.md"
EMPTY_THOUGHT = "TRL renders an empty thought in each earlier turn; guide: own_data.md"
QWEN3 = Job(tool_chat, CHAT, ASSISTANT, adapter=True)
GPT_OSS = Job(tool_chat, CHAT, ASSISTANT, family="gpt_oss", template="gptoss")
DEEPSEEK = Job(
    plain_chat,
    CHAT,
    {**ASSISTANT, **TRL_COSINE},
    COSINE,
    family="deepseek_v3",
    template="deepseekv3",
)
JOBS = {
    "chat, tools, Qwen3, LoRA": replace(QWEN3, trl_template=True),
    "chat, tools, Qwen3, LoRA, the model's template": replace(QWEN3, choice=EMPTY_THOUGHT),
    "chat, tools, Qwen3 2507, evaluation, warmup, linear": Job(
        tool_chat,
        CHAT,
        {**ASSISTANT, **TRL_LINEAR},
        LINEAR,
        template="qwen3_instruct_2507",
        evaluation=True,
    ),
    "chat, tools, gpt-oss": replace(GPT_OSS, trl_template=True),
    "chat, tools, gpt-oss, the model's template": replace(GPT_OSS, choice=HEADER),
    "chat, DeepSeek-V3, cosine to a floor": replace(DEEPSEEK, trl_template=True),
    "chat, DeepSeek-V3, the model's template": replace(DEEPSEEK, choice=HEADER),
    "chat, tools, GLM 4": Job(tool_chat, CHAT, ASSISTANT, family="glm4", template="glm4moe"),
    "chat, Phi-3.5, LoRA": Job(
        chat, CHAT, ASSISTANT, family="phi3", template="phi3_5", adapter=True
    ),
    "chat, Gemma 3": Job(chat, CHAT, ASSISTANT, family="gemma3_text", template="gemma3"),
    "chat, Llama 3": Job(chat, CHAT, ASSISTANT, family="llama", template="llama3"),
    "chat, Qwen2.5, packed": Job(
        chat,
        CHAT,
        {**ASSISTANT, "packing": True},
        family="qwen2",
        template="qwen2_5",
        trl_template=True,
        length=700,
    ),
    "prompt and completion, texts": Job(pair, {"kind": "prompt_completion"}),
    "prompt and completion, messages, LoRA": Job(
        message_pair, {"kind": "prompt_completion"}, adapter=True, begins=True
    ),
    "prompt and completion, texts, begin token, packed": Job(
        pair, {"kind": "prompt_completion"}, {"packing": True}, begins=True, length=512
    ),
    "text, cut into rows": Job(
        text,
        {"kind": "text"},
        {"packing": True, "packing_strategy": "wrapped"},
        length=95,
    ),
    "text, one a row, begin token, accumulated": Job(
        text,
        {"kind": "text", "packing": "best_fit", "isolate_documents": True},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": BATCH // 2},
        begins=True,
    ),
    "DPO, texts, LoRA": Job(
        preference, PAIRS, training={"objective": "dpo"}, adapter=True, evaluation=True
    ),
    "DPO, conversations, LoRA": Job(
        message_preference, PAIRS, training={"objective": "dpo"}, adapter=True
    ),
    "ORPO, texts, whole model": Job(preference, PAIRS, training={"objective": "orpo"}),
    "ORPO, conversations, LoRA": Job(
        message_preference,
        PAIRS,
        training={"objective": "orpo"},
        adapter=True,
        choice="TRL appends the end token to rendered answers; guide: own_data.md",
    ),
}
