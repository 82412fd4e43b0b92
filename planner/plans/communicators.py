"""Number of communicators that a plan needs on each GPU, and the worker groups of gradient sync.

Every communicator takes memory on its device (`COMMUNICATOR_BYTES`) and time to create. If each
pipeline of a plan is cut differently, a worker has other partners for almost every layer: 8 to 30
sets of holders at 64 GPUs. Beyond a limit, sets are therefore merged into common supersets. Workers
of a superset that hold nothing of a bucket contribute zeros.
"""

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from planner.plans.plan import Plan, Stage

MAX_COMMUNICATORS = 8
"""Limit on the communicators of one worker.

They are the generation's world, `num_border_groups`, the tensor-parallel group, and groups for
gradient sync, which get the rest.
"""
COMMUNICATOR_BYTES = 512 * 2**20
"""Device memory of one; measured by others: 544 to 688 MB on 4 A100 (NVIDIA/nccl issue 964); linear
in its channels.
"""
LEAST_OF_A_GROUP = 5
"""Minimum number of communicators of a worker that shares its stage with others.

They are the generation's world, two for borders, the stage's group, and the group that sums
gradients of uncut tensors.
"""
MOSTLY = 3
"""Minimum number of communicators of a worker alone in its stage: the world and two for borders.

The only worker of a whole plan has none.
"""

Members = tuple[str, ...]


def workers_of_unit(stage: Stage, unit: int, units: int) -> tuple[str, ...]:
    """Return the workers of a stage that hold unit `unit` of a tensor cut into `units` units.

    That is one worker, or several if the stage has more workers than units.
    """
    if stage.tp_shares:
        found = []
        for rank, worker in enumerate(stage.workers):
            if unit in stage.share(rank).units(units):
                found.append(worker)
        return tuple(found)
    first = unit * stage.tp_degree // units
    end = (unit + 1) * stage.tp_degree // units
    # with more units than workers, `end` may be `first`: one worker then holds several units
    return stage.workers[first : max(first + 1, end)]


def holder_sets(plan: Plan, *, tied: bool, key_value_units: int = 0) -> Counter[Members]:
    """Count the slices that each set of two or more workers holds together.

    Keys are the sorted names of the workers, values the number of slices (of blocks, embedding and
    head). A tensor is cut into as many slices as the stage with the most parts has; an uncut tensor
    lies on all ranks.

    tied: the embedding is the head's tensor too.
    key_value_units: number of slices of keys and values, if these are cut into fewer than a stage
    has workers (`planner.plans.model_spec.LayerSpec`).
    """
    slices = plan.num_parts
    first = plan.first_stages
    last = plan.last_stages
    blocks = _stages_by_block(plan)

    found: Counter[Members] = Counter()
    if tied:
        _count_slices(found, first + last, slices)
    for stages in (first, last, *blocks):
        _count_slices(found, stages, slices)
    if 0 < key_value_units < slices:
        for stages in blocks:
            for unit in range(key_value_units):
                found[_holders(stages, unit, key_value_units)] += 1

    shared: Counter[Members] = Counter()
    for members, count in found.items():
        if len(members) > 1:
            shared[members] = count
    return shared


def _stages_by_block(plan: Plan) -> list[list[Stage]]:
    """Return the stages that hold each block, one of each pipeline."""
    num_blocks = max(stage.end_layer for stage in plan.last_stages)
    found = []
    for block in range(num_blocks):
        stages = []
        for pipeline in plan.pipelines:
            stage = pipeline.stage_of(block)
            assert stage is not None
            stages.append(stage)
        found.append(stages)
    return found


def _count_slices(found: Counter[Members], stages: Sequence[Stage], slices: int) -> None:
    """Count the holders of what `stages` hold together: of uncut tensors, and of each slice."""
    everyone = set[str]()
    for stage in stages:
        everyone.update(stage.workers)
    found[tuple(sorted(everyone))] += 1
    for index in range(slices):
        found[_holders(stages, index, slices)] += 1


def _holders(stages: Sequence[Stage], unit: int, units: int) -> Members:
    """Return the workers of these stages that hold unit `unit` of `units`, sorted."""
    found = set[str]()
    for stage in stages:
        found.update(workers_of_unit(stage, unit, units))
    return tuple(sorted(found))


