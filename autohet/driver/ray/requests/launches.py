"""Failed launches of Ray's autoscaler (version 2).

The number of failures comes from the autoscaler's state, the reasons only from its log on the head.
The autoscaler retries a type every 5 s for ever and drops the reason on its way
(ray/autoscaler/v2/instance_manager/instance_manager.py).
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import ray
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.exceptions import RayError

from autohet.control.values.observation import Launches

logger = logging.getLogger("autohet")
LOOK_S = 5.0
PENDING_S = 120.0
"""Seconds of pending after which a pod counts as one failed launch, and again each time."""
STUCK = "its pod stays pending: no node of the cluster has room for it"
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


def failed_launches() -> dict[str, int]:
    """Return the number of failed launches so far, by node type."""
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    found: Counter[str] = Counter()
    for launch in status.failed_launches:
        found[launch.ray_node_type_name] += 1
    return dict(found)


def pending_pods() -> dict[str, str]:
    """Return the node type of each pod that Kubernetes has not placed yet, by pod.

    Elsewhere it is empty, since a pending node there is a machine that starts.
    """
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return {}
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    return {node.instance_id: node.ray_node_type_name for node in status.pending_nodes}


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
    """Polls the autoscaler every LOOK_S; a poll that Ray does not answer is retried at the next."""

    def __init__(
        self,
        failed: Callable[[], Mapping[str, int]] = failed_launches,
        log: Callable[[], str] = read_monitor_log,
        pending: Callable[[], Mapping[str, str]] = pending_pods,
    ) -> None:
        self._failed = failed
        self._log = log
        self._looked_at = -math.inf
        self._pending = pending
        self._since: dict[str, float] = {}
        """Time at which each pod was first seen pending, or last counted as a failure."""
        self._stuck: Counter[str] = Counter()
        self._known: Launches | None = None

    def look(self, now: float) -> Launches | None:
        """Poll the autoscaler if it is due; return the value of `Observation.launches`."""
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            try:
                failed = dict(Counter(self._failed()) + self._stuck_pods(now))
                # Only a further failure can have a new cause: otherwise the log is not read again.
                if self._known is None or failed != self._known.failed:
                    log = self._log()
                    causes = dict.fromkeys(self._stuck, STUCK)
                    causes |= causes_by_type(log)
                    self._known = Launches(failed, newest_cause(log), causes)
            except (RayError, RuntimeError, OSError) as error:
                logger.debug("the autoscaler's failed launches are not known: %s", error)
        return self._known

    def _stuck_pods(self, now: float) -> Counter[str]:
        """Return the failures by type of pods that stay pending, since the watch began."""
        waiting = self._pending()
        # Pods that are placed, or gone, are forgotten; their failures stay counted.
        self._since = {pod: self._since.get(pod, now) for pod in waiting}
        for pod, since in self._since.items():
            times = int((now - since) // PENDING_S)
            self._stuck[waiting[pod]] += times
            self._since[pod] += times * PENDING_S
        # Without the types that have no failure yet.
        self._stuck = +self._stuck
        return self._stuck
