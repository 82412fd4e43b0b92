"""Chat data, a tokenizer and a small base model for the demonstration of fine-tuning.

They are made on this machine, so that the demonstration needs no download: questions about the
functions of Python's standard library, answered by their docstrings, and a model with random
weights.
"""

import ast
import inspect
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from autohet.runtime.data import prepare_dataset
from autohet.runtime.job import Job
from autohet.runtime.state.export import export_checkpoint
from autohet.runtime.step.batches import EvaluationRows
from autohet.runtime.step.reference import loss_of_rows
from planner.errors import ConfigError
from recovery.checkpoint.commit import list_checkpoints, open_checkpoint
from recovery.storage.open import open_storage

MODULES = (
    *("argparse", "calendar", "collections", "datetime", "fractions", "inspect", "pathlib"),
    *("random", "shutil", "statistics", "string", "tarfile", "textwrap", "turtle", "typing"),
)
"""Modules whose docstrings are the conversations."""
LONGEST_ANSWER = 160
HELD_OUT = 10
"""Every tenth conversation is held out for the evaluation."""
VOCABULARY = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
END = "<|endoftext|>"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@dataclass(frozen=True)
class ExportedAdapter:
    """The best checkpoint's adapter as stock `peft` loads it.

    evaluation_loss: the run's at `step`. peft_loss: that of transformers' model with the adapter,
    on the same rows.
    """

    directory: str
    step: int
    evaluation_loss: float
    peft_loss: float

    @property
    def relative_difference(self) -> float:
        return abs(self.peft_loss - self.evaluation_loss) / self.evaluation_loss


def chat_job(job: Job, directory: Path) -> Job:
    """Return the job with base, data and checkpoints in `directory`, by absolute paths."""
    root = directory.resolve()
    assert job.data is not None
    assert job.evaluation is not None
    return replace(
        job,
        model=replace(job.model, pretrained=str(root / "base")),
        data=replace(
            job.data,
            source=str(root / "train.jsonl"),
            tokenizer=str(root / "base"),
            cache=str(root / "cache"),
        ),
        evaluation=replace(job.evaluation, source=str(root / "held_out.jsonl")),
    )


def write_chat(directory: Path, seed: int) -> None:
    """Write conversations (train and held out), and a base model with its tokenizer."""
    conversations = list(_conversations())
    held_out = conversations[::HELD_OUT]
    trained = [each for index, each in enumerate(conversations) if index % HELD_OUT]
    directory.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("train", trained), ("held_out", held_out)):
        lines = [json.dumps({"messages": messages}) for messages in chosen]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    texts = []
    for messages in trained:
        texts += [message["content"] for message in messages]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=END)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(directory / "base")
    _base_model(seed).save_pretrained(directory / "base")


def _conversations() -> Iterator[list[dict[str, str]]]:
    """Yield one conversation for each documented function of `MODULES`."""
    library = Path(sysconfig.get_path("stdlib"))
    for module in MODULES:
        path = library / f"{module}.py"
        if not path.exists():
            path = library / module / "__init__.py"
        if not path.exists():
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            answer = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")[0]
            if 0 < len(answer) <= LONGEST_ANSWER:
                question = f"What does {node.name} of {module} do?"
                yield [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": " ".join(answer.split())},
                ]


def _base_model(seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def export_best(job: Job, losses: dict[int, float], directory: Path) -> ExportedAdapter:
    """Export the kept checkpoint with the lowest evaluation loss, and load it by stock `peft`.

    losses: evaluation losses by step.

    Raises:
        ConfigError: no checkpoint has a loss.
    """
    storage = open_storage(job.checkpoint_storage)
    try:
        steps = [each.step for each in list_checkpoints(storage) if each.step in losses]
        if not steps:
            raise ConfigError(f"no checkpoint of {job.checkpoint_storage} has an evaluation loss")
        best = min(steps, key=lambda step: losses[step])
        manifest = open_checkpoint(storage, best)
        out = directory / "adapter"
        export_checkpoint(storage, manifest, out)
    finally:
        storage.close()
    return ExportedAdapter(str(out), best, losses[best], _loss_by_peft(job, out))


def _loss_by_peft(job: Job, adapter: Path) -> float:
    """Return the evaluation loss of transformers' model with the adapter, loaded by `peft`."""
    from peft import PeftModel

    data = job.evaluation_data
    section = job.evaluation
    assert data is not None
    assert section is not None
    training = job.training
    dataset = prepare_dataset(data, training.sequence_length)
    cpu = torch.device("cpu")
    rows = EvaluationRows(dataset, training.global_batch_sequences, cpu, section.max_sequences)
    base: Any = LlamaForCausalLM.from_pretrained(
        job.model.pretrained, dtype=torch.float32, trust_remote_code=False
    )
    model: Any = PeftModel.from_pretrained(base, str(adapter)).eval()
    loss = torch.zeros((), dtype=torch.float64)
    num_targets = 0
    everything = range(training.global_batch_sequences)
    with torch.no_grad():
        for index in range(rows.num_batches):
            tokens, targets = rows.batch(index, everything)
            begins = rows.begins(index, everything)
            loss += loss_of_rows(model, tokens, targets, begins)
            num_targets += int((targets >= 0).sum())
    return float(loss) / num_targets
