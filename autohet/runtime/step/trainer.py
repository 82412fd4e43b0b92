"""Training of one worker in one generation of a plan of pipelines.

A step runs passes, gradient sums and the update, and is committed as in `step_commit`.
"""

import logging
from collections import ChainMap
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from autohet.runtime.facts.layout import FROZEN, state_name
from autohet.runtime.groups import Interrupted, PeerLost
from autohet.runtime.groups.gate import Gate
from autohet.runtime.models.stages.stage import StageModel
from autohet.runtime.parallel.borders import Borders, HiddenStates
from autohet.runtime.parallel.compute_weights import ComputeWeights
from autohet.runtime.parallel.executor import Batch, Executor
from autohet.runtime.parallel.gradient_sync import GradientSync
from autohet.runtime.parallel.host_staging import HostStaging, use_cores
from autohet.runtime.parallel.message_sums import MessageSums
from autohet.runtime.parallel.overlap import sums_have_one_order
from autohet.runtime.parallel.place import Deal
from autohet.runtime.parallel.preference import LOSSES
from autohet.runtime.parallel.stage_dtypes import StageDtypes, scales_gradients
from autohet.runtime.state.flat_optimizer import FlatOptimizer
from autohet.runtime.state.optimizer import UpdateRule, clip_factor, parameters_without_decay
from autohet.runtime.step.audit import Audit
from autohet.runtime.step.batches import EvaluationRows
from autohet.runtime.step.generation import NO_HOOKS, TrainerHooks, TrainingSetup, WorkerGeneration
from autohet.runtime.step.pacing import Pacer
from autohet.runtime.step.replica_check import ReplicaCheck
from autohet.runtime.step.row_count import RowCount
from autohet.runtime.step.stage_parts import StageGroups, StageParts
from autohet.runtime.step.step_commit import KeptPasses, Trainer
from autohet.runtime.step.votes import Vote

logger = logging.getLogger("autohet.worker")


