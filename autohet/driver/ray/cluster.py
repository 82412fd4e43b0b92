"""Facts of Ray's cluster: living nodes with their labels, and which of them drain.

With `drain`, this is the only module that uses undocumented parts of Ray (2.60):
`get_draining_nodes` and the internal key-value store.
"""

import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray._private import services
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._private.state import state as ray_state
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.experimental import internal_kv

from planner.errors import ConfigError
from planner.inputs.cluster import Cluster, node_type_from_labels
from planner.inputs.documents import Document, Json
from planner.inputs.fleet import NodeType

logger = logging.getLogger("autohet.ray")
GROUP_LABEL = "ray.io/node-group"
HEAD_RESOURCE = "node:__internal_head__"
"""Resource that Ray gives to the head alone."""
# a node that wants a certain name in plans (emulated fleets, bare machines)
NAME_LABEL = "autohet-node-name"
STATUS_KEY = b"autohet:status:"
PRIVATE_SESSION = "session_autohet_"
"""Start of the names of sessions that no other run joins."""
CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class RayNode:
    """A living Ray node with GPUs."""

    node_id: str
    address: str
    group: str
    num_gpus: int
    labels: Mapping[str, str]
    host_name: str = ""
    is_head: bool = False

    @property
    def gpu_type(self) -> str:
        """GPU type by the node's labels, one of which Ray itself sets; empty if none does."""
        return (
            self.labels.get("autohet.io/gpu-type")
            or self.labels.get("ray.io/accelerator-type")
            or ""
        )


def quieten() -> None:
    """Turn Ray's prints of node events, with dumps of their logs, into debug messages."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    ray._private.worker.print_to_stdstream = lambda data, ignore_prefix: logger.debug(
        "%s", "\n".join(data["lines"])
    )


def private_session() -> str:
    """Return a new name for the session of a Ray that a run starts for itself."""
    return f"{PRIVATE_SESSION}{uuid.uuid4().hex[:12]}"


def is_named(address: str | None) -> bool:
    """Return true if the user names a cluster."""
    return bool(address or os.environ.get("RAY_ADDRESS"))


def runs_here() -> bool:
    """Return true if this machine belongs to a living Ray cluster, other than a run's own."""
    try:
        _reach(None)
    except (ConnectionError, OSError, ValueError):
        return False
    return True


def _reach(address: str | None, *, private: bool = False) -> str:
    """Return the address of the GCS; raise the connection's error if it refuses."""
    if is_named(address):
        found = canonicalize_bootstrap_address_or_die(address or "auto")
    else:
        found = _find_here(private)
    host, _, port = found.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    return str(found)


def _find_here(private: bool) -> str:
    """Return the address of the cluster that this machine belongs to.

    private: where there is none, that of the one Ray that a run has started for itself.

    Raises:
        ConnectionError: there is none, or several.
    """
    shared: set[str] = set()
    own: set[str] = set()
    for process in services.psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"]
        if not services._is_raylet_process(command):
            continue
        # A process that has set its title has all arguments in one.
        options = dict(word.partition("=")[::2] for word in " ".join(command).split(" "))
        session = options.get("--session-name", "")
        addresses = own if session.startswith(PRIVATE_SESSION) else shared
        addresses.add(options.get("--gcs-address", ""))

    latest = services.find_bootstrap_address(None)
    if latest and latest not in own and (latest in shared or not shared):
        return str(latest)
    found = shared or (own if private else set())
    if len(found) != 1:
        which = ", ".join(sorted(found)) or "none"
        raise ConnectionError(f"the Ray clusters that run here are {which}")
    return str(found.pop())


def connect(address: str | None, *, private: bool = False, **options: Any) -> None:
    """Connect `ray.init` to a running cluster.

    It is the one at `address`, or at $RAY_ADDRESS, or the one that this machine belongs to;
    `private`: else the one that a run has started here for itself.

    Raises:
        ConfigError: there is none. Ray itself would retry for minutes; here a refused connection is
        an answer.
    """
    where = address or "this machine"
    remedy = "start one, or give --address or an emulated --cluster"
    if private:
        remedy = "one that `autohet train` started ends with it; --address names others"
    try:
        found = _reach(address, private=private)
    except (ConnectionError, OSError, ValueError) as error:
        raise ConfigError(f"no Ray cluster at {where}: {error}; {remedy}") from None
    try:
        ray.init(
            address=found,
            log_to_driver=False,
            logging_level=logging.ERROR,
            ignore_reinit_error=True,
            **options,
        )
    except (ConnectionError, ray.exceptions.RpcError) as error:
        raise ConfigError(f"no Ray cluster at {where}: {error}; {remedy}") from None


