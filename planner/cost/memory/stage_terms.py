"""Seconds and bytes of one stage, and the sharing of optimizer state that they depend on."""

from dataclasses import dataclass, fields
from operator import attrgetter

from planner.plans.plan import Plan, Stage
from planner.plans.redundancy import sharded_layers

traits_of = attrgetter(*(each.name for each in fields(Stage) if each.name != "workers"))
"""All fields of a stage but its workers, as a key for costs of equal stages on other workers."""


@dataclass(frozen=True, slots=True)
class RankBytes:
    """Bytes of one worker of a stage.

    held_bytes: held all step long. activation_bytes: for each microbatch in flight. free_bytes:
    free beside what it holds all step long. state_bytes: masters and moments, which outlive a plan.
    room_bytes: room for what a plan puts there. host_bytes: masters and moments in host
    memory. moved_bytes: inputs of blocks there, for each microbatch in flight.
    """

    held_bytes: float
    activation_bytes: float
    free_bytes: float
    state_bytes: float
    room_bytes: float
    host_bytes: float = 0.0
    moved_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class StageTerms:
    """Seconds and bytes of one stage.

    Seconds of a microbatch and of the update are the slowest worker's. ranks: bytes of each worker.
    estimated: the times that are estimated, not measured.
    """

    forward_s: float
    backward_s: float
    update_s: float
    ranks: tuple[RankBytes, ...]
    estimated: tuple[str, ...]

    def room(self, taken_bytes: float) -> int:
        """Return microbatches in flight that memory holds.

        taken_bytes: further bytes taken of each worker.
        """
        rooms = []
        for rank in self.ranks:
            free_bytes = rank.free_bytes - taken_bytes
            rooms.append(int(free_bytes / max(1.0, rank.activation_bytes)))
        return min(rooms)


@dataclass(frozen=True, slots=True)
class Sharing:
    """Layers with shared-out optimizer state, and the number of workers that share each.

    layers: names as in `planner.plans.redundancy`. holders: number of pipelines, since each
    pipeline holds each slice once. Further workers may hold a few tensors (biases, norms, a tied
    embedding); they are not counted. offloads: masters and moments are in host memory.
    """

    holders: int = 1
    layers: frozenset[str] = frozenset()
    offloads: bool = False


NOT_SHARED = Sharing()


def sharing_of(plan: Plan) -> Sharing:
    """Return the sharing of optimizer state in a plan."""
    # the layers of a single pipeline have one holder each, whatever its stages say
    has_several_holders = len(plan.pipelines) > 1
    # searches ask this of every plan: only plans that share out pay for the names of their layers
    if has_several_holders and any(stage.shard_optimizer for stage in plan.stages):
        return Sharing(len(plan.pipelines), sharded_layers(plan), plan.offloads)

    if plan.offloads:
        return Sharing(offloads=True)
    return NOT_SHARED
