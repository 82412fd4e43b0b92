"""The `model` section: the model, and the weights of it that are trained."""

from dataclasses import dataclass
from typing import Any, Literal

from autohet.runtime.job.requirements import require, require_at_least, require_positive

_DEFAULTS = {"rank": 16, "alpha": 32.0, "targets": "all-linear", "rslora": False}
"""Values of an adapter that begins anew."""


@dataclass(frozen=True, kw_only=True)
class AdapterSection:
    """Low-rank updates of a frozen model's linear maps (Hu et al. 2021): W x + s B A x."""

    kind: Literal["lora"] = "lora"
    """Kind of adapter: LoRA."""
    from_: str | None = None
    """Adapter to go on with, which `peft` or an export has written.

    A directory, `s3://bucket/prefix`, or a hub id (`org/name@revision`). Its rank, alpha and
    targets are taken; the job's are checked if given.
    """
    rank: int | None = None
    """Rank of the update: rows of A and columns of B; null: 16, or that of `from`."""
    alpha: float | None = None
    """Scale of the update: it is multiplied by alpha / rank; null: 32, or that of `from`."""
    targets: str | tuple[str, ...] | None = None
    """Linear maps that get an adapter; null: all of the blocks, or those of `from`.

    `all-linear`: all of them, also in a list with other names. Else those whose path ends in one of
    these names or matches it as a pattern (`q_proj`, `mlp.down_proj`, `*.self_attn.?_proj`).
    Embedding and head get one if they are named: `[all-linear, embed_tokens, lm_head]`.
    """
    modules_to_save: tuple[str, ...] = ()
    """Modules whose own weights are trained and stored with the adapter, such as `lm_head`.

    A name is the end of modules' paths, as in peft: `norm` is all norms. A tied head is trained
    with `embed_tokens`.
    """
    rslora: bool | None = None
    """Scale by alpha / sqrt(rank) instead (Kalajdzievski 2023); null: false, or as `from`."""
    base: Literal["nf4", "fp8", "bf16"] | None = None
    """Format in which the frozen base is held; null: `training.precision`, of which bf16 is one.

    nf4 (QLoRA): linear maps of the blocks in four bits with double quantization, as bitsandbytes
    has them, 0.52 bytes a weight. fp8: in eight bits, E4M3 with a scale a row, as torchao's
    weight-only fp8. Each product dequantizes its weight. Embedding, head, norms and routed experts
    stay in `training.precision`.
    """
    dropout: float = 0.0
    """Probability with which an element of an adapter's input is dropped in training.

    Which ones are dropped depends on `training.seed` and the sample, not on the plan. Evaluation
    drops nothing, nor do the objectives of preferences.
    """

    def __post_init__(self) -> None:
        for key, default in _DEFAULTS.items():
            if self.from_ is None and getattr(self, key) is None:
                object.__setattr__(self, key, default)
        if self.rank is not None:
            require_at_least("model.adapter.rank", self.rank, 1)
        if self.alpha is not None:
            require_positive("model.adapter.alpha", self.alpha)
        require(
            0 <= self.dropout < 1,
            f"model.adapter.dropout is {self.dropout}, but must be in [0, 1)",
        )
        require(
            self.targets is None or bool(self.targets),
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
    vocabulary_size: int | None = None
    """Tokens of the model, more than `pretrained` has; null: its own number.

    Each new token's row of embedding and head begins as the mean of all rows, as in transformers'
    `resize_token_embeddings`. With an adapter, name both in `adapter.modules_to_save`.
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
    drops nothing, nor do the objectives of preferences. false: all of them are 0.
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
        require(
            self.vocabulary_size is None or self.pretrained is not None,
            "model.vocabulary_size is for model.pretrained only; give model.config its vocab_size",
        )

    def keeps_reference(self, objective: str) -> bool:
        """Return True if a reference (DPO's) computes with trained parameters' first values.

        That of a new adapter alone is the model without it.
        """
        adapter = self.adapter
        is_own = adapter is not None and bool(adapter.from_ or adapter.modules_to_save)
        return objective == "dpo" and is_own
