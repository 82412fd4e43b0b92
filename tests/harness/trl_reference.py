"""The same rows trained by TRL in one process: SFTTrainer with assistant-only loss, padding-free,
and DPOTrainer with peft's adapters.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import PeftModel
from torch.utils.data import SequentialSampler
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from autohet.runtime.data import TokenDataset, sample_rows
from autohet.runtime.models.layers.adapters import is_adapter
from autohet.runtime.models.registry import family_of
from autohet.runtime.state.frozen import first_weights
from autohet.runtime.step.reference import lora_config, named_adapters, reference_model
from tests.harness.training_case import Case


@dataclass
class TrlRun:
    """Losses by step, and final weights by name."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)


def rows_as_trl_has_them(case: Case) -> Dataset:
    """The samples of all steps in order, each a row of documents without its padding."""
    dataset = TokenDataset(case.dataset)
    count = case.steps * case.training["global_batch_sequences"]
    indices = sample_rows(case.seed, len(dataset), 0, count)
    counts, begins = dataset.marks(indices)
    examples = []
    for row, counted, starts in zip(dataset.rows(indices), counts, begins, strict=True):
        places = [*np.flatnonzero(starts).tolist(), len(row)]
        used = len(row)
        if not counted[places[-2] :].any():  # padding, or a document whose targets are others'
            used = places[-2]
        lengths = np.diff([place for place in places if place <= used])
        labels = np.where(counted, row, -100)[:used]
        examples.append(
            {"input_ids": row[:used], "labels": labels, "seq_lengths": lengths.tolist()}
        )
    return Dataset.from_list(examples)


def pairs_as_trl_has_them(case: Case) -> Dataset:
    """The samples of all steps in order, each a prompt with two answers."""
    dataset = TokenDataset(case.dataset)
    count = case.steps * case.training["global_batch_sequences"]
    indices = sample_rows(case.seed, len(dataset), 0, count)
    counts, begins = dataset.marks(indices)
    examples = []
    for row, counted, starts in zip(dataset.rows(indices), counts, begins, strict=True):
        middle, end = [*np.flatnonzero(starts).tolist(), len(row)][1:3]
        length = int(counted[:middle].argmax())
        assert row[:length].tolist() == row[middle : middle + length].tolist(), "one prompt"
        examples.append(
            {
                "prompt_ids": row[:length].tolist(),
                "chosen_ids": row[length:middle].tolist(),
                "rejected_ids": row[middle + length : end].tolist(),
            }
        )
    return Dataset.from_list(examples)


def arguments_of(case: Case, directory: Path) -> dict[str, Any]:
    """What all of TRL's trainers are told of a case."""
    section = case.section()
    return {
        "output_dir": str(directory),
        "per_device_train_batch_size": section.global_batch_sequences,
        "max_steps": case.steps,
        "learning_rate": section.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": section.betas[0],
        "adam_beta2": section.betas[1],
        "adam_epsilon": section.eps,
        "weight_decay": 0.0,
        "max_grad_norm": section.clip_norm,
        "optim": "adamw_torch",
        "bf16": False,
        "fp16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "max_length": None,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
    }


class Recorded:
    """A trainer of TRL that takes its rows in their order and keeps its losses."""

    run: TrlRun

    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]

    def training_step(self, *inputs: Any, **named: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*inputs, **named)  # type: ignore[misc]
        self.run.losses.append(float(loss))
        return loss


class RecordedSft(Recorded, SFTTrainer):  # type: ignore[misc]
    pass


class RecordedDpo(Recorded, DPOTrainer):  # type: ignore[misc]
    def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
        """The rows are token ids already."""
        return dataset


def run_trl(case: Case, tokenizer: Any, directory: Path) -> TrlRun:
    """Train the case's model, or its adapters, from its first weights on its rows.

    The library's gpt-oss makes its masks without positions, so that documents of a batch in one row
    would attend to each other: its rows are padded instead, and hold one document each.
    """
    is_flat = case.model["model_type"] != "gpt_oss"
    arguments = SFTConfig(
        padding_free=is_flat,
        packing=False,
        router_aux_loss_coef=0.0,
        dataset_kwargs={"skip_prepare_dataset": True},
        **arguments_of(case, directory),
    )
    rows = rows_as_trl_has_them(case)
    assert is_flat or all(len(lengths) == 1 for lengths in rows["seq_lengths"])
    return train_recorded(RecordedSft, case, arguments, rows, tokenizer)


def run_trl_dpo(case: Case, tokenizer: Any, directory: Path) -> TrlRun:
    """Train the case's adapters from their first values on its rows of preferences."""
    beta = case.section().preference_beta
    arguments = DPOConfig(beta=beta, **arguments_of(case, directory))
    return train_recorded(RecordedDpo, case, arguments, pairs_as_trl_has_them(case), tokenizer)


def train_recorded(
    kind: type[Recorded], case: Case, arguments: Any, rows: Dataset, tokenizer: Any
) -> TrlRun:
    config = case.config()
    names = list(family_of(config).parameter_specs(config))
    drawn = dict(first_weights(case.model_section(), config, names, case.seed))
    base = {name: tensor for name, tensor in drawn.items() if not is_adapter(name)}
    model = reference_model(config, iter(base.items()))
    adapter = None
    if case.adapter:
        adapter = lora_config(config, model)
        adapter.lora_dropout = case.adapter.dropout
        if case.adapter.from_ is not None:
            model = PeftModel.from_pretrained(model, case.adapter.from_, is_trainable=True)
            adapter = None
    make: Any = kind
    trainer = make(
        model=model,
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=adapter,
    )
    trained = named_adapters if case.adapter else type(model).named_parameters
    if adapter is not None:
        with torch.no_grad():
            for name, tensor in trained(trainer.model):
                tensor.copy_(drawn[name])
    trainer.run = TrlRun()
    trainer.train()
    trainer.run.weights = {
        name: tensor.detach().numpy().copy() for name, tensor in trained(trainer.model)
    }
    found: TrlRun = trainer.run
    return found
