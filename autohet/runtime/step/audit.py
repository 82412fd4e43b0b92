"""Audit of all workers' arithmetic, in the vote of every N-th step.

Gradients of one layer are summed over its holders, so that wrong arithmetic of one device changes
the weights of all alike, and no comparison of replicas sees it. Therefore each worker computes one
of its blocks on drawn inputs (`models.stages.block_audit`). Holders of the layer on equal devices,
with equal slices, contribute their checksums to the vote as the replica check does: the sum is zero
if they are equal. If it is not, the step counts all the same. All workers then exchange checksums
of results and weights, and the outcome of exact products that each device computes again.

Holders on unlike devices round otherwise. Where a layer has some with equal slices, all workers
also exchange sketches of their results (`models.stages.sketches`), and those that lie further apart
than rounding explains differ too.

A worker is named if all other bits of its group are those of two or more workers, if its values
lie apart from those of all others, which are two or more and agree, or if it failed the exact
products. Of two holders that differ, nobody can tell which is wrong.

Not seen: a fault in a sum over workers or in the update.
"""

import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autohet.runtime.groups import Group
from autohet.runtime.job import TrainingSection
from autohet.runtime.messages import AuditCause, AuditMismatch, AuditRecord
from autohet.runtime.models.stages.block_audit import (
    MAX_TOKENS,
    BlockResult,
    audit_block,
    device_key,
    slice_key,
    weights_checksum,
)
from autohet.runtime.models.stages.sketches import NUM_VALUES, ceiling, find_far
from autohet.runtime.models.stages.stage import StageModel
from autohet.runtime.profiling.exact_products import has_exact_products
from autohet.runtime.step.replica_check import exact_mask, exchange, signed_part
from planner.plans.plan import Plan

PASSED = 1
FAILED = 2
"""Outcomes of exact products, as words of a table."""


