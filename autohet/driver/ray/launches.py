"""What Ray's autoscaler (version 2) says of launches that failed: how many, by its state; why, only
by its log on the head.

It retries a type every 5 s for ever and drops the reason on its way
(ray/autoscaler/v2/instance_manager/instance_manager.py).
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import ray
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.exceptions import RayError

from autohet.driver.control.observation import Launches

logger = logging.getLogger("autohet")
LOOK_S = 5.0
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


def failed_launches() -> dict[str, int]:
    """Launches that failed so far, by node type."""
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    found: Counter[str] = Counter()
    for launch in status.failed_launches:
        found[launch.ray_node_type_name] += 1
    return dict(found)


def newest_cause(log: str) -> str:
    """In one sentence why the last launch failed; empty where the log does not say."""
    found = _CODE.findall(log)
    if not found:
        return ""
    code, words = found[-1]
    return f"{MEANINGS.get(code, 'EC2 refuses')} ({code}: {words.strip()})"


def read_monitor_log() -> str:
    """The end of the autoscaler's log; empty where this process is not on the head."""
    node = ray._private.worker._global_node
    path = None if node is None else Path(node.get_logs_dir_path()) / "monitor.log"
    try:
        if path is None:
            return ""
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


class LaunchWatch:
    """Asks the autoscaler every LOOK_S; what Ray does not answer is asked again the next time."""

    def __init__(
        self,
        failed: Callable[[], Mapping[str, int]] = failed_launches,
        log: Callable[[], str] = read_monitor_log,
    ) -> None:
        self._failed, self._log, self._looked_at = failed, log, -math.inf
        self._known: Launches | None = None

    def look(self, now: float) -> Launches | None:
        """As in `Observation`."""
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            try:
                failed = self._failed()
                if self._known is None or failed != self._known.failed:
                    self._known = Launches(failed, newest_cause(self._log()))
            except (RayError, RuntimeError, OSError) as error:
                logger.debug("the autoscaler's failed launches are not known: %s", error)
        return self._known
