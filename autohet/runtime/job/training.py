"""The `training` section: batch, learning rate, optimizer and numerics of the steps."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from autohet.runtime.job.requirements import (
    require,
    require_at_least,
    require_effect,
    require_positive,
)
from planner.plans.plan import Recompute

DEFAULT_BETA = 0.1
BETAS = {"dpo": "dpo_beta", "orpo": "orpo_beta"}
"""Key of the strength of each objective that is trained on preferences."""


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    """Batch, length, learning rate, optimizer and numerics of the training steps."""

    global_batch_sequences: int
    """Sequences in one optimizer step, independent of the fleet."""
    sequence_length: int
    """Tokens in a sequence."""
    row_offset: int = 0
    """Rows of the sample order before the batch of step 0, which are not trained on.

    A run that goes on with another `global_batch_sequences` sets it (also below 0) so that its next
    batch begins at the row that it has come to.
    """
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

    Sums are those of gradients over microbatches, holders and the head's chunks of positions.
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
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw: AdamW for all parameters. muon: Muon (Jordan et al. 2024) for the matrices of blocks.

    A matrix is a weight as the library stores it, and each expert's in a stack of experts; AdamW
    updates embedding, head, norms, biases and vectors. Muon keeps one moment instead of two. Each
    matrix is updated by one worker, so its state is sharded in all plans.
    """
    muon_learning_rate: float | None = None
    """Learning rate of Muon's matrices at the end of the warm-up; null: `learning_rate`.

    It follows `schedule` too.
    """
    muon_momentum: float = 0.95
    """Muon's momentum, which is Nesterov's."""
    muon_adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of the learning rate of a matrix (rows, columns), as `adjust_lr_fn` of
    `torch.optim.Muon`.

    match_rms_adamw: 0.2 sqrt(max(rows, columns)), with which rates and decays of AdamW are good for
    Muon too (Liu et al. 2025). original: sqrt(max(1, rows / columns)); a usual rate is 0.02.
    """
    muon_exempt: tuple[str, ...] = ()
    """Names of further parameters for AdamW, such as routers; * stands for any part."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the first and the second moment."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay, applied as torch.optim.AdamW and torch.optim.Muon do."""
    no_decay: Literal["norms_and_biases", "none"] | tuple[str, ...] = "norms_and_biases"
    """Parameters without weight decay.

    norms_and_biases: norms and biases, as `transformers.Trainer` chooses them; none: no parameter.
    Else a list of parameter names, in which * stands for any part.
    """
    warmup_steps: float = 0
    """Steps over which the learning rate rises linearly from 0; below 1: a share of all steps."""
    decay_steps: int | None = None
    """Step at which the schedule reaches its end; null: `steps`."""
    stable_steps: int | None = None
    """Steps of `wsd` at the full rate, between warm-up and decay; null: until the last tenth."""
    min_learning_rate_ratio: float | None = None
    """Final rate of `cosine`, `linear` and `wsd`, as a fraction of `learning_rate`.

    null: 0, as in transformers; 0.1 if `schedule` is null.
    """
    objective: Literal["cross_entropy", "dpo", "orpo"] = "cross_entropy"
    """Loss that is trained on.

    cross_entropy: the next token's. The others are of `data.kind: preference`. dpo: direct
    preference optimization (Rafailov et al. 2023), by adapters; its reference is the model without
    them. orpo: the cross entropy of prompt and chosen answer with a term of the odds of both
    answers (Hong et al. 2024), each averaged over its tokens; it has no reference.
    """
    dpo_beta: float | None = None
    """Strength of DPO's tie to its reference; null: 0.1."""
    orpo_beta: float | None = None
    """Weight of ORPO's term of odds (lambda in the paper); null: 0.1."""
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
    recompute: Literal["none", "selective", "full", "offload", "auto", "if_needed"] = "auto"
    """Recomputation of a block's activations in the backward pass.

    none: all are kept; selective: all but matrix products and fused attention are recomputed; full:
    all are recomputed from the block's input; offload: the same, and inputs lie in host memory
    between the passes, to which they are copied beside them. auto: the planner chooses for each
    stage, where it is clearly faster or nothing fits without, offload only if nothing else fits and
    never on the CPU; if_needed: all only if nothing fits without.
    """
    optimizer_sharding: Literal["off", "auto", "if_needed"] = "auto"
    """Sharding of masters and moments over the holders of a layer (ZeRO-1).

    A sharded master or moment has no second live holder. off: never. auto: the planner chooses,
    where it is clearly faster or nothing fits without; if_needed: only if nothing fits without. If
    `recompute` or `optimizer_sharding` is if_needed, an auto of the other means that too.
    """
    offload: Literal["off", "optimizer", "if_needed"] = "if_needed"
    """Keep masters and moments in host memory and update them there, by the same arithmetic.

    Copies and the host's update make each step longer. optimizer: in every plan of the planner.
    if_needed: only if no plan fits the GPUs otherwise, and never on the CPU.
    """
    compile_blocks: bool | Literal["auto"] = "auto"
    """Compile each transformer block by torch.compile: slower first steps, faster ones after.

    Compiled code is kept as long as the worker's process, so generations with equal shapes share
    it. Attention, and what tensor-parallel ranks exchange, run between its compiled parts. auto:
    compile on GPUs where code can be compiled.
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
    audit_every: int = 20
    """Steps between two audits of the devices' arithmetic; 0: never.

    In an audit each worker computes one block on drawn inputs, and workers on equal devices compare
    the bits in the step's vote. `elastic.on_corruption` says what follows.
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
        if self.router_balance != "sequence":
            return 0.0
        return self.router_balance_weight

    @property
    def stage_recompute(self) -> Recompute:
        """Recomputation of stages for which the plan sets none."""
        if self.recompute == "auto" or self.recompute == "if_needed":
            return "none"
        return self.recompute

    @property
    def preference_beta(self) -> float | None:
        """Beta of an objective of preferences; None: another objective."""
        if self.objective not in BETAS:
            return None
        beta: float | None = getattr(self, BETAS[self.objective])
        return DEFAULT_BETA if beta is None else beta

    @cached_property
    def floor_ratio(self) -> float:
        """`min_learning_rate_ratio`, given or by schedule."""
        if self.min_learning_rate_ratio is not None:
            return self.min_learning_rate_ratio
        return 0.1 if self.schedule is None else 0.0

    def first_row(self, step: int) -> int:
        """Return the place in the sample order at which a step's batch begins."""
        # A run may fall back to a step before that at which its batch became larger.
        return max(0, self.row_offset + step * self.global_batch_sequences)

    def last_step(self, num_rows: int) -> int | None:
        """Return the steps of the whole run over a data set of `num_rows` rows.

        None: the job has no bound, or the bound depends on rows that are not counted yet (0).
        """
        if self.max_epochs is None:
            return self.steps
        if not num_rows:
            return None
        rows_left = self.max_epochs * num_rows - self.row_offset
        by_epochs = math.ceil(rows_left / self.global_batch_sequences)
        if self.steps is None:
            return by_epochs
        return min(self.steps, by_epochs)

    def with_rows(self, num_rows: int) -> "TrainingSection":
        """Return the section with `max_epochs` converted to steps, once the rows are counted."""
        if self.max_epochs is None or not num_rows:
            return self
        return replace(self, steps=self.last_step(num_rows), max_epochs=None)

    def wsd_decay(self, end: int) -> int:
        """Return the number of steps over which `wsd` falls to its floor, reached at step `end`."""
        if self.stable_steps is None:
            return -(-end // 10)
        return max(0, end - int(self.warmup_steps) - self.stable_steps)

    def skips(self, step: int) -> bool:
        """Return True if `skip_steps` contains this step."""
        return any(first <= step <= last for first, last in self.skip_steps)

    def __post_init__(self) -> None:
        require_at_least("training.global_batch_sequences", self.global_batch_sequences, 1)
        require_at_least("training.sequence_length", self.sequence_length, 1)
        require_at_least("training.steps", self.steps, 1)
        require_positive("training.max_epochs", self.max_epochs)
        self._resolve_warmup()
        require_at_least("training.weight_decay", self.weight_decay, 0)
        require_at_least("training.learning_rate", self.learning_rate, 0)
        require_at_least("training.muon_learning_rate", self.muon_learning_rate, 0)
        require(
            0 <= self.muon_momentum < 1,
            f"training.muon_momentum is {self.muon_momentum}, but must be in [0, 1)",
        )
        require_at_least("training.seed", self.seed, 0)
        require_at_least("training.replica_check_steps", self.replica_check_steps, 0)
        require_at_least("training.audit_every", self.audit_every, 0)
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
        self._check_effects()
        self._check_objective()
        self._check_schedule()

    def _check_effects(self) -> None:
        is_muon = self.optimizer == "muon"
        for key in ("learning_rate", "momentum", "adjust", "exempt"):
            require_effect(self, f"training.muon_{key}", is_muon, "training.optimizer: muon")
        for key, value in (("offload", "optimizer"), ("optimizer_sharding", "off")):
            require(
                not is_muon or getattr(self, key) != value,
                f"training.{key} is {value}, but training.optimizer is muon, whose matrices have"
                f" one owner each, on a GPU; leave {key} out, or set training.optimizer: adamw",
            )
        balance = self.router_balance
        for key, needed in (("router_balance_weight", "sequence"), ("router_bias_speed", "bias")):
            require_effect(
                self, f"training.{key}", balance == needed, f"training.router_balance: {needed}"
            )
        decays = self.weight_decay > 0 or self.no_decay == "none"
        require_effect(self, "training.no_decay", decays, "a training.weight_decay above 0")

    def _check_objective(self) -> None:
        is_preference = self.objective in BETAS
        for objective, key in BETAS.items():
            beta = getattr(self, key)
            require_positive(f"training.{key}", beta)
            require(
                self.objective == objective or beta is None,
                f"training.{key} is {beta}, but training.objective is {self.objective}; set"
                f" training.objective: {objective}, or leave {key} out",
            )
        for key in ("label_smoothing", "z_loss", "router_balance"):
            value = getattr(self, key)
            require(
                value in (0, "none") or not is_preference,
                f"training.{key} is {value}, but training.objective is {self.objective}, whose loss"
                " has no such term; leave one out",
            )

    def _resolve_warmup(self) -> None:
        """Convert a share to steps as transformers does, once the schedule's steps are known."""
        warmup = self.warmup_steps
        require_at_least("training.warmup_steps", warmup, 0)
        require(
            warmup < 1 or warmup == int(warmup),
            f"training.warmup_steps is {warmup}; give a number of steps, or a share below 1",
        )
        end = self.decay_steps or (None if self.max_epochs else self.steps)
        if warmup < 1 and end:
            warmup = math.ceil(warmup * end)
        if warmup == int(warmup):
            object.__setattr__(self, "warmup_steps", int(warmup))

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
            value = getattr(self, key)
            require(
                not endless or value is None,
                f"training.{key} is {value}, but training.schedule is {self.schedule},"
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
