"""Step times of the fleets that a cluster may become, whatever its nodes cost.

Prices move while a job trains and step times do not: with these, the fleet to pay for at any
prices is a matter of arithmetic.
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from planner.errors import InfeasibleError
from planner.search.problem import limits
from planner.search.problem.request import Request, narrow_to
from planner.strategies import plan_with
from planner.strategies.fleets import FleetSpace, TypeCounts, thinned_counts
from planner.strategies.pareto import spread


@dataclass(frozen=True)
class FleetSpeed:
    """Seconds of a step on a fleet, told by its number of nodes of each machine."""

    counts: TypeCounts
    step_s: float


@dataclass(frozen=True)
class FleetSpeeds:
    """Step times of fleets.

    machines: names of the node types of each machine; they differ in price and market alone.
    """

    machines: tuple[tuple[str, ...], ...]
    speeds: tuple[FleetSpeed, ...]

    def counts_of(self, by_type: Mapping[str, int]) -> TypeCounts:
        """Return the numbers of nodes by machine."""
        found = []
        for names in self.machines:
            found.append(sum(by_type.get(name, 0) for name in names))
        return tuple(found)

    def step_s(self, by_type: Mapping[str, int]) -> float:
        """Return the seconds of a step on these nodes, some of which may idle.

        Infinite if there is no plan.
        """
        counts = self.counts_of(by_type)
        seconds = []
        for speed in self.speeds:
            if all(part <= whole for part, whole in zip(speed.counts, counts, strict=True)):
                seconds.append(speed.step_s)
        return min(seconds, default=math.inf)

    def joined(self, other: "FleetSpeeds") -> "FleetSpeeds":
        """Return the step times of both, which have the same machines."""
        return replace(self, speeds=tuple(dict.fromkeys(self.speeds + other.speeds)))


def fleet_speeds(
    strategy: str, request: Request, also: Iterable[Mapping[str, int]] = ()
) -> FleetSpeeds:
    """Return the step times of fleets within `request.fleet`, by the best of their drafts.

    The fleet's node types have no price, so that those of one machine are the same. also: fleets,
    by numbers of nodes by type, that are looked at first.
    """
    asked = replace(
        request,
        objective="time",
        max_usd_per_hour=None,
        max_transfer_share=None,
        prove=False,
        brief=True,
    )
    space = FleetSpace(asked)
    machines = []
    for each in space.nodes:
        machines.append(tuple(dict.fromkeys(node.node_type.name for node in each)))
    empty = FleetSpeeds(tuple(machines), ())

    every = itertools.product(*thinned_counts(space.most, limits.DRAFTED_FLEETS))
    first = space.keep_allowed(empty.counts_of(by_type) for by_type in also)
    budget_gpus = request.time_limit_s * limits.FLEET_GPUS_A_SECOND
    found: dict[TypeCounts, float] = {}
    for counts in dict.fromkeys([*first, *spread(space.keep_allowed(every))]):
        if budget_gpus < 0 and len(found) >= limits.FEWEST_FLEETS:
            break
        budget_gpus -= space.gpus(counts)
        if sum(counts) < request.min_node_disjoint_holders:
            continue
        try:
            answer = plan_with(strategy, narrow_to(asked, space.fleet(counts)))
        except InfeasibleError:
            continue
        used = space.counts_of(answer.used_nodes)
        found[used] = min(answer.step_time_s, found.get(used, math.inf))
    speeds = tuple(FleetSpeed(counts, step_s) for counts, step_s in sorted(found.items()))
    return replace(empty, speeds=speeds)
