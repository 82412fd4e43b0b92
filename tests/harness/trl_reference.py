"""The same rows trained by TRL's SFTTrainer in one process: assistant-only loss, padding-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from trl import SFTConfig, SFTTrainer

from autohet.runtime.data import TokenDataset, sample_rows
from autohet.runtime.models import family_of
from autohet.runtime.models.initialization import initial_parameters
from autohet.runtime.reference import reference_model
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


def run_trl(case: Case, tokenizer: Any, directory: Path) -> TrlRun:
    """Train the case's model from its first weights on its rows."""
    config = case.config()
    names = list(family_of(config).parameter_specs(config))
    model = reference_model(config, initial_parameters(config, names, case.seed))
    section = case.section()
    arguments = SFTConfig(
        output_dir=str(directory),
        per_device_train_batch_size=section.global_batch_sequences,
        max_steps=case.steps,
        learning_rate=section.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=section.betas[0],
        adam_beta2=section.betas[1],
        adam_epsilon=section.eps,
        weight_decay=0.0,
        max_grad_norm=section.clip_norm,
        optim="adamw_torch",
        bf16=False,
        fp16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        padding_free=True,
        packing=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    run = TrlRun()

    class Recorded(SFTTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def training_step(self, *inputs: Any, **named: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*inputs, **named)
            run.losses.append(float(loss))
            return loss

    trainer = Recorded(
        model=model,
        args=arguments,
        train_dataset=rows_as_trl_has_them(case),
        processing_class=tokenizer,
    )
    trainer.train()
    run.weights = {
        name: tensor.detach().numpy().copy() for name, tensor in model.named_parameters()
    }
    return run
