"""The sections of a job document, each a frozen dataclass with all keys, units and defaults.

Paths are as the process that runs the job sees them (with `ray job submit --working-dir DIR`,
relative to DIR).
"""

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from planner.errors import ConfigError
from planner.plan import ComputeFormat, Recompute

GIB = 1 << 30


def require(condition: bool, message: str) -> None:
    """Raise ConfigError(message) unless `condition`.

    The value is the user's; the message says how to fix it.
    """
    if not condition:
        raise ConfigError(message)


def require_at_least(name: str, value: float | None, minimum: float) -> None:
    """Raise ConfigError if `value` is below `minimum`; None passes (the key was not given)."""
    require(value is None or value >= minimum, f"{name} is {value}, but must be at least {minimum}")


def require_positive(name: str, value: float | None) -> None:
    """Raise ConfigError unless `value` is positive; None passes (the key was not given)."""
    require(value is None or value > 0, f"{name} is {value}, but must be more than 0")


@dataclass(frozen=True, kw_only=True)
class AdapterSection:
    """Low-rank updates of a frozen model's linear maps (Hu et al. 2021): W x + s B A x."""

    kind: Literal["lora"] = "lora"
    """Kind of adapter: LoRA."""
    rank: int = 16
    """Rank of the update: rows of A and columns of B."""
    alpha: float = 32.0
    """Scale of the update: it is multiplied by alpha / rank."""
    targets: str | tuple[str, ...] = "all-linear"
    """Linear maps of the blocks that get an adapter.

    `all-linear`: all of them. Else those whose path ends in one of these names or matches it as a
    pattern (`q_proj`, `mlp.down_proj`, `*.self_attn.?_proj`).
    """
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (Kalajdzievski 2023)."""
    dropout: float = 0.0
    """Probability with which an element of an adapter's input is dropped in training.

    Which ones are dropped depends on `training.seed` and the sample, not on the plan.
    """

    def __post_init__(self) -> None:
        require_at_least("model.adapter.rank", self.rank, 1)
        require_positive("model.adapter.alpha", self.alpha)
        require(
            0 <= self.dropout < 1,
            f"model.adapter.dropout is {self.dropout}, but must be in [0, 1)",
        )
        require(
            bool(self.targets),
            "model.adapter.targets is empty; name linear maps such as q_proj, or all-linear",
        )


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """The model: exactly one of `config` (trained from scratch) and `pretrained` (fine-tuned)."""

    config: dict[str, Any] | None = None
    """Transformers config as a mapping: `model_type`, and values other than that type's defaults.
    """
    pretrained: str | None = None
    """Directory with a Hugging Face checkpoint, or a hub id."""
    revision: str | None = None
    """Hub revision of `pretrained`; null: its main branch."""
    trust_remote_code: bool = False
    """Let code that comes with a hub repository or a directory run in this job's processes.

    It concerns tokenizers alone: models are always built from transformers' own modules.
    """
    family: str | None = None
    """Rules by which the model is cut into layers and slices.

    `my_package.my_model:FAMILY`: a `Family` importable from the job's working directory. `auto`:
    the library's own plans, for a model type that is not built in. null: the built-in family of the
    model type.
    """
    vocabulary_multiple: int = 1
    """Multiple to which embedding and head are padded with rows of zeros.

    The rows are in no loss and in no exported checkpoint. 64 suits tensor cores: every
    tensor-parallel slice is then a multiple of 8 rows. A run keeps the value that it began with.
    """
    adapter: AdapterSection | None = None
    """Low-rank adapters to train, with all other weights frozen; null: train all weights."""
    dropout: bool = True
    """Drop elements in training with the probabilities of the model's config.

    Which ones are dropped depends on `training.seed` and the sample, not on the plan. Evaluation
    drops nothing, nor does `training.objective: dpo`. false: all of them are 0.
    """

    def __post_init__(self) -> None:
        require(
            self.vocabulary_multiple == 1
            or (self.vocabulary_multiple > 0 and self.vocabulary_multiple % 8 == 0),
            f"model.vocabulary_multiple is {self.vocabulary_multiple}, but must be 1 (no padding)"
            " or a multiple of 8, such as 64",
        )
        require(
            (self.config is None) != (self.pretrained is None),
            "model needs exactly one of config (train from scratch) and pretrained (fine-tune)",
        )
        module, _, attribute = (self.family or "auto").partition(":")
        require(
            self.family in (None, "auto") or bool(module and attribute),
            f"model.family is '{self.family}'; name a module and its value, such as"
            " my_package.my_model:FAMILY, or auto",
        )
        require(
            self.config is None or isinstance(self.config.get("model_type"), str),
            "model.config lacks model_type; name a transformers model type such as llama, qwen3 or"
            " gpt2",
        )
        require(
            self.revision is None or self.pretrained is not None,
            "model.revision is for model.pretrained only",
        )


DEFAULT_DPO_BETA = 0.1


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    """Batch, length, learning rate, optimizer and numerics of the training steps."""

    global_batch_sequences: int
    """Sequences in one optimizer step, independent of the fleet."""
    sequence_length: int
    """Tokens in a sequence."""
    steps: int | None = None
    """Optimizer steps of the whole run, resumed or not; null: `max_epochs` ends the run.

    `autohet train` needs `steps` or `max_epochs`.
    """
    max_epochs: float | None = None
    """Passes over all rows of the data set after which the run ends; null: no bound.

    A step that has begun counts whole. With `steps`, the run ends at whichever comes first.
    Schedules end there too.
    """
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Number format of compute and activations; masters, moments and sums are always fp32.

    Gradients in fp16 are scaled by a power of two, which an overflow halves (the step is run again)
    and 2,000 steps without one double.
    """
    seed: int = 0
    """Seed of the initial weights and of the sample order."""
    learning_rate: float = 3e-4
    """Learning rate at the end of the warm-up."""
    schedule: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"] | None = None
    """Shape of the learning rate after the warm-up, with the rates of `transformers.get_scheduler`.

    wsd: warm-up, stable, decay along a cosine. null: a cosine whose warm-up reaches `learning_rate`
    in its last step, not one step later.
    """
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and the second moment."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """AdamW's decoupled weight decay, applied as torch.optim.AdamW does."""
    no_decay: Literal["norms_and_biases", "none"] | tuple[str, ...] = "norms_and_biases"
    """Parameters without weight decay.

    norms_and_biases: norms and biases, as `transformers.Trainer` chooses them; none: no parameter.
    Else a list of parameter names, in which * stands for any part.
    """
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    decay_steps: int | None = None
    """Step at which the schedule reaches its end; null: `steps`."""
    stable_steps: int | None = None
    """Steps of `wsd` at the full rate, between warm-up and decay; null: until the last tenth."""
    min_learning_rate_ratio: float | None = None
    """Final rate of `cosine`, `linear` and `wsd`, as a fraction of `learning_rate`.

    null: 0, as in transformers; 0.1 if `schedule` is null.
    """
    objective: Literal["cross_entropy", "dpo"] = "cross_entropy"
    """Loss that is trained on.

    cross_entropy: the next token's. dpo: direct preference optimization (Rafailov et al. 2023) of
    `data.kind: preference`, by adapters; its reference is the model without them.
    """
    dpo_beta: float | None = None
    """Strength of DPO's tie to its reference; null: 0.1."""
    clip_norm: float | None = 1.0
    """Bound on the global gradient norm; null: no clipping."""
    label_smoothing: float = 0.0
    """Fraction of each target that is spread over the vocabulary; evaluation has none.

    As `label_smoothing` of `torch.nn.functional.cross_entropy`.
    """
    z_loss: float = 0.0
    """Weight of the z-loss, which is added to the training loss (PaLM: 1e-4).

    The z-loss is the square of the log of the sum of exponentials of a token's logits.
    """
    router_balance: Literal["none", "sequence", "bias"] = "none"
    """Balance of the experts' loads in a mixture of experts.

    sequence: a loss of each sequence alone, as DeepSeek-V3 (section 2.1.2), so that no plan changes
    it. bias: each step moves the routers' correction biases by the tokens that the global batch
    sent to each expert (same section), for models with such biases (deepseek_v3). The library's own
    balance loss is of a microbatch, which depends on the plan.
    """
    router_balance_weight: float = 1e-3
    """Weight of the balance loss of each router.

    The balance loss is of all tokens of a row, and divided by the targets that count: where one
    token in ten counts, as in conversations, a tenth of the weight has the same effect.
    """
    router_bias_speed: float = 1e-3
    """Change of a router's correction bias in a step, with router_balance: bias."""
    recompute: Literal["none", "selective", "full", "auto", "if_needed"] = "if_needed"
    """Recomputation of a block's activations in the backward pass.

    none: all are kept; selective: all but matrix products and fused attention are recomputed; full:
    all are recomputed from the block's input. auto: the planner chooses for each stage, where it is
    clearly faster or nothing fits without; if_needed: only if nothing fits without.
    """
    optimizer_sharding: Literal["off", "auto", "if_needed"] = "if_needed"
    """Sharding of masters and moments over the holders of a layer (ZeRO-1).

    A sharded master or moment has no second live holder. off: never. auto: the planner chooses,
    where it is clearly faster or nothing fits without; if_needed: only if nothing fits without. If
    `recompute` or `optimizer_sharding` is auto, an if_needed of the other means auto too.
    """
    offload: Literal["off", "optimizer", "if_needed"] = "if_needed"
    """Keep masters and moments in host memory and update them there, by the same arithmetic.

    Copies and the host's update make each step longer. optimizer: in every plan of the planner.
    if_needed: only if no plan fits the GPUs otherwise, and never on the CPU.
    """
    compile_blocks: bool | Literal["auto"] = "auto"
    """Compile each transformer block by torch.compile: slower first steps, faster ones after.

    Compiled code is kept as long as the worker's process, so generations with equal shapes share
    it. Blocks of tensor-parallel stages or of isolated documents are not compiled. auto: compile on
    GPUs where code can be compiled.
    """
    kernels: Literal["torch", "liger"] = "torch"
    """Kernels of RMSNorm, RoPE and SwiGLU: PyTorch's (`torch`) or liger-kernel's (`liger`).

    `liger` needs the liger-kernel package on a GPU's machine; without it PyTorch's are used.
    """
    replica_check_steps: int = 100
    """Steps between two checks that all holders of a shard have bit-equal weights and moments.

    The check compares checksums in the step's vote; holders that differ take the owner's bits. 1:
    before every step; 0: never.
    """
    max_skipped_steps: int | None = 5
    """Skipped steps in a row after which the job ends with a checkpoint; null: no bound.

    A step is skipped (changes no weights) if its loss or gradient is not finite, or its gradient
    norm is above `skip_gradient_norm_above`.
    """
    skip_gradient_norm_above: float | None = None
    """Gradient norm, before clipping, above which a step changes no weights; null: no bound.

    It skips the data of a loss spike.
    """
    skip_steps: tuple[tuple[int, int], ...] = ()
    """Ranges [first, last] of steps that change no weights.

    They skip the data of a loss spike in a run that is resumed from a checkpoint before it.
    """
    profile_steps: tuple[int, int] | None = None
    """First and last step of a torch profiler trace by each worker; null: none.

    Traces are stored in the run's record in the job's storage.
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the workers; auto: CUDA if the worker has a GPU, else CPU."""

    @property
    def balance_weight(self) -> float:
        """Weight of the routers' balance loss; 0 without one."""
        return self.router_balance_weight if self.router_balance == "sequence" else 0.0

    @property
    def stage_recompute(self) -> Recompute:
        """Recomputation of stages for which the plan sets none."""
        return (
            "none" if self.recompute == "auto" or self.recompute == "if_needed" else self.recompute
        )

    @property
    def preference_beta(self) -> float | None:
        """DPO's beta; None: another objective."""
        if self.objective != "dpo":
            return None
        return DEFAULT_DPO_BETA if self.dpo_beta is None else self.dpo_beta

    @property
    def floor_ratio(self) -> float:
        """`min_learning_rate_ratio`, given or by schedule."""
        if self.min_learning_rate_ratio is not None:
            return self.min_learning_rate_ratio
        return 0.1 if self.schedule is None else 0.0

    def last_step(self, num_rows: int) -> int | None:
        """Return the steps of the whole run over a data set of `num_rows` rows.

        None: the job has no bound, or the bound depends on rows that are not counted yet (0).
        """
        if self.max_epochs is None:
            return self.steps
        if not num_rows:
            return None
        by_epochs = math.ceil(self.max_epochs * num_rows / self.global_batch_sequences)
        return by_epochs if self.steps is None else min(self.steps, by_epochs)

    def with_rows(self, num_rows: int) -> "TrainingSection":
        """Return the section with `max_epochs` converted to steps, once the rows are counted."""
        if self.max_epochs is None or not num_rows:
            return self
        return replace(self, steps=self.last_step(num_rows), max_epochs=None)

    def wsd_decay(self, end: int) -> int:
        """Return the number of steps over which `wsd` falls to its floor, reached at step `end`."""
        if self.stable_steps is None:
            return -(-end // 10)
        return max(0, end - self.warmup_steps - self.stable_steps)

    def skips(self, step: int) -> bool:
        """Return True if `skip_steps` contains this step."""
        return any(first <= step <= last for first, last in self.skip_steps)

    def __post_init__(self) -> None:
        require_at_least("training.global_batch_sequences", self.global_batch_sequences, 1)
        require_at_least("training.sequence_length", self.sequence_length, 1)
        require_at_least("training.steps", self.steps, 1)
        require_positive("training.max_epochs", self.max_epochs)
        require_at_least("training.warmup_steps", self.warmup_steps, 0)
        require_at_least("training.weight_decay", self.weight_decay, 0)
        require_at_least("training.learning_rate", self.learning_rate, 0)
        require_at_least("training.seed", self.seed, 0)
        require_at_least("training.replica_check_steps", self.replica_check_steps, 0)
        require_at_least("training.max_skipped_steps", self.max_skipped_steps, 1)
        require_positive("training.skip_gradient_norm_above", self.skip_gradient_norm_above)
        for begin, end in self.skip_steps:
            require(
                0 <= begin <= end,
                f"training.skip_steps holds [{begin}, {end}]; give [first, last] with 0 <= first"
                " <= last",
            )
        first, last = self.profile_steps or (0, 0)
        require(
            0 <= first <= last,
            f"training.profile_steps is [{first}, {last}]; give [first, last] with 0 <= first <="
            " last",
        )
        require_positive("training.decay_steps", self.decay_steps)
        require_positive("training.eps", self.eps)
        require_positive("training.clip_norm", self.clip_norm)
        require(
            0 <= self.label_smoothing < 1,
            f"training.label_smoothing is {self.label_smoothing}, but must be in [0, 1)",
        )
        require_at_least("training.z_loss", self.z_loss, 0)
        require_at_least("training.router_balance_weight", self.router_balance_weight, 0)
        require_at_least("training.router_bias_speed", self.router_bias_speed, 0)
        for beta in self.betas:
            require(0 <= beta < 1, f"training.betas holds {beta}, but each must be in [0, 1)")
        self._check_objective()
        self._check_schedule()

    def _check_objective(self) -> None:
        require_positive("training.dpo_beta", self.dpo_beta)
        is_preference = self.objective == "dpo"
        require(
            is_preference or self.dpo_beta is None,
            f"training.dpo_beta is {self.dpo_beta}, but training.objective is {self.objective};"
            " set training.objective: dpo, or leave dpo_beta out",
        )
        for key in ("label_smoothing", "z_loss", "router_balance"):
            value = getattr(self, key)
            require(
                value in (0, "none") or not is_preference,
                f"training.{key} is {value}, but training.objective is dpo, whose loss has no such"
                " term; leave one out",
            )

    def _check_schedule(self) -> None:
        ratio = self.floor_ratio
        require(
            0 <= ratio <= 1, f"training.min_learning_rate_ratio is {ratio}, but must be in [0, 1]"
        )
        last = self.decay_steps or self.steps
        require(
            last is None or self.warmup_steps <= last,
            f"training.warmup_steps is {self.warmup_steps}, more than the {last} steps of the"
            " schedule; lower it",
        )
        endless = self.schedule in ("constant", "inverse_sqrt")
        for key in ("min_learning_rate_ratio", "decay_steps"):
            require(
                not endless or getattr(self, key) is None,
                f"training.{key} is {getattr(self, key)}, but training.schedule is {self.schedule},"
                " which does not end; leave one out",
            )
        stable = self.stable_steps
        require_at_least("training.stable_steps", stable, 0)
        require(
            stable is None or self.schedule == "wsd",
            f"training.stable_steps is {stable}, but is for training.schedule: wsd alone",
        )
        require(
            stable is None or last is None or self.warmup_steps + stable <= last,
            f"training.stable_steps is {stable}, which with {self.warmup_steps} steps of warm-up"
            f" exceeds the {last} steps of the schedule; lower it",
        )


@dataclass(frozen=True, kw_only=True)
class SourceEntry:
    """A source of data with its weight, split or subset."""

    path: str
    """Path or URI, as in `data.source`."""
    weight: float | None = None
    """Fraction of the samples, relative to the weights of the other sources.

    All sources have a weight, or none has. Each weighted source has epochs of its own. null: all
    rows are alike, whatever their source.
    """
    split: str = "train"
    """Split of an `hf://` data set, in the datasets library's syntax."""
    subset: str | None = None
    """Configuration of an `hf://` data set; null: its default."""

    def __post_init__(self) -> None:
        require(bool(self.path), "data.source has an entry without a path; give its path")
        require_positive("data.source's weight", self.weight)


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Sources of text, and their conversion to rows of `sequence_length + 1` tokens."""

    source: str | tuple[str | SourceEntry, ...]
    """Source of the text, or a list of sources, in order.

    A source is a file, directory, glob, `s3://bucket/prefix`, `hf://org/name` or
    `builtin:python-stdlib`, or a mapping of `path`, `weight`, `split` and `subset`.
    """
    format: Literal["auto", "text", "jsonl", "json", "parquet", "arrow"] = "auto"
    """File format; auto: by each file's content.

    Of a directory, glob or prefix the files of one kind are taken, never a README, a licence or a
    data card. A text file is one document; `json` is a file that is one JSON value, an array of
    objects.
    """
    kind: Literal["text", "chat", "prompt_completion", "preference"] = "text"
    """Content of a record: text, a conversation, a `prompt` and its `completion`, or a preference.

    A preference is a `prompt` with a `chosen` and a `rejected` answer. All fields of a record are
    texts, or all are lists of messages; without a `prompt`, the messages that both answers begin
    with are the prompt. A row holds one preference, each answer with its prompt in half of it.
    """
    text_field: str = "text"
    """Field of a JSON object, or column of a Parquet file, that holds a document."""
    tokens_field: str | None = None
    """Field with a document's token ids, for data tokenized before; null: documents are text.

    The ids are taken as they are. With the default tokenizer every id is valid, otherwise only the
    tokenizer's own.
    """
    messages_field: str = "messages"
    """Field that holds a conversation (`kind: chat`).

    It is a list of messages with `role` and `content`, or `from` and `value`.
    """
    chat_template: str | None = None
    """File with a Jinja template, or the template itself; null: the tokenizer's."""
    train_on: Literal["assistant", "completion", "all"] | None = None
    """Tokens that are targets of the loss.

    assistant: all turns of the assistant; completion: the last of them, or the completion; all:
    every token. null: `assistant` for chat, `completion` for prompt_completion, `all` for text.
    """
    isolate_documents: bool | None = None
    """Mask attention between the documents of a row and restart positions at 0 in each.

    null: false for text, else true.
    """
    packing: Literal["concat", "best_fit"] | None = None
    """Packing of documents into rows.

    concat: documents are joined and cut; best_fit: whole documents are fitted together, with
    padding where none fits. null: `best_fit` for chat and prompt_completion, `concat` for text. A
    preference is never packed.
    """
    begin_of_document: str | None = None
    """Token before each document, unless it is there already; null: none.

    Give the BOS token if the model was trained with one.
    """
    skip_broken_lines: bool = False
    """Leave out and count lines and rows without a document (broken JSON, null, no text).

    false: the first such line ends the preparation.
    """
    tokenizer: str = "bytes"
    """Tokenizer: `bytes`, a tokenizers JSON file, or a Hugging Face directory or id.

    bytes: UTF-8 bytes 0-255, end of document = 0.
    """
    trust_remote_code: bool = False
    """Let the tokenizer's own code run; `model.trust_remote_code` sets this key too."""
    end_of_document: str | None = None
    """Token after each document; null: the tokenizer's own end token."""
    cache: str | None = None
    """Directory of built token datasets, kept between runs.

    null: $AUTOHET_CACHE, else ~/.cache/autohet.
    """
    build_timeout_s: float = 3600.0
    """Seconds that a worker waits while another process of its node builds the same dataset."""

    def __post_init__(self) -> None:
        require(
            bool(self.source),
            "data.source is empty; name a file, directory, glob, s3:// prefix or builtin",
        )
        require(
            bool(self.tokenizer),
            "data.tokenizer is empty; give bytes, a file, a directory or a hub id",
        )
        require_positive("data.build_timeout_s", self.build_timeout_s)
        self._check_kind()

    def _check_kind(self) -> None:
        require(
            len(self.weights) in (0, len(self.entries)),
            f"data.source has {len(self.entries)} sources, {len(self.weights)} with a weight; give"
            " every one a weight, or none",
        )
        is_text = self.kind == "text"
        require(
            not is_text or self.train_on in (None, "all"),
            f"data.train_on is {self.train_on}, but data.kind is text, which is trained on whole;"
            " set data.kind to chat or prompt_completion, or leave train_on out",
        )
        require(
            self.kind != "prompt_completion" or self.train_on != "assistant",
            "data.train_on is assistant, which data.kind prompt_completion does not tell apart; use"
            " completion or all",
        )
        if self.kind == "preference":
            for key, taken in (
                ("train_on", (None, "completion")),
                ("isolate_documents", (None, True)),
                ("packing", (None,)),
            ):
                value = getattr(self, key)
                require(
                    value in taken,
                    f"data.{key} is {str(value).lower()}, but data.kind is preference, whose rows"
                    f" hold one pair of answers each; leave {key} out",
                )
        require(
            is_text or self.tokens_field is None,
            f"data.tokens_field is for data.kind text, not {self.kind}; leave one out",
        )
        require(
            not is_text or self.chat_template is None,
            "data.chat_template is given, but data.kind is text; set data.kind: chat",
        )
        require(
            is_text or self.format != "text",
            f"data.format is text, but data.kind {self.kind} needs records; leave format out",
        )

    @property
    def targets(self) -> Literal["assistant", "completion", "all"]:
        """`train_on`, given or by kind."""
        if self.train_on is not None:
            return self.train_on
        by_kind: dict[str, Literal["assistant", "completion", "all"]] = {
            "chat": "assistant",
            "prompt_completion": "completion",
            "preference": "completion",
        }
        return by_kind.get(self.kind, "all")

    @property
    def isolates(self) -> bool:
        """`isolate_documents`, given or by kind."""
        given = self.isolate_documents
        return self.kind != "text" if given is None else given

    @property
    def packs_best_fit(self) -> bool:
        """True if `packing`, given or by kind, is best_fit."""
        return (self.packing or ("concat" if self.kind == "text" else "best_fit")) == "best_fit"

    @property
    def marks_rows(self) -> bool:
        """True if rows carry marks of targets and pieces beside their tokens."""
        return self.kind != "text" or self.isolates or self.packs_best_fit

    @property
    def record_field(self) -> str:
        """Field that a record must have to be data."""
        by_kind = {
            "chat": self.messages_field,
            "prompt_completion": "prompt",
            "preference": "chosen",
        }
        return by_kind.get(self.kind, self.tokens_field or self.text_field)

    @property
    def entries(self) -> tuple[SourceEntry, ...]:
        """Sources of the section, each as an entry."""
        given = (self.source,) if isinstance(self.source, str) else self.source
        return tuple(SourceEntry(path=each) if isinstance(each, str) else each for each in given)

    @property
    def sources(self) -> tuple[str, ...]:
        """Paths of all sources."""
        return tuple(entry.path for entry in self.entries)

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights of the sources; empty if they are not weighted."""
        return tuple(float(each.weight) for each in self.entries if each.weight is not None)

    @property
    def cache_root(self) -> Path:
        """Directory of the built token datasets."""
        return Path(
            self.cache or os.environ.get("AUTOHET_CACHE") or "~/.cache/autohet"
        ).expanduser()


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """Loss on rows that are not trained on, by forward passes through the training plan."""

    source: str | tuple[str | SourceEntry, ...]
    """Source of the evaluation rows, as `data.source`.

    All other keys of `data` hold for it too. Its rows are read in their order, without weights.
    """
    every_steps: int = 100
    """Steps between evaluations; one more follows the last step."""
    at_start: bool = False
    """True: also evaluate the state before the first step."""
    max_sequences: int | None = None
    """Limit on the rows that an evaluation reads, from the first on; null: all."""

    def __post_init__(self) -> None:
        require(bool(self.source), "evaluation.source is empty; name a file, as data.source")
        require_at_least("evaluation.every_steps", self.every_steps, 1)
        require_at_least("evaluation.max_sequences", self.max_sequences, 1)

    def is_due(self, step: int, last_step: int) -> bool:
        """Return True if a run of `last_step` steps evaluates the state after `step` updates."""
        if step == 0:
            return self.at_start
        return step % self.every_steps == 0 or step == last_step


DEFAULT_NUM_KEPT = 3
"""Checkpoints: the newest, the one before it, which may be in use by a reader, and one more."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """Durable checkpoints, and the snapshots in host memory and on local disk.

    Most recoveries are served from the snapshots.
    """

    storage: str | None = None
    """Storage of durable checkpoints: `s3://bucket/prefix`, `file://` or a shared directory.

    Every node must see the directory. null: runs/<job name>/checkpoints.
    """
    every_steps: int = 100
    """Steps between durable checkpoints; one more is made when the run ends or is told to stop.

    A checkpoint waits while the one before it is still being stored.
    """
    keep: int | Literal["all"] | None = None
    """Number of newest committed checkpoints that retention leaves; null: 3.

    `all`: every one; a search for the newest then lists them all.
    """
    keep_best: int | None = None
    """Number of checkpoints with the lowest evaluation loss that are kept beside the newest ones.

    A checkpoint has a loss if its own step was evaluated. null: none.
    """
    snapshot_every_steps: int = 1
    """Steps between snapshots to the node's host memory; 0: none."""
    replicate_every_steps: int | None = None
    """Fewest steps between two replication rounds; 0: none.

    A round copies the shards that one node alone holds from its snapshots to another node's host
    memory, and starts only after the previous round. null: 1, or 0 if `snapshot_every_steps` is 0.
    """
    replicate_bandwidth_share: float = 0.25
    """Fraction of a node's network bandwidth that these copies may take, in (0, 1]."""
    replicate_zone: Literal["same", "any", "other"] = "any"
    """Zone of the node that takes a copy.

    same: only the zone of the source node; any: that zone first, another if no node of it can take
    the copy; other: another zone first, so that the loss of a zone does not take the last copy.
    """
    replicate_usd_per_hour: float | None = None
    """Bound on the price of copies to other zones, in dollars an hour.

    Rounds of these copies are as far apart as the bound requires. 0: no such copies. null: 5% of
    the price of the fleet's nodes.
    """
    allow_changes: tuple[str, ...] = ()
    """Keys that decide the mathematics and may differ from the run whose checkpoint is resumed.

    Examples: `training.eps`, `model.pretrained`. A change of any other such key is refused.
    """
    memory_directory: str = f"/dev/shm/autohet-{os.getuid()}"
    """Directory of a node's snapshots in host memory (tmpfs).

    Directories are made for this user alone. The name has the user's id, so that the jobs of
    several users of one machine stay apart.
    """
    local_directory: str = f"/tmp/autohet-{os.getuid()}"
    """Directory to which a node spills snapshots on its own disk."""

    def __post_init__(self) -> None:
        require(
            self.storage != "",
            "checkpoint.storage is empty; give an s3:// URI or a directory, or leave it out",
        )
        require_at_least("checkpoint.every_steps", self.every_steps, 1)
        require_at_least("checkpoint.keep", self.num_kept, 1)
        require_at_least("checkpoint.keep_best", self.keep_best, 1)
        require(
            self.keep_best is None or self.keep != "all",
            f"checkpoint.keep_best is {self.keep_best}, but checkpoint.keep is all, which keeps"
            " every one; leave one out",
        )
        require_at_least("checkpoint.snapshot_every_steps", self.snapshot_every_steps, 0)
        require_at_least("checkpoint.replicate_every_steps", self.replicate_every_steps, 0)
        require(
            self.snapshot_every_steps > 0 or not self.replicate_every_steps,
            f"checkpoint.replicate_every_steps is {self.replicate_every_steps}, but"
            " checkpoint.snapshot_every_steps is 0: copies on other nodes are made from snapshots;"
            " make snapshots (1: after each step), or leave replicate_every_steps out",
        )
        for key in self.allow_changes:
            require(
                key.startswith(("model.", "training.", "data.")),
                f"checkpoint.allow_changes holds {key!r}; name keys of model, training or data,"
                " such as training.eps",
            )
        share = self.replicate_bandwidth_share
        require(
            0 < share <= 1,
            f"checkpoint.replicate_bandwidth_share is {share}, but must be in (0, 1]",
        )
        require(
            self.replicate_zone in ("same", "any", "other"),
            f"checkpoint.replicate_zone is '{self.replicate_zone}'; choose same, any or other",
        )
        require_at_least("checkpoint.replicate_usd_per_hour", self.replicate_usd_per_hour, 0)

    @property
    def num_kept(self) -> int | None:
        """Number of newest checkpoints that are kept; None: all."""
        if self.keep == "all":
            return None
        return DEFAULT_NUM_KEPT if self.keep is None else self.keep

    @property
    def replication_steps(self) -> int:
        """`replicate_every_steps`, given or derived."""
        given = self.replicate_every_steps
        return min(1, self.snapshot_every_steps) if given is None else given


@dataclass(frozen=True, kw_only=True)
class TrackerEntry:
    """A tracker with its project, name, group or tags.

    A key that is left out comes from the tracker's own environment variables (`WANDB_PROJECT`,
    `MLFLOW_EXPERIMENT_NAME`, ...), else from the job.
    """

    kind: str
    """`tensorboard`, `wandb` or `mlflow`."""
    project: str | None = None
    """Project of W&B, experiment of MLflow; null: `autohet`."""
    name: str | None = None
    """Name of the run; null: the job's name."""
    group: str | None = None
    """Group of W&B; in MLflow the tag `group`. null: none."""
    tags: tuple[str, ...] = ()
    """Tags of W&B; in MLflow tags with the value `true`."""

    def __post_init__(self) -> None:
        if self.kind != "tensorboard":
            return
        for key in ("project", "name", "group", "tags"):
            value = getattr(self, key)
            require(
                not value,
                f"trackers gives tensorboard the {key} {value!r}, which it does not have; leave it"
                " out",
            )


@dataclass(frozen=True, kw_only=True)
class EmulationSection:
    """EMULATION of GPU speeds on machines without GPUs: sleeps lengthen each forward and backward.

    With `profile`, an action of `gpu_type` takes that table's seconds times `scale`; otherwise a
    block's forward takes `block_forward_s * scale / relative_speed_by_gpu_type[gpu_type]` per
    sequence and its backward twice that.
    """

    profile: str | None = None
    """Path of a profile table, as `autohet profile` writes it; null: `relative_speed_by_gpu_type`.
    """
    scale: float = 1.0
    """Emulated seconds for each second of the profile."""
    relative_speed_by_gpu_type: dict[str, float] = field(default_factory=dict)
    """Speed of each GPU type, relative to a type of speed 1."""
    block_forward_s: float = 0.01
    """Seconds of one sequence's forward through one block at relative speed 1.

    Not used with `profile`.
    """
    memory_scale: float = 1.0
    """Emulated GPU memory for each byte of the type's real memory.

    Below 1, a small model meets the limits that a large one would meet.
    """

    def __post_init__(self) -> None:
        require_positive("emulation.scale", self.scale)
        require_positive("emulation.block_forward_s", self.block_forward_s)
        require_positive("emulation.memory_scale", self.memory_scale)
        for gpu_type, speed in self.relative_speed_by_gpu_type.items():
            require_positive(f"emulation.relative_speed_by_gpu_type.{gpu_type}", speed)
        require(
            (self.profile is None) != (not self.relative_speed_by_gpu_type),
            "emulation needs exactly one of profile and relative_speed_by_gpu_type",
        )


MAX_TRANSFER_SHARE = 0.05
"""Limit on the price of data between zones over that of the nodes, unless the job sets `max_zones`.
"""


@dataclass(frozen=True, kw_only=True)
class ParallelismSection:
    """Limits and wishes for the planner."""

    strategy: str = "autohet"
    """Name of the search that chooses the plan."""
    spmd: bool = False
    """Let `autohet` choose one SPMD program on uneven shares over pipelines, if that is faster."""
    microbatch_sequences: int | None = None
    """Sequences in a microbatch; null: the planner chooses."""
    max_tp_degree: int | None = None
    """Largest tensor-parallel degree; null: the largest that model and node allow."""
    max_pipeline_stages: int | None = None
    """Largest number of stages of a pipeline; null: the number of layers."""
    min_pipelines: int = 1
    """Fewest pipelines, each of which has one copy of the model.

    2: every shard has live holders on two nodes, so that one death costs no work. 1: a shard that
    one node alone holds is copied to another node in rounds.
    """
    redundancy: int = 1
    """Nodes that must hold each shard of the training state live.

    A shard that one node alone holds is copied to another unless `checkpoint.replicate_every_steps`
    is 0.
    """
    objective: Literal["time", "cost"] = "time"
    """Objective of the planner; time: least step time; cost: least money per token."""
    max_usd_per_hour: float | None = None
    """Bound on the price of the workers used, in dollars an hour; null: no bound."""
    max_zones: int | None = None
    """Limit on the zones that a plan may span.

    null: any number, if data between the zones costs at most 5% of the plan's nodes. With
    `objective: cost` the price per token decides instead.
    """
    compute_formats: Literal["auto", "off"] | dict[str, ComputeFormat] = "auto"
    """Number format in which each GPU type computes, in jobs of `training.precision: bf16`.

    auto: types without bf16 (T4, V100) compute in fp16. off: such types are left out. A mapping of
    GPU types to fp32, bf16, fp16 or fp8 names some; the others are as under auto. Only a mapping
    chooses fp8: products in 8 bits, on types that have such units. Masters, moments and gradient
    sums are fp32 in all of them, and weights that `model.adapter` leaves untrained are stored in
    bf16. Jobs with `parallelism.spmd` have one format.
    """
    expert_dispatch: Literal["auto", "sum", "all_to_all"] = "auto"
    """Way in which tokens reach their experts in a tensor-parallel group, for mixtures of experts.

    sum: each rank computes its experts for all tokens, and a sum over the group adds their outputs.
    all_to_all: each rank routes its part of the tokens and sends them to the owners of their
    experts. auto: the planner chooses for each stage by predicted time.
    """
    memory_reserve_bytes: int = 1 * GIB
    """Bytes of memory that the plan leaves free on each GPU.

    They cover context, library workspace and fragmentation; communicators are counted apart.
    """
    search_time_limit_s: float = 10.0
    """Time limit of one search for a plan, in seconds."""
    horizon_s: float | None = None
    """Seconds until the fleet is expected to change again; a move must earn its cost within them.

    null: estimated from a prior and from how long nodes of each type have lived in this run
    (autohet/driver/planning/outlook.py).
    """
    profile: str | None = None
    """Path of a profile table; null: the bundled measurements."""
    links: str | None = None
    """Path of a link table; null: labels and catalogue."""
    plan: str | None = None
    """Path of a plan to run as it is while all its workers are there; null: the planner chooses.

    It is refused if it keeps a layer on fewer nodes than `min_pipelines` or `redundancy` ask for.
    """

    def __post_init__(self) -> None:
        for name in (
            "microbatch_sequences",
            "max_tp_degree",
            "max_pipeline_stages",
            "min_pipelines",
            "max_zones",
        ):
            require_at_least(f"parallelism.{name}", getattr(self, name), 1)
        require_at_least("parallelism.redundancy", self.redundancy, 1)
        require_at_least("parallelism.memory_reserve_bytes", self.memory_reserve_bytes, 0)
        require_positive("parallelism.search_time_limit_s", self.search_time_limit_s)
        require_positive("parallelism.horizon_s", self.horizon_s)
        require_positive("parallelism.max_usd_per_hour", self.max_usd_per_hour)

    @property
    def named_formats(self) -> dict[str, ComputeFormat]:
        """Formats that `compute_formats` names, by GPU type as the job writes it."""
        return {} if isinstance(self.compute_formats, str) else self.compute_formats

    @property
    def max_transfer_share(self) -> float | None:
        """Limit on the price of data between zones, as a fraction of the price of a plan's nodes.

        None: no limit, since the job sets `max_zones` or its objective is not time.
        """
        asked = self.max_zones is not None or self.objective != "time"
        return None if asked else MAX_TRANSFER_SHARE
