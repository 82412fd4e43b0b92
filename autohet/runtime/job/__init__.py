"""The job document: what to train, on what data, how to survive.

A job is YAML, read strictly: an unknown key is an error that names it and the key that was probably
meant. `autohet plan` needs `model` and three keys of `training`; `Job.require_training` checks what
`autohet train` needs.
"""

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from autohet.runtime.job.checkpoint import CheckpointSection
from autohet.runtime.job.data import DataSection, EvaluationSection
from autohet.runtime.job.elastic import ElasticSection, ScriptedEvent, Timeouts
from autohet.runtime.job.emulation import EmulationSection
from autohet.runtime.job.identity import (
    BUILT_IN_FAMILY,
    FAMILY,
    FROM_SEED,
    Value,
    adapter_identity,
    identity_of,
)
from autohet.runtime.job.model import AdapterSection, ModelSection
from autohet.runtime.job.parallelism import ParallelismSection
from autohet.runtime.job.requirements import require
from autohet.runtime.job.strict_document import key_of, read_yaml, to_dataclass
from autohet.runtime.job.trackers import TrackerEntry, TrackerKind
from autohet.runtime.job.training import TrainingSection
from planner.inputs.documents import Document, Json
from planner.plans.formats import check_named_formats

__all__ = [
    "AdapterSection",
    "CheckpointSection",
    "DataSection",
    "ElasticSection",
    "EmulationSection",
    "EvaluationSection",
    "Job",
    "ModelSection",
    "ParallelismSection",
    "ScriptedEvent",
    "Timeouts",
    "TrackerEntry",
    "TrackerKind",
    "TrainingSection",
]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job document, as frozen plain data that pickles.

    `model` and `training` are required; every other section has defaults.
    """

    model: ModelSection
    """Model: its config or pretrained weights, and how it is trained (all weights or adapters)."""
    training: TrainingSection
    """Optimizer steps: batch, length, learning rate, precision, memory."""
    name: str = ""
    """Name of the run's directory and checkpoints; empty: the stem of the job file's name."""
    data: DataSection | None = None
    """Training data; null: none, which `autohet plan` allows and `autohet train` refuses."""
    evaluation: EvaluationSection | None = None
    """Evaluation rows and how often they are evaluated; null: no evaluation."""
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    """Durable checkpoints, snapshots and copies on other nodes."""
    elastic: ElasticSection = field(default_factory=ElasticSection)
    """Reactions to changes of the fleet, and timeouts."""
    parallelism: ParallelismSection = field(default_factory=ParallelismSection)
    """Limits and wishes for the planner."""
    trackers: tuple[TrackerKind | TrackerEntry, ...] = ()
    """Trackers that follow the run by its events: `tensorboard`, `wandb`, `mlflow`.

    A tracker that is not installed is left out. An entry is a kind or a mapping of `kind`,
    `project`, `name`, `group`, `tags`.
    """
    emulation: EmulationSection | None = None
    """Emulated GPU speeds, for rehearsals on machines without GPUs; null: run at full speed."""

    def __post_init__(self) -> None:
        if self.data is not None:
            object.__setattr__(self, "data", self._complete_data(self.data))
        require(
            "/" not in self.name,
            f"name is {self.name!r}, but it names a directory; leave the slash out",
        )
        microbatch = self.parallelism.microbatch_sequences
        batch = self.training.global_batch_sequences
        require(
            microbatch is None or batch % microbatch == 0,
            f"training.global_batch_sequences is {batch}, which is no multiple of"
            f" parallelism.microbatch_sequences, {microbatch}; take a multiple, or leave"
            " microbatch_sequences to the planner",
        )
        require(
            self.data is None or not (self.data.isolates and self.parallelism.spmd),
            "parallelism.spmd is true, but its programs have no isolated documents; set"
            " data.isolate_documents: false, or leave spmd out",
        )
        for key in ("label_smoothing", "z_loss", "router_balance"):
            value = getattr(self.training, key)
            require(
                value in (0, "none") or not self.parallelism.spmd,
                f"training.{key} is {value}, which the programs of parallelism.spmd do not have;"
                " leave one out",
            )
        for key, is_given in (
            ("parallelism.spmd", self.parallelism.spmd),
            ("model.adapter", self.model.adapter is not None),
            ("parallelism.min_pipelines", self.parallelism.min_pipelines > 1),
            ("parallelism.redundancy", self.parallelism.redundancy > 1),
        ):
            require(
                self.training.optimizer == "adamw" or not is_given,
                f"training.optimizer is {self.training.optimizer}, whose matrices are updated whole"
                f" by one owner each, which {key} does not allow; leave one out",
            )
        self._check_evaluation()
        self._check_preference()
        self._check_formats()
        self._settle_base()
        require(
            self.model.adapter is None or not self.parallelism.spmd,
            "parallelism.spmd is true, but its programs train no adapters; leave spmd or"
            " model.adapter out",
        )

    def _complete_data(self, data: DataSection) -> DataSection:
        """Return the data section with what other sections set in it."""
        model = self.model
        tokenizer = data.tokenizer
        if not tokenizer and model.pretrained is not None and data.tokens_field is None:
            revision = f"@{model.revision}" if model.revision else ""
            tokenizer = f"{model.pretrained}{revision}"
        split = None if self.evaluation is None else self.evaluation.split
        return replace(
            data,
            tokenizer=tokenizer,
            trust_remote_code=data.trust_remote_code or model.trust_remote_code,
            held_out=data.held_out if split is None else split,
        )

    def _check_preference(self) -> None:
        objective = self.training.objective
        is_preference = self.training.preference_beta is not None
        kind = "preference" if self.data is None else self.data.kind
        require(
            not is_preference or kind == "preference",
            f"training.objective is {objective}, but data.kind is {kind}; set data.kind:"
            " preference",
        )
        require(
            is_preference or self.data is None or kind != "preference",
            "data.kind is preference, which training.objective cross_entropy cannot train on; set"
            " training.objective: dpo, or data.kind: prompt_completion with the chosen answers",
        )
        is_dpo = objective == "dpo"
        require(
            not is_dpo or self.model.adapter is not None,
            "training.objective is dpo, but model.adapter is missing: the reference of the loss is"
            " the model without a new one; add `model: {adapter: {kind: lora}}`, or set"
            " training.objective: orpo, which has no reference",
        )

    def _settle_base(self) -> None:
        """Check the format of an adapter's base; bf16 is `training.precision`, and becomes null."""
        adapter = self.model.adapter
        if adapter is None or adapter.base is None:
            return
        fp8 = [kind for kind, named in self.parallelism.named_formats.items() if named == "fp8"]
        require(
            adapter.base == "bf16" or not fp8,
            f"model.adapter.base is {adapter.base}, whose products are in 16 or 32 bits, but"
            f" parallelism.compute_formats names fp8 for {', '.join(fp8)}; name bf16, or leave base"
            " out",
        )
        if adapter.base != "bf16":
            return
        precision = self.training.precision
        require(
            precision == "bf16",
            f"model.adapter.base is bf16, but training.precision, in which a base is held that is"
            f" not quantized, is {precision}; leave base out, or set training.precision: bf16",
        )
        model = replace(self.model, adapter=replace(adapter, base=None))
        object.__setattr__(self, "model", model)

    def _check_formats(self) -> None:
        named = self.parallelism.named_formats
        precision = self.training.precision
        if not named:
            return
        require(
            precision == "bf16",
            "parallelism.compute_formats names formats of GPU types, but training.precision is"
            f" {precision}, which is then every type's; leave compute_formats out, or set"
            " training.precision: bf16",
        )
        require(
            not self.parallelism.spmd,
            "parallelism.spmd is true, but its programs compute in one format on all GPU types;"
            " leave spmd or the mapping of compute_formats out",
        )
        check_named_formats(named, "parallelism.compute_formats", is_emulated=self.computes_on_cpu)

    @property
    def computes_on_cpu(self) -> bool:
        """True if CPUs compute, in place of emulated GPUs or because the job wants no GPUs."""
        return self.emulation is not None or self.training.device == "cpu"

    def _check_evaluation(self) -> None:
        evaluation = self.evaluation
        best = self.checkpoint.keep_best
        if evaluation is None:
            require(
                best is None,
                f"checkpoint.keep_best is {best}, but nothing is evaluated; give evaluation.source"
                " or evaluation.split, or leave keep_best out",
            )
            return
        require(
            not self.parallelism.spmd,
            "evaluation is given, but the programs of parallelism.spmd do not evaluate; leave one"
            " out",
        )
        held_out = self.evaluation_data
        weights = () if held_out is None else held_out.weights
        require(
            not weights or evaluation.split is not None,
            f"evaluation.source has weights, {weights}, but its rows are read in their order;"
            " leave weights out",
        )
        every = self.checkpoint.fixed_steps
        require(
            best is None or every is None or every % evaluation.every_steps == 0,
            f"checkpoint.keep_best is {best}, but checkpoint.every, {every} steps, is no multiple"
            f" of evaluation.every_steps, {evaluation.every_steps}: a checkpoint has a loss where"
            " its own step is evaluated",
        )

    @property
    def checkpoint_unit(self) -> int:
        """Steps of which a checkpoint's step is a multiple, where the job does not name them.

        The best checkpoints are known by their loss: then each step of one is evaluated.
        """
        if self.checkpoint.keep_best is None or self.evaluation is None:
            return 1
        return self.evaluation.every_steps

    @property
    def evaluation_data(self) -> DataSection | None:
        """Return the data section of the evaluation rows; None if nothing is evaluated."""
        if self.data is None or self.evaluation is None:
            return None
        if self.evaluation.source is None:
            return replace(self.data, reads_held_out=True)
        return replace(self.data, source=self.evaluation.source, held_out=0.0)

    @classmethod
    def from_yaml(cls, path: str | Path) -> "Job":
        """Read a job from a YAML file.

        Raises:
            ConfigError: the file is not a valid job; the message has the file's name.
        """
        job = cls.from_document(read_yaml(path, "job"))
        return job if job.name else replace(job, name=Path(path).stem)

    @classmethod
    def from_document(cls, document: Json) -> "Job":
        """Return the job in a plain mapping, as YAML or JSON gives it."""
        return to_dataclass(document, cls, "job")

    def to_document(self) -> Document:
        """Return a plain mapping with every default filled in.

        `from_document` gives the same job back.
        """
        document = asdict(self, dict_factory=_by_key)
        return {key: value for key, value in document.items() if value is not None}

    @property
    def tracker_entries(self) -> tuple[TrackerEntry, ...]:
        """Trackers of the job, each as an entry."""
        entries = []
        for each in self.trackers:
            if isinstance(each, str):
                each = TrackerEntry(kind=each)
            entries.append(each)
        return tuple(entries)

    @property
    def checkpoint_storage(self) -> str:
        """Storage of durable checkpoints: as given, or a directory under runs/."""
        return self.checkpoint.storage or f"runs/{self.name or 'job'}/checkpoints"

    def identity(self, weights: str | None = None) -> dict[str, Value]:
        """Return the run's identity for a checkpoint's scalars; see `identity.identity_of`."""
        sections = {"training": self.training, "data": self.data, "checkpoint": self.checkpoint}
        found = identity_of(sections, weights if self.model.pretrained else FROM_SEED)
        if self.data is not None:
            found["data.tokenizer"] = self.data.tokenizer or "bytes"
            # As in runs of versions that began no document by themselves.
            found["data.begin_of_document"] = self.data.begin_of_document or None
        found[FAMILY] = self.model.family or BUILT_IN_FAMILY
        found["model.dropout"] = self.model.dropout
        return found | adapter_identity(self.model.adapter)

    def require_training(self) -> DataSection:
        """Return the data section of a job that can be trained.

        Raises:
            ConfigError: the job lacks a key that `autohet train` needs.
        """
        require(
            self.training.steps is not None or self.training.max_epochs is not None,
            "training.steps is missing, and training.max_epochs too; `train` needs to know when to"
            " end",
        )
        require(
            self.training.precision != "fp16" or not self.parallelism.spmd,
            "parallelism.spmd is true, but its programs train in bf16 or fp32 alone, and"
            " training.precision is fp16; leave spmd out, or change the precision",
        )
        if self.data is None:
            require(
                False,
                "the job lacks data; add data.source, for example `data: {source:"
                " builtin:python-stdlib}`",
            )
        assert self.data is not None
        return self.data


def _by_key(fields: list[tuple[str, Any]]) -> Document:
    """Return a section's fields by the keys of its document."""
    return {key_of(name): value for name, value in fields}