class StageTrainer(Trainer):
    """Owner of a stage, its optimizer state and its groups, for one generation.

    A step gathers compute weights that others own (`_weights`), runs the stage's passes
    (`_executor` over `stage`) and sums gradients over their holders (`gradient_sync`). Once it is
    committed, the step updates masters and moments (`_optimizer`) and the compute weights.

    parts: parts that were built ahead; None: they are built now.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        generation: WorkerGeneration,
        hooks: TrainerHooks = NO_HOOKS,
        parts: StageParts | None = None,
    ) -> None:
        plan = generation.plan
        me = generation.worker
        back_end = generation.groups.back_end
        parts = parts or StageParts.build(setup, plan, generation.groups)
        self.parts = parts
        place = parts.place
        self.plan = plan
        self.place = place
        precision = setup.training.precision
        dtypes = parts.dtypes
        self._begins = setup.begins
        self._length_work = setup.length_work
        self._relative_works: list[float] = []
        """Work of each microbatch of the last step."""
        groups = parts.groups or StageGroups.build(plan, generation.groups, place)
        counts_loss = place.is_last and place.tp_rank == 0
        super().__init__(setup, generation, hooks, groups.world, counts_loss=counts_loss)
        self._rows = RowCount()
        self.voter.rows = self._rows
        self._messages = MessageSums(setup.device)
        self.voter.messages = self._messages
        if scales_gradients(plan, precision):
            self.loss_scale = generation.loss_scale
        self.stage = parts.stage
        local = parts.local
        staging = None
        if plan.offloads:
            staging = HostStaging(setup.device)
            if setup.device.type == "cuda":
                use_cores(plan, me)
        # It lays the state out anew, so it comes before gradients and compute copies take memory.
        undecayed = parameters_without_decay(setup.training, local.specs)
        self._optimizer = FlatOptimizer(local, self.state, undecayed, staging)
        self._weights = ComputeWeights(
            local, generation.groups, self.state, dtypes, setup.device, staging=staging
        )
        self._before_passes: dict[str, tuple[Any, Any]] = {}
        """Marks of the stream around what the last step did before its passes, by part."""
        self.stage.weights.load({**generation.frozen, **self._weights.tensors})
        self._has_dropout = self.stage.dropout.drops
        overlap = setup.overlap
        if overlap is None:
            most = back_end.max_sync_groups(plan)
            overlap = not back_end.in_stream_order or sums_have_one_order(plan, setup.config, most)
        self._executor = self._build_executor(setup, generation, groups, dtypes)
        self.gradient_sync = GradientSync(
            local,
            generation.groups,
            self.stage.weights.local_parameters(),
            overlap=overlap,
            scaled=self._executor.scaled,
        )
        self.gate: Gate | None = None
        """Gate of each step's sums; None: they start as soon as they can."""
        if generation.groups.gated:
            self.gate = Gate(groups.world)
            self.gradient_sync.may_sum = self.gate.is_open
        self._resumed: tuple[KeptPasses, Deal] | None = None
        """Passes that the next step has already, and the rows that it lacks."""
        if setup.training.replica_check_steps:
            reload = partial(_reload_frozen, generation, self.stage)
            weights = {state_name(FROZEN, name): held for name, held in generation.frozen.items()}
            state = ChainMap(self.state, weights)
            every = setup.training.replica_check_steps
            self.replicas = ReplicaCheck(parts.compare, state, groups.world, every, reload)
        # A family may bring stages of its own, as all workers see alike.
        if setup.training.audit_every and isinstance(self.stage, StageModel):
            self.audit = Audit(setup.training, plan, me, groups.world, self.stage)

    def _build_executor(
        self,
        setup: TrainingSetup,
        generation: WorkerGeneration,
        groups: StageGroups,
        dtypes: StageDtypes,
    ) -> Executor:
        pace = generation.pace
        over = generation.groups
        shape = (
            self.place.pipeline.microbatch_sequences,
            setup.training.sequence_length,
            int(setup.config.hidden_size),
        )
        hidden = HiddenStates(shape, dtypes.compute, setup.device)
        crossing = dtypes.before, dtypes.after
        borders = Borders(
            self.place,
            groups.forward,
            groups.backward,
            groups.tensor,
            hidden,
            crossing,
            self._messages,
        )
        pacer = None if pace is None else Pacer(pace, lambda: over.interrupted)
        beta = setup.training.preference_beta
        if beta is not None:
            loss = LOSSES[setup.training.objective]
            self.voter.preference = loss(beta, setup.device)
            trained = self.stage.weights.local_parameters()
            first = {name: generation.frozen[name] for name in trained if name in generation.frozen}
            self.voter.preference.first_weights = first
        return Executor(borders, self.stage, pacer, over.check, self._clock, self.voter.preference)

    def resume(self, kept: KeptPasses, rest: Deal) -> None:
        """Let the next step go on from these passes, with the rows that they lack."""
        assert kept.step == self.step, f"passes of step {kept.step} for step {self.step}"
        self._resumed = kept, rest

    def _gradients_of(
        self, batch: Callable[[int, range], Batch]
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Any, Any, Any]]:
        self._gather_weights()
        self._run_audit()
        begin = self._clock.mark()
        self.gradient_sync.begin()
        self._begin_scaled()
        self._relative_works = []
        self._rows.clear()
        self._messages.clear()
        resumed = self._resumed
        # If the step is repeated, it is run from its start.
        self._resumed = None
        executor = self._executor
        place = self.place
        if resumed is not None:
            kept, rest = resumed
            self.gradient_sync.add(kept.gradients)
            executor = executor.dealt(rest)
            self.place = executor.place
        loss, num_targets = self._run_passes(executor, batch)
        self._executor.computed = executor.computed
        self.place = place
        if resumed is not None:
            kept.add_to(self.voter, self._overflows())
            loss = loss + kept.loss
            num_targets = num_targets + kept.num_targets
        passes_done = self._clock.mark()
        if self.gate is not None:
            self._enter("gate")
            try:
                self.gate.wait()
            except (Interrupted, PeerLost):
                if resumed is None:
                    self.kept = KeptPasses(
                        self.step,
                        self.gradient_sync,
                        loss,
                        num_targets,
                        self.voter,
                        self._overflows(),
                    )
                raise
        self._enter("gradient_sync")
        squares = self.gradient_sync.finish()
        marks = (begin, passes_done, self._clock.mark())
        return squares, loss, num_targets, marks

    def _run_passes(
        self, executor: Executor, batch: Callable[[int, range], Batch]
    ) -> tuple[Tensor, Tensor]:
        """Return this worker's losses and targets of the rows that its place has."""
        step = self.step

        def microbatch(m: int) -> Batch:
            sequences = self.place.sequences(m)
            self._rows.add(sequences)
            return batch(step, sequences)

        def announce_last() -> None:
            self.gradient_sync.last_backward()
            if self.gate is not None:
                self.gate.announce()

        return executor.run(
            microbatch,
            self._enter,
            before_last_backward=announce_last,
            begins=None if self._begins is None else self._microbatch_begins,
            before_forward=self._draw_dropout if self._has_dropout else lambda m: None,
        )

    def _begin_scaled(self) -> None:
        """Let this stage compute gradients with the step's scale; no-op unless it is in fp16."""
        scaled = self._executor.scaled
        if scaled is None:
            return
        assert self.loss_scale is not None
        factor = self.loss_scale.factor
        scaled.begin(factor)
        if self.stage.loss_terms.gradient_scale != factor:
            self.stage.loss_terms = replace(self.stage.loss_terms, gradient_scale=factor)

    def _overflows(self) -> Tensor | None:
        scaled = self._executor.scaled
        return None if scaled is None else scaled.overflows

    def _draw_dropout(self, m: int) -> None:
        """Draw the dropout of microbatch m, by the positions of its rows in the run."""
        first = self.training.first_row(self.step)
        samples = [first + place for place in self.place.sequences(m)]
        self.stage.dropout.draw(self.training.seed, samples)

    def _before_evaluation(self) -> None:
        self._gather_weights()

    def _evaluate_batch(self, rows: EvaluationRows, index: int) -> tuple[Tensor, Tensor]:
        # The first microbatches have rows; those without any are not run.
        present = rows.num_in_batch(index)
        count = 0
        for sequences in self.place.deal.microbatches:
            if sequences.start < present:
                count += 1
        self._rows.clear()
        self._messages.clear()

        def batch(m: int) -> Batch:
            sequences = self.place.sequences(m)
            self._rows.add(range(sequences.start, min(sequences.stop, present)))
            return rows.batch(index, sequences)

        begins = None
        if rows.isolated:
            begins = partial(self._evaluation_part, rows.begins, index)
        return self._executor.evaluate(batch, count, begins)

    def _evaluation_part(self, read: Callable[[int, range], Any], index: int, m: int) -> Any:
        """Call `read` on the rows of microbatch m of a global batch of evaluation rows."""
        return read(index, self.place.sequences(m))

    def _microbatch_begins(self, m: int) -> Tensor:
        assert self._begins is not None
        begins = self._begins(self.step, self.place.sequences(m))
        if self._length_work is not None:
            self._relative_works.append(self._length_work.relative(begins))
        return begins

    @property
    def relative_work(self) -> float:
        works = self._relative_works
        if not works:
            return 1.0
        return sum(works) / len(works)

    def _gather_weights(self) -> None:
        """Gather the compute weights that other workers own; no-op unless state is sharded.

        It runs before the passes, not after the update, so that the update does not communicate and
        a worker lost here costs no committed step.
        """
        if self._weights.are_gathered:
            self._enter("gather")
            before = self._clock.mark()
            self._weights.gather()
            self._before_passes["gather"] = (before, self._clock.mark())

    def _run_audit(self) -> None:
        """Compute the step's audit, where a pipeline's later stages wait anyway."""
        self._before_passes.pop("audit", None)
        if self.audit is not None and self.audit.is_due(self.step):
            before = self._clock.mark()
            self.audit.run(self.step)
            self._before_passes["audit"] = (before, self._clock.mark())

    def _parts(self, started: float, voted: float, marks: tuple[Any, Any, Any]) -> dict[str, float]:
        parts = super()._parts(started, voted, marks)
        for part, marks_of_part in self._before_passes.items():
            parts[part] = self._clock.seconds(*marks_of_part)
            # The vote's part is what no other part explains, so far including these.
            parts["vote"] = max(0.0, parts["vote"] - parts[part])
        return parts

    @property
    def compute_s(self) -> float:
        return self._executor.compute_s

    def apply_update(self, vote: Vote) -> None:
        factor = clip_factor(self.training, vote.gradient_norm) / max(1, vote.num_losses)
        rule = UpdateRule(self.training, self.step, factor)
        self._optimizer.update(self.gradient_sync.flats, rule)
        self._weights.refresh()

    def _bad_gradients(self) -> tuple[str, ...]:
        return self.gradient_sync.not_finite()

    def rebuild_derived(self, names: Collection[str]) -> None:
        if any(name.startswith("param/") for name in names):
            self._weights.refresh()


def _reload_frozen(generation: WorkerGeneration, stage: StageModel, names: Collection[str]) -> None:
    """Read frozen weights from their origin again, also into the stage's copies of them."""
    generation.reload_frozen(names)
    stage.weights.renew_copies({name: generation.frozen[name] for name in names})
