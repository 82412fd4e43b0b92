"""Losses of `autohet train` beside TRL's trainers in one process, step by step, on equal data.

    python -m scripts.benchmarks.quality.trl_losses [--only NAME ...]     about a minute a job

Each job is one of the guides': records, a tiny model and, with LoRA, an adapter from peft. Both
trainers read the records themselves, in the order that the job draws; dropout is 0, fp32. Recorded
in results/trl_losses.json: the largest relative difference of a step's and of an evaluation's loss.
Jobs that are not run keep their record.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trl
import yaml
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import processors
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from autohet.runtime.data import TokenDataset, prepare_dataset, sample_rows
from autohet.runtime.job import DataSection
from scripts.benchmarks.provenance import provenance
from scripts.benchmarks.quality.trl_jobs import BATCH, JOBS, STEPS, Job, Record
from tests.harness.chat_tokenizer import (
    TRL_TEMPLATES,
    save_chat_tokenizer,
    special_tokens_of,
    trl_template,
)
from tests.harness.tiny_models import tiny_config

RESULTS = Path(__file__).parents[1] / "results" / "trl_losses.json"
LIMIT = 2e-5
LIMIT_S = 600
ATTEMPTS = 3
"""Ray may not start in time beside other work."""
LONGEST = 1023
RECORDS = 32
EVALUATED = 6
VOCABULARY = 800
BEGIN = "<s>"
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"}


TRAINING = {
    "learning_rate": 1e-3,
    "precision": "fp32",
    "schedule": "constant",
    "weight_decay": 0.1,
    "steps": STEPS,
    "device": "cpu",
}


class Prepared:
    """A job's directory: model, adapter, records and job document."""

    def __init__(self, name: str, job: Job, directory: Path) -> None:
        self.job = job
        self.directory = directory
        draw = random.Random(name)
        self.records = [job.make(draw) for _ in range(RECORDS)]
        self.held_out = [job.make(draw) for _ in range(EVALUATED)]
        self._write_model()
        self.document = self._write_document()

    def _write_model(self) -> None:
        template = trl_template(self.job.template)
        lines = "\n".join(json.dumps(record) for record in self.records)
        save_chat_tokenizer(
            self.directory / "model",
            template,
            special_tokens_of(template),
            [template] * 3 + [lines],
            VOCABULARY,
        )
        # Qwen's tokenizers have none, which TRL's ORPOTrainer would put before each prompt.
        begin = BEGIN if self.job.begins or "bos_token" in template else None
        tokenizer = AutoTokenizer.from_pretrained(self.directory / "model", bos_token=begin)
        if self.job.begins:
            tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single=f"{BEGIN} $A", special_tokens=[(BEGIN, tokenizer.bos_token_id)]
            )
        tokenizer.save_pretrained(self.directory / "model")
        torch.manual_seed(7)
        config = tiny_config(
            self.job.family,
            vocab_size=VOCABULARY,
            max_position_embeddings=1024,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.bos_token_id,
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(self.directory / "model")
        if self.job.adapter:
            adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA))
            if self.job.objective == "dpo":
                # An adapter that has been trained is a reference of its own.
                for name, tensor in adapted.named_parameters():
                    if "lora_B" in name:
                        torch.nn.init.normal_(tensor, std=0.02)
            adapted.save_pretrained(str(self.directory / "adapter"))

    def _write_document(self) -> Record:
        job = self.job
        _write(self.directory / "data.jsonl", self.records)
        model: Record = {"pretrained": str(self.directory / "model")}
        if job.adapter:
            model["adapter"] = {"from": str(self.directory / "adapter")}
        document: Record = {
            "name": "job",
            "model": model,
            "training": {
                **TRAINING,
                "global_batch_sequences": BATCH,
                **job.training,
            },
            "data": {
                **job.data,
                "source": str(self.directory / "data.jsonl"),
                "cache": str(self.directory / "cache"),
            },
        }
        if job.trl_template:
            template = TRL_TEMPLATES / f"{job.template}_training.jinja"
            document["data"]["chat_template"] = str(template)
        if job.evaluation:
            _write(self.directory / "held_out.jsonl", self.held_out)
            document["evaluation"] = {
                "source": str(self.directory / "held_out.jsonl"),
                "every_steps": STEPS // 2,
                "at_start": True,
            }
        self._set_rows(document)
        return document

    def _set_rows(self, document: Record) -> None:
        """Set the length of rows for one record each, or a batch of all rows."""
        training = document["training"]
        length = self.job.length or LONGEST
        data = DataSection(**document["data"], tokenizer=document["model"]["pretrained"])
        rows = prepare_dataset(data, length)
        if self.job.length is not None:
            training["global_batch_sequences"] = len(rows)
        elif not self.job.is_preference:
            # No record is half as long as another, so that no two share a row.
            length = _longest_record(rows) - 1
        training["sequence_length"] = length

    @property
    def samples(self) -> list[Record]:
        """Records in the order in which the job trains on them."""
        if self.job.length is not None:
            return self.records
        order = sample_rows(0, len(self.records), 0, STEPS * BATCH)
        return [self.records[index] for index in order]


def _longest_record(rows: TokenDataset) -> int:
    counts, begins = rows.marks(np.arange(len(rows)))
    longest = 0
    for counted, starts in zip(counts, begins, strict=True):
        places = [*np.flatnonzero(starts).tolist(), len(starts)]
        for begin, end in pairwise(places):
            if counted[begin:end].any():
                longest = max(longest, end - begin)
    return longest


