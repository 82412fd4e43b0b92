"""Launches of Ray's autoscaler (version 2): nodes to come, and attempts that failed.

Both come from the autoscaler's state, which has the reasons of KubeRay's failures; the reasons of
EC2's are only in its log on the head (ray/autoscaler/v2/instance_manager/node_provider.py). The
autoscaler retries a type every 5 s for ever.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import ray
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.exceptions import RayError

from autohet.control.values.observation import Launches, StartingNode, StartState

logger = logging.getLogger("autohet")
LOOK_S = 5.0
ENDED = "its machine or pod ended before Ray ran on it"
TAIL_BYTES = 1 << 18
MEANINGS = {
    "InsufficientInstanceCapacity": "EC2 has no capacity",
    "SpotMaxPriceTooLow": "the spot price is above the bid",
    "MaxSpotInstanceCountExceeded": "the spot quota is used up",
    "VcpuLimitExceeded": "the quota of vCPUs is used up",
    "InstanceLimitExceeded": "the quota of instances is used up",
    "UnauthorizedOperation": "the head's role does not allow it",
    "AuthFailure.ServiceLinkedRoleCreationNotPermitted": (
        "the account has no role for spot instances yet, which scripts/aws/prepare makes"
    ),
    "InvalidAMIID.NotFound": "the image does not exist in this region",
    "Unsupported": "the zone does not have the type",
}
_CODE = re.compile(
    r"An error occurred \(([A-Za-z.]+)\) when calling the \w+ operation(?: \([^)]*\))?:"
    r" ([^\n\"']{0,200})"
)


_FAILED = re.compile(
    r"Failed to launch \d+ nodes of type (\S+): (.*?)(?=\n\d{4}-\d\d-\d\d|\Z)", re.DOTALL
)


@dataclass(frozen=True)
class Attempts:
    """State of the autoscaler's launches, as it reports it.

    failed: attempts that failed by type; one request of several nodes is one attempt. causes: words
    of the last failure by type, where the autoscaler has kept them. pending: name, type and state
    of each node to come. joined: type by id of each node that is up.
    """

    failed: Mapping[str, int] = field(default_factory=dict)
    causes: Mapping[str, str] = field(default_factory=dict)
    pending: tuple[StartingNode, ...] = ()
    joined: Mapping[str, str] = field(default_factory=dict)


def read_attempts() -> Attempts:
    """Return the state of the autoscaler's launches."""
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    attempts = set()
    causes = {}
    for launch in sorted(status.failed_launches, key=lambda failed: failed.failed_ts_s or 0):
        attempts.add((launch.ray_node_type_name, launch.request_ts_s))
        # Ray's own prefix ends with the number of its request.
        words = re.sub(r"^.*request id \S+: ?", "", launch.details or "", flags=re.DOTALL)
        if words:
            causes[launch.ray_node_type_name] = words

    pending = []
    for launch in status.pending_launches:
        name = f"a request for {launch.count} {launch.ray_node_type_name}"
        started_at = str(launch.request_ts_s)
        state = StartState.REQUESTED
        for index in range(launch.count):
            identity = f"{name} ({started_at}/{index})"
            pending.append(StartingNode(identity, launch.ray_node_type_name, state, 0.0))
    for node in status.pending_nodes:
        state = StartState.STARTING
        pending.append(StartingNode(node.instance_id, node.ray_node_type_name, state, 0.0))

    joined = {
        node.instance_id or node.node_id or "": node.ray_node_type_name
        for node in [*status.active_nodes, *status.idle_nodes]
    }
    failed = Counter(kind for kind, _ in attempts)
    return Attempts(dict(failed), causes, tuple(pending), joined)


def newest_cause(log: str) -> str:
    """Return one sentence on why the last launch failed; empty if the log has no reason."""
    found = _CODE.findall(log)
    if not found:
        return ""
    code, words = found[-1]
    return f"{MEANINGS.get(code, 'EC2 refuses')} ({code}: {words.strip()})"


def causes_by_type(log: str) -> dict[str, str]:
    """Return one sentence for each type on why its last launch failed.

    The reasons are those in version 2's log (ray/autoscaler/v2/instance_manager/node_provider.py).
    """
    found: dict[str, str] = {}
    for match in _FAILED.finditer(log):
        name, words = match.groups()
        cause = newest_cause(words)
        lines = words.strip().splitlines()
        if not cause and lines:
            # Not EC2's error: a cause that is not among them is shown as the log has it.
            cause = lines[0][:200]
        if cause:
            found[name] = cause
    return found