@dataclass(frozen=True)
class AuditedDevice:
    """What a worker's results are compared by.

    key: of its device and slice; workers with equal keys get equal bits. slice_key: of its slice
    alone, 0 if its values are not compared. ceiling: largest distance of its values from others.
    """

    key: int
    slice_key: int = 0
    ceiling: float = 0.0


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
        self._devices: dict[str, AuditedDevice] = {}
        """Device of each worker; empty before the first audit."""
        self._result: BlockResult | None = None
        """Result of the step's audit; None: there is none to compare."""

    def is_due(self, step: int) -> bool:
        return step % self._training.audit_every == 0

    def _layers(self, step: int) -> dict[str, int]:
        return audited_layers(self._plan, step // self._training.audit_every)

    def run(self, step: int) -> None:
        """Compute this worker's block for the audit of `step`."""
        layer = self._layers(step)[self._me]
        is_known = bool(self._devices)
        self._result = audit_block(
            self._stage,
            layer,
            self._training.seed,
            step,
            self._length,
            sketched=not is_known or self._is_unlike(step),
        )

    def _is_unlike(self, step: int) -> bool:
        """Return True if this worker is compared with one on an unlike device."""
        groups = unlike_workers(self._layers(step), self._devices)
        return any(self._me in group for group in groups)

    def contribution(self, step: int) -> float:
        """Return this worker's integer for the vote of `step`; 0 if no audit is due.

        The sum over all workers is zero unless workers of a group differ. The first call of a
        generation exchanges the devices' keys, and blocks.
        """
        if not self.is_due(step):
            return 0.0
        if not self._devices:
            key = device_key(self._stage, self._compute, self._length)
            values = _words([ceiling(self._compute)])
            table = exchange(self._world, [key, slice_key(self._stage, self._length), *values])
            for worker, (key, part, most) in zip(self._world.members, table.tolist(), strict=True):
                self._devices[worker] = AuditedDevice(key, part, *_numbers([most]))
        return vote_part(self._groups(step), self._me, self._checksum)

    @property
    def _checksum(self) -> int | None:
        return None if self._result is None else self._result.checksum

    def _groups(self, step: int) -> list[tuple[str, ...]]:
        return comparable_workers(self._layers(step), self._devices)

    def settle(self, step: int, total: int) -> AuditRecord | None:
        """Return the outcome of the audit of `step`, the same at every worker; None: none was due.

        total: sum of all contributions. If it is not zero, this blocks for an exchange.
        """
        if not self.is_due(step):
            return None
        layers = self._layers(step)
        groups = self._groups(step)
        unlike = unlike_workers(layers, self._devices)
        far = self._find_far(unlike) if unlike else {}
        compared = {worker for group in [*groups, *unlike] for worker in group}
        record = AuditRecord(tuple(sorted(compared)))
        if not total and not far:
            return record
        spec = self._stage.spec
        products = PASSED if has_exact_products(spec.device, spec.dtype) else FAILED
        weights = weights_checksum(self._stage, layers[self._me])
        table = exchange(self._world, [self._checksum or 0, weights, products]).tolist()
        answers = dict(zip(self._world.members, table, strict=True))
        found = find_mismatches(step, layers, groups, answers)
        found += self._far_mismatches(step, far, answers, found)
        return replace(record, mismatches=found)

    def _find_far(self, groups: list[tuple[str, ...]]) -> dict[tuple[str, ...], tuple[str, ...]]:
        """Return the workers to name by group of unlike devices whose values lie apart.

        Blocks for an exchange of sketches.
        """
        mine = None if self._result is None else self._result.sketch
        table = exchange(self._world, _words(mine or [0.0] * NUM_VALUES)).tolist()
        rows = dict(zip(self._world.members, table, strict=True))
        found = {}
        for group in groups:
            sketches = {}
            for worker in group:
                numbers = _numbers(rows[worker])
                # A worker without a result has a row of zeros. One whose format overflows on the
                # drawn inputs is sound.
                if any(numbers) and all(map(math.isfinite, numbers)):
                    sketches[worker] = numbers
            ceilings = {worker: self._devices[worker].ceiling for worker in sketches}
            is_far, named = find_far(sketches, ceilings)
            if is_far:
                found[tuple(sketches)] = named
        return found

    def _far_mismatches(
        self,
        step: int,
        far: Mapping[tuple[str, ...], tuple[str, ...]],
        answers: Mapping[str, list[int]],
        known: tuple[AuditMismatch, ...],
    ) -> tuple[AuditMismatch, ...]:
        """Return what lies apart by values, and is not `known` by bits already."""
        layers = self._layers(step)
        explained = set[str]()
        for each in known:
            explained.update(each.workers if each.cause is AuditCause.WEIGHTS else each.named)
        found = []
        for group, named in far.items():
            if explained.intersection(group):
                continue
            # Weights of one format have equal bits, and formats of one ceiling are one.
            weights = {(self._devices[worker].ceiling, answers[worker][1]) for worker in group}
            formats = {most for most, _ in weights}
            cause = AuditCause.VALUES
            if len(weights) > len(formats):
                cause = AuditCause.WEIGHTS
                named = ()
            found.append(AuditMismatch(step, layers[group[0]], group, named, cause))
        return tuple(found)


def _words(numbers: Sequence[float]) -> list[int]:
    """Return the bits of numbers as words of a table."""
    return list(struct.unpack(f"={len(numbers)}Q", struct.pack(f"={len(numbers)}d", *numbers)))


def _numbers(words: Sequence[int]) -> tuple[float, ...]:
    return struct.unpack(f"={len(words)}d", struct.pack(f"={len(words)}q", *words))


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


def comparable_workers(
    layers: Mapping[str, int], devices: Mapping[str, AuditedDevice]
) -> list[tuple[str, ...]]:
    """Return the groups of two or more workers with equal layer and key, sorted by name."""
    return _grouped({worker: (layers[worker], devices[worker].key) for worker in layers})


def unlike_workers(
    layers: Mapping[str, int], devices: Mapping[str, AuditedDevice]
) -> list[tuple[str, ...]]:
    """Return the groups of workers with equal layer and slice that are not all of one key."""
    parts = {}
    for worker, layer in layers.items():
        device = devices[worker]
        if device.slice_key and device.ceiling:
            parts[worker] = (layer, device.slice_key)
    groups = _grouped(parts)
    return [group for group in groups if len({devices[each].key for each in group}) > 1]


def _grouped(parts: Mapping[str, tuple[int, int]]) -> list[tuple[str, ...]]:
    groups: dict[tuple[int, int], list[str]] = {}
    for worker in sorted(parts):
        groups.setdefault(parts[worker], []).append(worker)
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
