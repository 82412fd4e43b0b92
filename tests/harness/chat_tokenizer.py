"""A small byte-level tokenizer with a chat template, in a directory as transformers saves it."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GATHERED = (  # printed after the loop, and an earlier turn is shortened once another follows
    "{% set all = namespace(text='') %}"
    "{% for message in messages %}"
    "{% set start = '<think></think>' if loop.last and message['role'] == 'assistant' else '' %}"
    "{% set start = '<|im_start|>' + message['role'] + '\n' + start %}"
    "{% set all.text = all.text + start + message['content'] + '<|im_end|>\n' %}"
    "{% endfor %}{{ all.text }}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
TEXT = [
    "What is the capital of France? Paris is the capital of France.",
    "system user assistant tool: You are helpful. Grüße, 你好, naïve café!",
    "def add(a, b):\n    return a + b\n",
]


TRL_TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def trl_template(name: str) -> str:
    return (TRL_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def special_tokens_of(template: str) -> list[str]:
    """What a template's tokenizer has as tokens of their own."""
    return sorted({*SPECIAL, *re.findall(r"<[|｜]?[\w▁]+[|｜]?>|\[/?INST\]|</s>", template)})


def save_chat_tokenizer(
    directory: Path,
    template: str | dict[str, str] | None = MARKED,
    special: Sequence[str] = SPECIAL,
    texts: Sequence[str] = TEXT,
    size: int = 400,
) -> PreTrainedTokenizerFast:
    """Train one on a few lines, save it, return it as transformers loads it."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    shutil.rmtree(directory, ignore_errors=True)  # Named templates have files of their own.
    tokenizer.save_pretrained(directory)
    return tokenizer
