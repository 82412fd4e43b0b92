"""Node types of a cluster file on which a job can train as one SkyPilot cluster."""

from collections.abc import Iterable
from dataclasses import dataclass

from autohet.driver.loop.planning import Planning, make_planning
from autohet.runtime.job import Job
from autohet.runtime.step.precision import without_incapable_nodes
from planner.errors import ConfigError
from planner.inputs.cluster import Cluster
from planner.inputs.fleet import Fleet, Node, NodeType
from planner.inputs.zones import refusal_of


@dataclass(frozen=True)
class KindChoice:
    """Node types that fit, and the reason for each one that does not."""

    kinds: tuple[NodeType, ...]
    left_out: tuple[tuple[str, str], ...]


def choose_kinds(job: Job, cluster: Cluster, num_nodes: int) -> KindChoice:
    """Plan the job on `num_nodes` nodes of each type alone.

    Raises:
        ConfigError: it fits none of them.
    """
    able = without_incapable_nodes(cluster, job)
    planning = make_planning(job, zones=cluster.zones)
    kinds = []
    left_out = []
    for kind in cluster.node_types:
        if kind not in able.node_types:
            left_out.append((kind.name, f"cannot compute {job.training.precision}"))

    for kind in able.node_types:
        reason = _refusal(job, kind, num_nodes) or _planning_error(planning, kind, num_nodes)
        if reason:
            left_out.append((kind.name, reason))
        else:
            kinds.append(kind)
    if not kinds:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out)
        raise ConfigError(
            f"no node type of cluster '{cluster.name}' can train the job alone with --nodes"
            f" {num_nodes}, and a SkyPilot cluster has equal nodes ({reasons}); change --nodes or"
            " the cluster file"
        )
    return KindChoice(tuple(kinds), tuple(left_out))


def _planning_error(planning: Planning, kind: NodeType, num_nodes: int) -> str:
    """Return why no plan fits so many nodes of one type; empty if one does."""
    nodes = tuple(Node(f"{kind.name}-{index}", kind) for index in range(num_nodes))
    try:
        planning.propose(Fleet(0, nodes), None)
    except ConfigError as error:
        return str(error)
    return ""


def _refusal(job: Job, kind: NodeType, num_nodes: int) -> str:
    """Return why so many nodes of a type need no planning; empty if they may fit."""
    if num_nodes > kind.max_nodes:
        return f"its max_workers is {kind.max_nodes}"
    num_gpus = num_nodes * kind.num_gpus
    least = job.elastic.min_workers
    if num_gpus < least:
        return f"{num_gpus} GPUs are fewer than elastic.min_workers, {least}"
    return ""


def require_links(cluster: Cluster, regions: Iterable[str]) -> None:
    """Raise ConfigError if two regions have no link: a copy between them would have no price."""
    apart = cluster.zones.first_unconnected(regions)
    if apart is not None:
        raise ConfigError(refusal_of(apart))
