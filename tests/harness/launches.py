"""What Ray's autoscaler makes of a cluster file, by its own scheduler."""

from autohet.driver.ray.requests.node_requests import NodeRequest, simulate_launches
from planner.inputs.autoscaling import autoscaling_config
from planner.inputs.documents import Json


def schedule_launches(document: Json, request: NodeRequest, version: int = 2) -> dict[str, int]:
    return simulate_launches(autoscaling_config(document), request, version)


def standing_nodes(document: Json) -> dict[str, int]:
    """Return the nodes of each type that are there without a request."""
    types = autoscaling_config(document).types
    return {name: kind.min_workers for name, kind in types.items() if kind.min_workers}
