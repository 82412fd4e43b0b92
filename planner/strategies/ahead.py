"""How far the stages of a chosen plan work ahead: no further than helps, since each microbatch in flight takes memory."""

from planner.cost.model import CostModel
from planner.plan import Plan

_AS_FAST = 5e-4
_MANY = 4


def least_ahead(cost: CostModel, plan: Plan) -> Plan:
    """The plan with the fewest microbatches in flight with which it is as fast as with any number, or very nearly."""
    ways = cost.ways_ahead(plan)
    seconds = [cost.predict(way).step_time_s for way in ways]
    return next(way for way, s in zip(ways, seconds, strict=True) if s <= min(seconds) * (1 + _AS_FAST))


def settled(cost: CostModel, plan: Plan) -> Plan:
    """The plan as it competes with others: as far ahead as memory allows, or where some pipeline has few microbatches for its stages, and
    too many forwards first may hold backwards up, as far as is best."""
    few = any(1 < len(pipeline.stages) > pipeline.num_microbatches / _MANY for pipeline in plan.pipelines)
    return least_ahead(cost, plan) if few else cost.working_ahead(plan)
