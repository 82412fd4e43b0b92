"""The strikes of one seed, drawn before any process starts: kinds, victims, pauses, durations.

A seed gives the same sequence on every machine. Which state the job is in when a strike comes is
the machine's.
"""

import random
from dataclasses import dataclass

from tests.harness.exact_job import NODES

WEIGHTS: dict[str, int] = {
    "worker_kill": 5,
    "worker_freeze": 3,
    "agent_kill": 2,
    "agent_freeze": 1,
    "node_kill": 3,
    "node_freeze": 2,
    "node_replaced": 2,
    "notice": 2,
    "notice_repeated": 1,
    "notice_withdrawn": 1,
    "deaths_in_rebuilds": 3,
    "driver_kill": 2,
    "driver_freeze": 1,
    "storage_away": 1,
    "storage_read_only": 1,
    "storage_full": 1,
    "disk_full": 1,
    "memory_full": 1,
    "snapshot_flip": 2,
}
"""Kinds of strikes, and how often each is drawn relative to the others."""
MAX_DEATHS_IN_REBUILDS = 4
PAUSES_S = (0.1, 0.3, 0.6, 1.0, 2.0)


@dataclass(frozen=True)
class Strike:
    """One strike.

    pause_s: seconds after the strike before it. nodes: victims in order of preference; the first
    that may be struck is. position: in [0, 1), which of a node's workers, which file, which byte.
    lasts_s: duration of a freeze or an outage, and how long a node that dies stays away.
    in_rebuild: wait for the next generation that is being built.
    """

    number: int
    kind: str
    pause_s: float
    nodes: tuple[str, ...]
    position: float
    lasts_s: float
    in_rebuild: bool = False


def draw_strikes(seed: int, count: int, weights: dict[str, int] | None = None) -> list[Strike]:
    """Return the first `count` strikes of a seed."""
    draw = random.Random(seed)
    weights = weights or WEIGHTS
    kinds: list[tuple[str, bool]] = []
    strikes = []
    for number in range(count):
        if not kinds:
            kinds = _next_kinds(draw, weights)
        kind, in_rebuild = kinds.pop(0)
        strikes.append(
            Strike(
                number=number,
                kind=kind,
                pause_s=0.0 if in_rebuild else draw.choice(PAUSES_S),
                nodes=tuple(draw.sample(sorted(NODES), len(NODES))),
                position=draw.random(),
                lasts_s=round(draw.uniform(0.3, 6.0), 2),
                in_rebuild=in_rebuild,
            )
        )
    return strikes


def _next_kinds(draw: random.Random, weights: dict[str, int]) -> list[tuple[str, bool]]:
    """One kind; or a worker's death and those of workers in the rebuilds that follow it."""
    (kind,) = draw.choices(list(weights), list(weights.values()))
    if kind != "deaths_in_rebuilds":
        return [(kind, False)]
    later = draw.randint(1, MAX_DEATHS_IN_REBUILDS)
    return [("worker_kill", False)] + [("worker_kill", True)] * later