def merged_groups(weights: Mapping[Members, float], most: int | None) -> dict[Members, Members]:
    """Return the group over which each set of holders is summed.

    It is the set itself, or a superset if some worker would otherwise be in more than `most`
    groups. While a worker has too many groups, those two of its groups are merged that add the
    fewest bytes of zeros. The answer does not depend on the order of the sets.

    weights: by set, in proportion to its bytes.
    """
    workers = sorted(set().union(*weights))
    bit = {worker: 1 << index for index, worker in enumerate(workers)}

    # Groups are bit sets, since merging compares many pairs of them. They are taken in sorted
    # order, so that the answer does not depend on the order of the sets.
    mask_by_set = dict[Members, int]()
    size = dict[int, float]()
    for members in sorted(weights):
        mask = sum(bit[worker] for worker in members)
        mask_by_set[members] = mask
        size[mask] = float(weights[members])

    counts = _groups_by_worker(size, len(workers))
    while most is not None and counts and max(counts) > most:
        worst = counts.index(max(counts))
        groups_of_worst = []
        for mask in sorted(size):
            has_worst = mask >> worst & 1
            if has_worst:
                groups_of_worst.append(mask)
        first, second = _cheapest_pair(groups_of_worst, size)
        union = first | second
        merged_size = size.pop(first) + size.pop(second)
        # the union may be a group already: its bytes count too
        size[union] = merged_size + size.get(union, 0.0)
        for held, mask in mask_by_set.items():
            if mask in (first, second):
                mask_by_set[held] = union
        counts = _groups_by_worker(size, len(workers))

    groups = dict[Members, Members]()
    for held, mask in mask_by_set.items():
        group = [worker for worker in workers if mask & bit[worker]]
        groups[held] = tuple(group)
    return groups


def _groups_by_worker(groups: Iterable[int], num_workers: int) -> list[int]:
    """Count the groups (bit sets) that each worker is in."""
    counts = [0] * num_workers
    for mask in groups:
        for index in range(num_workers):
            counts[index] += mask >> index & 1
    return counts


def num_border_groups(plan: Plan) -> int:
    """Return the number of groups that carry messages between stages: none, two, or four.

    Each direction has one group, or two if some stage has neighbours on both sides; a pipeline's
    borders then use the two in turns. A communicator runs its operations in order. A stage that
    received and sent over the same communicator would send only after receiving what may come
    later: four stages with eight microbatches deadlock that way.
    """
    most_stages = max(len(pipeline.stages) for pipeline in plan.pipelines)
    return {1: 0, 2: 2}.get(most_stages, 4)


def max_sync_groups(plan: Plan) -> int:
    """Return the limit on a worker's communicators for gradient sync."""
    return MAX_COMMUNICATORS - 2 - num_border_groups(plan)


def sync_groups(
    plan: Plan, *, tied: bool, most: int | None, key_value_units: int = 0
) -> dict[Members, Members]:
    """`merged_groups` of a plan's sets of holders."""
    return merged_groups(holder_sets(plan, tied=tied, key_value_units=key_value_units), most)


def communicators_by_worker(plan: Plan, *, tied: bool, key_value_units: int = 0) -> dict[str, int]:
    """Count the communicators of each worker in training, at most MAX_COMMUNICATORS.

    Each takes COMMUNICATOR_BYTES of its device. The only worker of a plan has none.
    """
    if len(plan.workers) == 1:
        return dict.fromkeys(plan.workers, 0)
    counts = dict.fromkeys(plan.workers, 1 + num_border_groups(plan))
    for stage in plan.stages:
        if stage.tp_degree > 1:
            for worker in stage.workers:
                counts[worker] += 1

    most = max_sync_groups(plan)
    groups = sync_groups(plan, tied=tied, most=most, key_value_units=key_value_units)
    for group in set(groups.values()):
        for worker in group:
            counts[worker] += 1
    return counts


def communicators_at_most(plan: Plan, num_sets: Mapping[str, int]) -> dict[str, int]:
    """Return an upper bound of `communicators_by_worker`, in a fraction of its time.

    It does not merge; merging may take away a group of a worker that had few enough.

    num_sets: for each worker, the number of different sets of two or more holders of sliced tensors
    that it is in.
    """
    if len(plan.workers) == 1:
        return dict.fromkeys(plan.workers, 0)
    most = max_sync_groups(plan)
    before = 1 + num_border_groups(plan)
    cuts = plan.cuts
    has_groups = any(stage.tp_degree > 1 for stage in plan.stages)
    counts = {}
    for stage in plan.stages:
        # Uncut tensors have one more set for each run of layers between the same cuts, which lies
        # on the same stages of every pipeline.
        uncut_sets = 0
        if has_groups:
            cuts_at_start = bisect.bisect_right(cuts, stage.first_layer)
            cuts_before_end = bisect.bisect_left(cuts, stage.end_layer)
            uncut_sets = cuts_before_end - cuts_at_start + 1
        own_group = int(stage.tp_degree > 1)
        for worker in stage.workers:
            wanted = num_sets.get(worker, 0) + uncut_sets
            counts[worker] = before + own_group + min(most, wanted)
    return counts


def _cheapest_pair(groups: Sequence[int], size: Mapping[int, float]) -> tuple[int, int]:
    """Return the two groups (bit sets) whose merge adds the fewest bytes of zeros in total.

    Each group member that holds none of a bucket contributes zeros for it; the sum is over all
    members.
    """

    def added_bytes(pair: tuple[int, int]) -> float:
        first, second = pair
        union = (first | second).bit_count()
        added_to_first = (union - first.bit_count()) * size[first]
        added_to_second = (union - second.bit_count()) * size[second]
        return added_to_first + added_to_second

    return min(itertools.combinations(groups, 2), key=added_bytes)
