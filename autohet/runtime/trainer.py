"""One worker's training in one generation: passes, gradient sums, the vote that commits a step, and the update.

A step is committed by all or by none. Its vote is one all-reduce over every worker; when it ends at anyone, everyone has contributed, so
everyone has its gradients summed: is *prepared*. A survivor that was interrupted before it saw the result can still apply the step with
the result that another survivor saw (`apply_prepared`), and must, since that one has applied it. The update itself talks to nobody.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from autohet.runtime.executor import Batch, Executor
from autohet.runtime.gradient_sync import GradientSync
from autohet.runtime.groups import GenerationGroups
from autohet.runtime.job import TrainingSection
from autohet.runtime.layout import state_name
from autohet.runtime.models import TensorParallel, build_stage
from autohet.runtime.models.stage import StageModel
from autohet.runtime.optimizer import clip_factor, update
from autohet.runtime.pacing import Pace, Pacer
from autohet.runtime.place import Place, place_of
from planner.plan import Plan

PHASES = ("forward", "backward", "gradient_sync", "vote", "apply")
COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}
PhaseHook = Callable[[str, int], None]


@dataclass(frozen=True)
class Vote:
    """What all workers' contributions to a step add up to. `tokens` counts targets; sums of losses and squares are the whole batch's."""

    squared_norm: float
    loss_sum: float
    tokens: int
    stops: int
    checkpoints: int

    @property
    def loss(self) -> float:
        return self.loss_sum / max(1, self.tokens)


@dataclass(frozen=True)
class StepResult:
    """A committed step. `gradient_norm` is before clipping; `parts_s` where this worker's time went."""

    step: int
    loss: float
    gradient_norm: float
    tokens: int
    seconds: float
    stop: bool
    checkpoint: bool
    applied: bool
    parts_s: Mapping[str, float] = field(default_factory=dict)


