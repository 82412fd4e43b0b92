"""How many microbatches each stage of a pipeline begins before it needs the first one back.

1F1B keeps one for each stage from there to the end (Narayanan et al. 2021). Two neighbours'
forwards and backwards then follow each other without a pause, so that a transfer between them
delays both, however well it runs beside the work: in the steady state

    period >= (sum of the work of stages s..t + sum of the transfers between them, both ways) / (n_s
    - n_t + 1)

for any stages s <= t that keep n_s and n_t microbatches (the circle: s's backward, its next
forward, on to t, t's backward, back to s). With n_s = n_(s+1) + 2 instead of + 1 transfers of up to
half a period are hidden (Zhuang et al., "On optimizing the communication of model parallelism",
MLSys 2023, section 4: eager 1F1B).

Besides, an early stage then works ahead where it would wait for its first backward, and so may take
longer than later ones. With a backward of twice a forward it waits for as long as three forwards
for each later stage: n_s = n_(s+1) + 3 leaves hardly any of it. What all this costs is the
activations of the further microbatches, little with recomputation.
"""

from collections.abc import Sequence

MOST_AHEAD = 3
"""By how many a stage may keep more than the next one."""


def one_each(depth: int) -> tuple[int, ...]:
    """1F1B's numbers."""
    return tuple(range(depth, 0, -1))


def working_ahead(
    transfer_s: Sequence[float], room: Sequence[int], most: int = MOST_AHEAD
) -> tuple[int, ...]:
    """As many as memory allows, at most so many more at each stage than at the next. Where not all
    can be, first one more before each boundary, the longest transfers first; then the others,
    before late boundaries first, since early ones need more memory for the same.

    transfer_s [P - 1]: of each boundary, both ways. room [P]: microbatches that each stage's memory
    holds; where these are all there are, any larger number. Where it holds less than 1F1B's, that
    all the same.
    """
    depth = len(room)
    if all(have > most * (depth - 1 - stage) for stage, have in enumerate(room)):
        return tuple(range(most * (depth - 1) + 1, 0, -most))
    numbers = list(one_each(depth))
    spare = [have - need for have, need in zip(room, numbers, strict=True)]
    longest = sorted(range(depth - 1), key=lambda b: (-transfer_s[b], -b))[
        : (depth - 1) * (most > 1)
    ]
    latest = list(range(depth - 2, -1, -1)) * (most - 2)
    for boundary in [*longest, *latest]:
        if min(spare[: boundary + 1]) > 0:
            for stage in range(boundary + 1):
                numbers[stage] += 1
                spare[stage] -= 1
    return tuple(numbers)


def period_s(work_s: Sequence[float], transfer_s: Sequence[float], numbers: Sequence[int]) -> float:
    """The steady state's seconds a microbatch: the slowest stage, and the circles from each stage
    to the end.
    """
    slowest, way = max(work_s), 0.0
    for stage in range(len(work_s) - 1, -1, -1):
        way += work_s[stage] + (transfer_s[stage] if stage < len(transfer_s) else 0.0)
        slowest = max(slowest, way / numbers[stage])
    return slowest