def _write(path: Path, records: list[Record]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@dataclass
class Losses:
    """Losses by step, and of evaluations."""

    steps: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)


def train_autohet(prepared: Prepared) -> Losses:
    """Run `autohet train` on the job's document."""
    directory = prepared.directory
    (directory / "job.yaml").write_text(yaml.safe_dump(prepared.document))
    command = [sys.executable, "-m", "autohet.cli.main", "train", "--job", "job.yaml"]
    for _ in range(ATTEMPTS):
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        if done.returncode == 0:
            break
    else:
        raise RuntimeError(f"autohet train ended with {done.returncode}: {done.stderr[-2000:]}")
    found = Losses()
    for line in (directory / "runs/job/events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["kind"] == "step":
            found.steps.append(event["loss"])
        elif event["kind"] == "evaluation":
            found.evaluations.append(event["evaluation_loss"])
    return found


class _Recorder(TrainerCallback):  # type: ignore[misc]
    """Keeps the losses of steps, each the sum of its batches', and of evaluations."""

    def __init__(self) -> None:
        self.found = Losses()
        self.parts: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.found.steps.append(sum(self.parts))
        self.parts = []

    def on_evaluate(self, *_: Any, **named: Any) -> None:
        self.found.evaluations.append(named["metrics"]["eval_loss"])


def _recorded(kind: type, recorder: _Recorder) -> type:
    """Return a trainer that takes samples in their order and gives its losses to `recorder`."""

    class Recorded(kind):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def training_step(self, *inputs: Any, **named: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*inputs, **named)
            recorder.parts.append(float(loss))
            return loss

    return Recorded


def trl_arguments(prepared: Prepared) -> Record:
    job = prepared.job
    length = prepared.document["training"]["sequence_length"] + 1
    found: Record = {
        "output_dir": str(prepared.directory / "trl"),
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": EVALUATED,
        "max_steps": STEPS,
        "learning_rate": TRAINING["learning_rate"],
        "lr_scheduler_type": "constant",
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": TRAINING["weight_decay"],
        "max_length": length // 2 if job.is_preference else length,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    if job.objective == "orpo":
        # Its mean is over a batch's tokens, so that a batch is one pair.
        found |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": BATCH}
    if job.length is not None:
        # A step reads all rows, one at a time.
        found |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": RECORDS}
    if job.evaluation:
        found |= {"eval_strategy": "steps", "eval_steps": STEPS // 2, "eval_on_start": True}
    if job.objective == "cross_entropy":
        found["router_aux_loss_coef"] = 0.0
    return {**found, **job.trl}


TRAINERS = {
    "cross_entropy": (SFTConfig, SFTTrainer),
    "dpo": (DPOConfig, DPOTrainer),
    "orpo": (ORPOConfig, ORPOTrainer),
}


def train_trl(prepared: Prepared) -> Losses:
    job = prepared.job
    settings, kind = TRAINERS[job.objective]
    model: Any = AutoModelForCausalLM.from_pretrained(
        prepared.directory / "model", dtype=torch.float32
    )
    if job.adapter:
        model = PeftModel.from_pretrained(model, prepared.directory / "adapter", is_trainable=True)
    recorder = _Recorder()
    evaluated = Dataset.from_list(prepared.held_out) if job.evaluation else None
    trainer = _recorded(kind, recorder)(
        model=model,
        args=settings(**trl_arguments(prepared)),
        train_dataset=Dataset.from_list(prepared.samples),
        eval_dataset=evaluated,
        processing_class=AutoTokenizer.from_pretrained(prepared.directory / "model"),
        callbacks=[recorder],
    )
    if job.trl.get("packing_strategy") == "wrapped":
        # TRL keeps the tokens that fill no row, as a shorter one.
        full = trainer.args.max_length
        trainer.train_dataset = trainer.train_dataset.filter(lambda r: len(r["input_ids"]) == full)
    trainer.train()
    return recorder.found


def difference(own: list[float], other: list[float]) -> float:
    """Return the largest relative difference; infinite where their numbers differ."""
    if len(own) != len(other):
        return float("inf")
    return max((abs(a - b) / abs(b) for a, b in zip(own, other, strict=True)), default=0.0)


def compare(name: str, job: Job) -> Record:
    with tempfile.TemporaryDirectory() as directory:
        prepared = Prepared(name, job, Path(directory))
        own = train_autohet(prepared)
        other = train_trl(prepared)
    found: Record = {
        "steps": difference(own.steps, other.steps),
        "losses": own.steps,
        "trl": other.steps,
    }
    if job.evaluation:
        found["evaluations"] = difference(own.evaluations, other.evaluations)
        found["evaluation_losses"] = own.evaluations
        found["trl_evaluation_losses"] = other.evaluations
    worst = max(found["steps"], found.get("evaluations", 0.0))
    found["passed"] = worst <= LIMIT or bool(job.choice)
    if job.choice:
        found["choice"] = job.choice
    remark = "" if worst <= LIMIT else job.choice or "TOO LARGE"
    print(f"{name}: {worst:.1e} {remark}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="names of jobs, or parts of them")
    only = parser.parse_args().only
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    jobs = document.get("jobs", {})
    passed = True
    for name, job in JOBS.items():
        if any(part in name for part in only):
            jobs[name] = {**compare(name, job), **provenance()}
            passed &= jobs[name]["passed"]
            document = {"what": __doc__, "trl": trl.__version__, "limit": LIMIT, "jobs": jobs}
            RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