class StageTrainer:
    """Owns a stage, its optimizer state and its groups, for one generation. `train_step` is called from one thread.

    state: local slices of masters and moments by state name, updated in place. A step whose summed gradient is not finite is
    committed without an update, by all workers alike.
    """

    def __init__(
        self, config: PreTrainedConfig, plan: Plan, me: str, groups: GenerationGroups, training: TrainingSection, device: torch.device,
        state: dict[str, Tensor], step: int, pace: Pace | None = None, phase_hook: PhaseHook | None = None,
    ) -> None:  # fmt: skip
        place = place_of(plan, me)
        assert place is not None, f"{me} is not in the plan"
        self.place: Place = place
        self.plan, self.training, self.state, self.step = plan, training, state, step
        self.prepared: int | None = None
        self.last_vote: tuple[int, Vote] | None = None
        self.phase = "idle"
        self._hook = phase_hook
        self._device = device
        self._stop, self._checkpoint = threading.Event(), threading.Event()
        dtype = COMPUTE_DTYPE[training.precision]
        self._world = groups.group(plan.workers, "world")
        self._tp = self._tensor_parallel(groups)
        forward, backward = groups.group(plan.workers, "forward"), groups.group(plan.workers, "backward")
        self._sync = GradientSync(plan, config, me, groups)
        self.stage: StageModel = build_stage(config, place.stage.first_layer, place.stage.num_layers, self._tp, device, dtype, training.recompute == "full")
        self.stage.load_parameters({name.split("/", 1)[1]: tensor for name, tensor in state.items() if name.startswith("param/")})
        self._gradients = self._gradient_buffers()
        shape = (place.pipeline.microbatch_sequences, training.sequence_length, int(config.hidden_size))
        self._nominal_tokens = training.global_batch_sequences * training.sequence_length
        pacer = None if pace is None else Pacer(pace, lambda: groups.interrupted)
        self._executor = Executor(place, self.stage, forward, backward, shape, dtype, device, 1.0 / self._nominal_tokens, pacer)

    def _tensor_parallel(self, groups: GenerationGroups) -> TensorParallel | None:
        """Every worker builds the tensor-parallel groups that it is in, in plan order."""
        stage = self.place.stage
        if stage.tp_degree == 1:
            return None
        return TensorParallel(groups.group(stage.workers, "tensor"), self.place.tp_rank, stage.tp_degree)

    def _gradient_buffers(self) -> dict[str, Tensor]:
        """fp32 gradients by parameter name: the parameters' own where compute is fp32, else sums that each backward adds to."""
        parameters = self.stage.local_parameters()
        if all(p.dtype == torch.float32 for p in parameters.values()):
            for parameter in parameters.values():
                parameter.grad = torch.zeros_like(parameter)
            return {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
        buffers = {name: torch.zeros(p.shape, dtype=torch.float32, device=p.device) for name, p in parameters.items()}
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(_accumulate_into(buffers[name]))
        return buffers

    def request_stop(self, *, checkpoint: bool = False) -> None:
        """Any thread: all workers stop after the same step, the one whose vote next carries this worker's flag."""
        if checkpoint:
            self._checkpoint.set()
        self._stop.set()

    def train_step(self, batch: Callable[[int, range], Batch]) -> StepResult:
        """Run the next step; every worker of the plan calls it. Blocks.

        `batch(step, sequences)` gives tokens and targets of these positions of the step's global batch.

        Raises:
            PeerLost, Interrupted: the step is not committed here; `prepared` tells whether it can still be.
        """
        started = time.perf_counter()
        step = self.step
        for gradient in self._gradients.values():
            gradient.zero_()
        loss, num_targets = self._executor.run(lambda m: batch(step, self.place.sequences(m)), self._enter)
        passes_done = time.perf_counter()
        self._enter("gradient_sync")
        squares = self._sync.run(self._gradients)
        synced = time.perf_counter()
        self.prepared = step
        self._enter("vote")
        vote = self._cast_vote(squares, loss, num_targets)
        voted = time.perf_counter()
        applied = self.apply_prepared(vote)
        ended = time.perf_counter()
        parts = {
            "compute": passes_done - started - self._executor.wait_s, "wait": self._executor.wait_s, "gradient_sync": synced - passes_done,
            "vote": voted - synced, "optimizer": ended - voted,
        }  # fmt: skip
        norm = self._gradient_norm(vote)
        return StepResult(step, vote.loss, norm, vote.tokens, ended - started, vote.stops > 0, vote.checkpoints > 0, applied, parts)

    def _enter(self, phase: str) -> None:
        self.phase = phase
        if self._hook is not None:
            self._hook(phase, self.step)

    def _cast_vote(self, squares: Tensor, loss: Tensor, num_targets: int) -> Vote:
        """One all-reduce over all workers: it decides the step. Loss and tokens come from one rank of each last stage."""
        counts = self.place.is_last and self.place.tp_rank == 0
        mine = torch.zeros(5, dtype=torch.float64, device=self._device)
        mine[0] = squares
        mine[1], mine[2] = (loss.double(), num_targets) if counts else (0.0, 0.0)
        mine[3], mine[4] = float(self._stop.is_set()), float(self._checkpoint.is_set())
        self._world.wait_on_host(self._world.start_all_reduce(mine))
        totals = mine.tolist()
        return Vote(totals[0], totals[1], int(totals[2]), int(totals[3]), int(totals[4]))

    def _gradient_norm(self, vote: Vote) -> float:
        return math.sqrt(vote.squared_norm) * self._token_factor(vote) if vote.squared_norm >= 0 else math.nan

    def _token_factor(self, vote: Vote) -> float:
        """Gradients are of the loss sum over the nominal number of tokens; this makes them those of the mean over the counted ones."""
        return self._nominal_tokens / max(1, vote.tokens)

    def apply_prepared(self, vote: Vote) -> bool:
        """Apply the prepared step; talks to nobody. True if the weights changed (the gradient was finite)."""
        assert self.prepared == self.step, f"step {self.prepared} is prepared, {self.step} is next"
        self._enter("apply")
        norm = self._gradient_norm(vote)
        finite = math.isfinite(norm) and math.isfinite(vote.loss_sum)
        if finite:
            factor = self._token_factor(vote) * clip_factor(self.training, norm)
            update(self.state, self._gradients, self.training, self.step, factor)
            self.stage.refresh_parameters({name: self.state[state_name("param", name)] for name in self._gradients})
        self.last_vote = (self.step, vote)
        self.step += 1
        self.prepared = None
        self.phase = "idle"
        return finite


def _accumulate_into(buffer: Tensor) -> Callable[[Tensor], None]:
    """A hook that adds each backward's gradient to an fp32 sum and drops it."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        buffer.add_(parameter.grad)
        parameter.grad = None

    return hook


__all__ = ["PHASES", "StageTrainer", "StepResult", "Vote"]
