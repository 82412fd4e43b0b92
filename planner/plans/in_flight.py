"""Number of microbatches that each stage of a pipeline starts before the first one returns.

1F1B keeps one for each stage from this one to the last (Narayanan et al. 2021). The forwards and
backwards of two neighbours then follow each other without a pause. A transfer between them delays
both, even if it overlaps with compute. In the steady state

    period >= (sum of the work of stages s..t + sum of the transfers between them, both ways)
              / (n_s - n_t + 1)

for any stages s <= t that keep n_s and n_t microbatches. (The cycle is: s's backward, its next
forward, on to t, t's backward, back to s.) With n_s = n_(s+1) + 2 instead of + 1, transfers of up
to half a period are hidden (Zhuang et al., "On optimizing the communication of model parallelism",
MLSys 2023, section 4: eager 1F1B).

An early stage then also works ahead instead of waiting for its first backward, and so may take
longer than later stages. If a backward takes twice a forward, it waits for three forwards per later
stage: n_s = n_(s+1) + 3 hides nearly all of that. The cost is the activations of the additional
microbatches, which are small with recomputation.
"""

from collections.abc import Sequence

MOST_AHEAD = 3
"""Maximum number of microbatches that a stage may keep beyond those of the next stage."""


def one_each(depth: int) -> tuple[int, ...]:
    """1F1B's numbers."""
    return tuple(range(depth, 0, -1))


def working_ahead(
    transfer_s: Sequence[float], room: Sequence[int], most: int = MOST_AHEAD
) -> tuple[int, ...]:
    """Return the microbatches that each stage keeps: as many as memory allows.

    A stage keeps at most `most` more than the next stage. If memory is short, first each boundary
    gets one more microbatch before it, the longest transfers first. The rest then goes before late
    boundaries first, since early ones need more memory for the same.

    transfer_s [P - 1]: seconds of each boundary, both ways.
    room [P]: microbatches that fit the memory of each stage; any larger number if all of a step
    fit. A stage that holds less than 1F1B's number still gets 1F1B's.
    """
    depth = len(room)
    largest = range(most * (depth - 1) + 1, 0, -most)
    if all(have >= number for have, number in zip(room, largest, strict=True)):
        return tuple(largest)

    numbers = list(one_each(depth))
    spare = [have - need for have, need in zip(room, numbers, strict=True)]
    order: list[int] = []
    if most > 1:
        order += sorted(range(depth - 1), key=lambda b: (-transfer_s[b], -b))
    for _ in range(most - 2):
        order += range(depth - 2, -1, -1)
    for boundary in order:
        # earlier stages get one more too, so that only the lead across this boundary grows
        if min(spare[: boundary + 1]) > 0:
            for stage in range(boundary + 1):
                numbers[stage] += 1
                spare[stage] -= 1
    return tuple(numbers)


def period_s(work_s: Sequence[float], transfer_s: Sequence[float], numbers: Sequence[int]) -> float:
    """Return the steady state's seconds per microbatch.

    It is the longest of the slowest stage and the cycles from each stage to the last.
    """
    slowest = max(work_s)
    way = 0.0
    for stage in range(len(work_s) - 1, -1, -1):
        to_next_s = transfer_s[stage] if stage < len(transfer_s) else 0.0
        way += work_s[stage] + to_next_s
        slowest = max(slowest, way / numbers[stage])
    return slowest
