"""Audit of all workers' arithmetic, in the vote of every N-th step.

Gradients of one layer are summed over its holders, so that wrong arithmetic of one device changes
the weights of all alike, and no comparison of replicas sees it. Therefore each worker computes one
of its blocks on drawn inputs (`models.stages.block_audit`). Holders of the layer on equal devices,
with equal slices, contribute their checksums to the vote as the replica check does: the sum is zero
if they are equal. If it is not, the step counts all the same. All workers then exchange checksums
of results and weights, and the outcome of exact products that each device computes again.

A worker is named if all other bits of its group are those of two or more workers, or if it failed
the exact products. Of two holders that differ, nobody can tell which is wrong.

Not seen: a fault in a sum over workers, in the update, or in a message between stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

from autohet.runtime.groups import Group
from autohet.runtime.job import TrainingSection
from autohet.runtime.messages import AuditCause, AuditMismatch, AuditRecord
from autohet.runtime.models.stages.block_audit import (
    MAX_TOKENS,
    block_checksum,
    device_key,
    weights_checksum,
)
from autohet.runtime.models.stages.stage import StageModel
from autohet.runtime.profiling.exact_products import has_exact_products
from autohet.runtime.step.replica_check import exact_mask, exchange, signed_part
from planner.plans.plan import Plan

PASSED = 1
FAILED = 2
"""Outcomes of exact products, as words of a table."""


class Audit:
    """Audit of one worker; every worker of the plan has one.

    A step that is due calls `run` before its passes, `contribution` for its vote and `settle` after
    it; every worker calls them at the same steps.
    """

    def __init__(
        self, training: TrainingSection, plan: Plan, me: str, world: Group, stage: StageModel
    ) -> None:
        self._training = training
        self._plan = plan
        self._me = me
        self._world = world
        self._stage = stage
        self._length = min(training.sequence_length, MAX_TOKENS)
        (mine,) = (each for each in plan.stages if me in each.workers)
        self._compute = mine.compute or training.precision
        self._keys: dict[str, int] = {}
        """Key of each worker's device; empty before the first audit."""
        self._checksum: int | None = None
        """Result of the step's audit; None: there is none to compare."""

    def is_due(self, step: int) -> bool:
        return step % self._training.audit_every == 0

    def _layers(self, step: int) -> dict[str, int]:
        return audited_layers(self._plan, step // self._training.audit_every)

    def run(self, step: int) -> None:
        """Compute this worker's block for the audit of `step`."""
        layer = self._layers(step)[self._me]
        seed = self._training.seed
        self._checksum = block_checksum(self._stage, layer, seed, step, self._length)

    def contribution(self, step: int) -> float:
        """Return this worker's integer for the vote of `step`; 0 if no audit is due.

        The sum over all workers is zero unless workers of a group differ. The first call of a
        generation exchanges the devices' keys, and blocks.
        """
        if not self.is_due(step):
            return 0.0
        if not self._keys:
            key = device_key(self._stage, self._compute, self._length)
            table = exchange(self._world, [key])
            self._keys = dict(zip(self._world.members, table[:, 0].tolist(), strict=True))
        return vote_part(self._groups(step), self._me, self._checksum)

    def _groups(self, step: int) -> list[tuple[str, ...]]:
        return comparable_workers(self._layers(step), self._keys)

    def settle(self, step: int, total: int) -> AuditRecord | None:
        """Return the outcome of the audit of `step`, the same at every worker; None: none was due.

        total: sum of all contributions. If it is not zero, this blocks for an exchange.
        """
        if not self.is_due(step):
            return None
        layers = self._layers(step)
        groups = self._groups(step)
        compared = tuple(sorted(worker for group in groups for worker in group))
        if not total:
            return AuditRecord(compared)
        spec = self._stage.spec
        products = PASSED if has_exact_products(spec.device, spec.dtype) else FAILED
        weights = weights_checksum(self._stage, layers[self._me])
        table = exchange(self._world, [self._checksum or 0, weights, products]).tolist()
        answers = dict(zip(self._world.members, table, strict=True))
        return AuditRecord(compared, find_mismatches(step, layers, groups, answers))


def audited_layers(plan: Plan, number: int) -> dict[str, int]:
    """Return the layer that each worker of a plan computes in audit `number`.

    Layers between two neighbouring cuts of any pipeline have the same holders. Each worker takes
    its first such run of layers from that of the audit's number on, in circular order: all holders
    of that one take it, and after one audit for each run all of them were compared.
    """
    cuts = sorted({cut for stage in plan.stages for cut in (stage.first_layer, stage.end_layer)})
    runs = [range(begin, end) for begin, end in pairwise(cuts)]
    turn, first = divmod(number, len(runs))
    found: dict[str, int] = {}
    for stage in plan.stages:
        for run in runs[first:] + runs[:first]:
            if stage.first_layer <= run.start and run.stop <= stage.end_layer:
                found |= dict.fromkeys(stage.workers, run[turn % len(run)])
                break
    return found


def comparable_workers(layers: Mapping[str, int], keys: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return the groups of two or more workers with equal layer and key, sorted by name."""
    groups: dict[tuple[int, int], list[str]] = {}
    for worker in sorted(layers):
        groups.setdefault((layers[worker], keys[worker]), []).append(worker)
    return [tuple(group) for group in groups.values() if len(group) > 1]


def vote_part(groups: list[tuple[str, ...]], me: str, checksum: int | None) -> float:
    """Return a worker's integer for the vote; 0 if it is in no group."""
    mask = exact_mask(len(group) for group in groups)
    for group in groups:
        if me in group:
            return float(signed_part(group, me, (checksum or 0) & mask))
    return 0.0


def find_mismatches(
    step: int,
    layers: Mapping[str, int],
    groups: list[tuple[str, ...]],
    answers: Mapping[str, list[int]],
) -> tuple[AuditMismatch, ...]:
    """Return what differs, from each worker's checksums of result (0: none) and weights, and PASSED
    or FAILED.
    """
    found = []
    for worker, (_, _, products) in answers.items():
        if products == FAILED:
            cause = AuditCause.PRODUCTS
            found.append(AuditMismatch(step, layers[worker], (worker,), (worker,), cause))
    for group in groups:
        results = {worker: answers[worker][0] for worker in group if answers[worker][0]}
        if len(set(results.values())) < 2:
            continue
        cause = AuditCause.ARITHMETIC
        named = find_wrong(results)
        if len({answers[worker][1] for worker in results}) > 1:
            cause = AuditCause.WEIGHTS
            named = ()
        layer = layers[group[0]]
        found.append(AuditMismatch(step, layer, tuple(results), named, cause))
    return tuple(found)


def find_wrong(results: Mapping[str, int]) -> tuple[str, ...]:
    """Return the workers whose result differs from the one that two or more have.

    Empty if no two agree, or several pairs do: devices that are wrong do not agree by chance.
    """
    counts = Counter(results.values())
    shared = [value for value, count in counts.items() if count > 1]
    if len(shared) != 1:
        return ()
    return tuple(worker for worker, value in results.items() if value != shared[0])