def living_nodes() -> list[RayNode]:
    """Return the GPU nodes that Ray counts as alive, in a stable order."""
    found = []
    for entry in ray.nodes():
        resources = entry.get("Resources", {})
        gpus = int(resources.get("GPU", 0))
        if entry["Alive"] and gpus > 0:
            labels = dict(entry.get("Labels") or {})
            group = labels.get(GROUP_LABEL, "")
            address, host = entry["NodeManagerAddress"], entry["NodeManagerHostname"]
            is_head = HEAD_RESOURCE in resources
            node = RayNode(entry["NodeID"], address, group, gpus, labels, host, is_head)
            if not group:
                # The autoscaler sets the label; nodes that were started by hand have none.
                node = replace(node, group=node.gpu_type or "node")
            found.append(node)
    return sorted(found, key=lambda node: node.node_id)


def count_nodes() -> int:
    return sum(entry["Alive"] for entry in ray.nodes())


def machine_addresses() -> set[str]:
    """Return the addresses of machines with living nodes; Ray nodes of one machine share one."""
    return {entry["NodeManagerAddress"] for entry in ray.nodes() if entry["Alive"]}


def autoscaler_runs() -> bool:
    """Return true if an autoscaler, of either version, has reported to the head."""
    if internal_kv._internal_kv_get(DEBUG_AUTOSCALING_STATUS.encode()) is not None:
        return True
    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    return int(status.stats.autoscaler_version or 0) > 0


def head_address() -> str:
    """Return the address at which other nodes reach this process."""
    return str(ray.util.get_node_ip_address())


def draining_nodes() -> dict[str, float | None]:
    """Return the seconds until the deadline of each draining node, by node id.

    None: the drain has no deadline.
    """
    now_ms = time.time() * 1000
    left_s: dict[str, float | None] = {}
    for node_id, deadline_ms in ray_state.get_draining_nodes().items():
        left_s[node_id] = None if deadline_ms == 0 else (deadline_ms - now_ms) / 1000
    return left_s


def directory_name(node: RayNode) -> str:
    """Return the name of a node's snapshot directories, the same as long as its raylet lives.

    A restarted driver numbers nodes again, and has to find the directories. A name from the node's
    label comes first, for people.
    """
    name = node.labels.get(NAME_LABEL)
    if name is None:
        return node.node_id[:16]
    return f"{name}-{node.node_id[:8]}"


def node_type_of(
    node: RayNode, cluster: Cluster | None, instance_type: str | None = None
) -> NodeType:
    """Return the planner's facts about a live node.

    They come from its labels, else its group's entry in the cluster file, else its instance type.

    Raises:
        ConfigError: a fact is missing; names the label that would supply it.
    """
    prefixes = ("autohet.io/", "ray.io/accelerator-type")
    labels = {key: value for key, value in node.labels.items() if key.startswith(prefixes)}
    known: NodeType | None = None
    if cluster is not None:
        kinds = {kind.name: kind for kind in cluster.node_types}
        known = kinds.get(node.group)
    try:
        found = node_type_from_labels(node.group, labels, node.num_gpus, instance_type)
    except ConfigError:
        if known is None:
            raise
        return known
    if "autohet.io/host-memory-gib" in labels:
        return found
    if known is None or known.host_memory_bytes is None:
        return found
    # The file's figures count, since a pod has less memory than its machine.
    return replace(found, host_memory_bytes=known.host_memory_bytes, host_cores=known.host_cores)


class ClusterMemory:
    """JSON document in Ray's key-value store, which outlives the driver but not the cluster.

    epoch: returns that of this driver, which saves nothing once a later one is in charge.
    """

    def __init__(self, what: str, run_id: str, epoch: Callable[[], int] | None = None) -> None:
        self._run_id = run_id
        self._epoch = epoch
        self._key = f"autohet:{what}:{run_id}".encode()

    def load(self) -> Document:
        """Return the document saved last; {} if there is none, or it cannot be read."""
        try:
            found = internal_kv._internal_kv_get(self._key)
            if found is None:
                return {}
            return dict(json.loads(found))
        except Exception:
            logger.warning("%s cannot be read", self._key.decode(), exc_info=True)
            return {}

    def save(self, document: Json) -> None:
        """Save the document for a restarted driver; best effort."""
        try:
            if self._epoch is not None and epoch_in_charge(self._run_id) > self._epoch():
                return
            internal_kv._internal_kv_put(self._key, json.dumps(document).encode(), overwrite=True)
        except Exception:
            logger.warning("%s cannot be kept", self._key.decode(), exc_info=True)


def epoch_in_charge(run_id: str) -> int:
    """Return the epoch of the driver that took charge of a run last; 0: none has."""
    return int(ClusterMemory("epoch", run_id).load().get("epoch", 0))


def publish_status(job: str, status: Json) -> None:
    """Store a job's status in Ray's key-value store, with the time."""
    document = {**status, "published_at": time.time()}
    internal_kv._internal_kv_put(
        STATUS_KEY + job.encode(), json.dumps(document).encode(), overwrite=True
    )


def read_statuses() -> dict[str, Document]:
    """Return the newest status of each job of this Ray cluster."""
    found = {}
    for key in internal_kv._internal_kv_list(STATUS_KEY):
        value = internal_kv._internal_kv_get(key)
        if value is not None:
            found[key[len(STATUS_KEY) :].decode()] = json.loads(value)
    return found