def read_monitor_log() -> str:
    """Return the end of the autoscaler's log; empty if this process is not on the head."""
    node = ray._private.worker._global_node
    if node is None:
        return ""
    path = Path(node.get_logs_dir_path()) / "monitor.log"
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


class LaunchWatch:
    """Polls the autoscaler every LOOK_S; a poll that Ray does not answer is retried at the next.

    In a pod, `pods` has Kubernetes' own view of the pods, where it may be read.
    """

    def __init__(
        self,
        attempts: Callable[[], Attempts] = read_attempts,
        log: Callable[[], str] = read_monitor_log,
        pods: Callable[[], Sequence[StartingNode] | None] = lambda: None,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self.close = close
        """End the watch of the pods."""
        self._attempts = attempts
        self._log = log
        self._pods = pods
        self._looked_at = -math.inf
        self._entered: dict[tuple[str, StartState], float] = {}
        """Time at which each node was first seen in its state."""
        self._starting: dict[str, str] = {}
        """Type of each node that had a machine, or a place for one, at the last poll."""
        self._joined: Mapping[str, str] | None = None
        self._by_pod = False
        """True if Kubernetes told the nodes to come at the last poll."""
        self._credit: Counter[str] = Counter()
        """Nodes by type that have joined, and have not been seen to leave the starting ones."""
        self._lost: Counter[str] = Counter()
        """Nodes by type that ended before they joined."""
        self._known: Launches | None = None

    def look(self, now: float) -> Launches | None:
        """Poll the autoscaler if it is due; return the value of `Observation.launches`."""
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            try:
                self._poll(now)
            except (RayError, RuntimeError, OSError) as error:
                logger.debug("the autoscaler's launches are not known: %s", error)
        return self._known

    def _poll(self, now: float) -> None:
        attempts = self._attempts()
        nodes = self._merge(attempts)
        # The time at which each node was first seen in its state.
        entered = {}
        for node in nodes:
            key = (node.name, node.state)
            entered[key] = self._entered.get(key, now)
        self._entered = entered
        starting = tuple(replace(each, since=entered[each.name, each.state]) for each in nodes)
        self._count_lost(starting, attempts.joined)
        failed = dict(Counter(attempts.failed) + self._lost)
        known = self._known
        # Only a further failure can have a new cause: otherwise the log is not read again.
        if known is None or failed != known.failed:
            log = self._log()
            causes = dict.fromkeys(self._lost, ENDED) | dict(attempts.causes)
            known = Launches(failed, newest_cause(log), causes | causes_by_type(log))
        polled_at = now if starting else 0.0
        if starting or known.starting:
            known = replace(known, starting=starting, polled_at=polled_at)
        self._known = known

    def _merge(self, attempts: Attempts) -> list[StartingNode]:
        """Return the nodes to come: requests by the autoscaler, and pods by Kubernetes."""
        pods = self._pods()
        is_by_pod = pods is not None
        if is_by_pod != self._by_pod:
            # Pods and the autoscaler's instances have different names: none of them has ended.
            self._by_pod = is_by_pod
            self._starting = {}
        if pods is None:
            return list(attempts.pending)
        requested = [each for each in attempts.pending if each.state is StartState.REQUESTED]
        return requested + [pod for pod in pods if pod.name not in attempts.joined]

    def _count_lost(self, nodes: Sequence[StartingNode], joined: Mapping[str, str]) -> None:
        """Count the nodes that ended before they joined.

        The autoscaler's ids of pending and of living nodes differ, so they are matched by number.
        """
        if self._joined is not None:
            self._credit.update(joined[name] for name in joined.keys() - self._joined.keys())
        self._joined = joined
        starting = {
            node.name: node.node_type for node in nodes if node.state is not StartState.REQUESTED
        }
        for name in self._starting.keys() - starting.keys():
            kind = self._starting[name]
            if self._credit[kind]:
                self._credit[kind] -= 1
            else:
                self._lost[kind] += 1
        self._starting = starting
        for kind in self._credit.keys() - set(starting.values()):
            del self._credit[kind]
