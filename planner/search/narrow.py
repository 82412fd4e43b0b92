"""The same problem on fewer nodes."""

from dataclasses import replace

from planner.cluster import Fleet
from planner.cost.model import CostModel
from planner.search.problem import Request


def narrowed(request: Request, fleet: Fleet) -> Request:
    """The request on a part of its fleet; layer times and predictions are shared."""
    cost = request.cost
    smaller = CostModel.__new__(CostModel)
    smaller.__dict__.update({k: v for k, v in cost.__dict__.items() if k != "node_types"})
    smaller.fleet = fleet
    return replace(request, fleet=fleet, cost=smaller)
