"""Sensitivity of a plan to errors of the cost model.

A draw multiplies each node type's layer times by a factor within LAYERS_OFF of 1, and the
bandwidths of its links inside and between nodes by factors within LINKS_OFF. All factors are
uniform and independent. The plan and the other candidates of its search (ends of its walks and the
drafts that ranked first; the search is not repeated) are predicted under each draw. The loss is the
plan's step time over that of the fastest of them that fits memory, less one: 0 if the plan stays
the fastest.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.cost.model import CostModel
from planner.inputs.fleet import NodeType
from planner.plans.plan import Plan
from planner.search.problem import limits

SEED = 0
"""Seed of the random errors, which every plan is judged under."""


@dataclass(frozen=True)
class Robustness:
    """Step time and loss of a plan, one entry per draw.

    The loss is against the fastest of `candidates` other plans.
    """

    candidates: int
    step_time_s: tuple[float, ...]
    loss: tuple[float, ...]

    @property
    def draws(self) -> int:
        return len(self.step_time_s)

    def sentence(self) -> str:
        """Return the result as text for the user."""
        spread = f"{min(self.step_time_s):.4g} to {max(self.step_time_s):.4g} s"
        text = (
            f"under layer times +-{limits.LAYERS_OFF:.0%} and links +-{limits.LINKS_OFF:.0%} of"
            f" each node type ({self.draws} draws, seed {SEED}): {spread} a step"
        )
        if not self.candidates:
            return text
        mean = sum(self.loss) / self.draws
        return (
            f"{text}; slower than the best of {self.candidates} other candidates by {mean:.1%} on"
            f" average, {max(self.loss):.1%} at worst"
        )

    def to_document(self) -> dict[str, Any]:
        return {
            "sentence": self.sentence(),
            "draws": self.draws,
            "seed": SEED,
            "layer_times_within": limits.LAYERS_OFF,
            "links_within": limits.LINKS_OFF,
            "compared_with": (
                "the other plans that this search kept (ends of its walks, first drafts), predicted"
                " anew, none searched anew"
            ),
            "candidates": self.candidates,
            "step_time_s": {
                "least": min(self.step_time_s),
                "mean": _mean(self.step_time_s),
                "worst": max(self.step_time_s),
            },
            "loss": self._loss_document(),
        }

    def _loss_document(self) -> dict[str, float] | None:
        if not self.candidates:
            return None
        return {"mean": _mean(self.loss), "worst": max(self.loss)}


def robustness(
    cost: CostModel, plan: Plan, candidates: Sequence[Plan], draws: int | None = None
) -> Robustness:
    """Predict a plan and other candidates under random errors of the cost model.

    draws: their number; None: limits.DRAWS.
    """
    number = draws or limits.DRAWS
    rng = random.Random(SEED)
    steps = list[float]()
    losses = list[float]()
    # a draw changes no bytes, so a plan that fits does so in each of them
    possible = [each for each in candidates if cost.predict(each).fits]
    for _ in range(number):
        drawn = cost.with_node_types({kind: _drawn(kind, rng) for kind in cost.fleet.node_types})
        own_s = drawn.steps.simulate(plan).step_time_s
        fastest_s = own_s
        for other in possible:
            fastest_s = min(fastest_s, drawn.steps.simulate(other).step_time_s)
        steps.append(own_s)
        losses.append(own_s / fastest_s - 1)
    return Robustness(len(candidates), tuple(steps), tuple(losses))


def _drawn(kind: NodeType, rng: random.Random) -> NodeType:
    def factor(within: float) -> float:
        return 1 + rng.uniform(-within, within)

    return replace(
        kind,
        slowdown=kind.slowdown * factor(limits.LAYERS_OFF),
        intra_node_bytes_per_s=kind.intra_node_bytes_per_s * factor(limits.LINKS_OFF),
        inter_node_bytes_per_s=kind.inter_node_bytes_per_s * factor(limits.LINKS_OFF),
    )


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)
