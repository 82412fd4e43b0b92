"""Pods of a KubeRay cluster that have not joined Ray, by the conditions that Kubernetes reports.

The driver runs in the head's pod, whose service account KubeRay lets list the cluster's pods.
"""

import os
from pathlib import Path

from ray.autoscaler._private.kuberay.node_provider import (
    KUBERAY_KIND_WORKER,
    KUBERAY_LABEL_KEY_KIND,
    KUBERAY_LABEL_KEY_TYPE,
    KubernetesHttpApiClient,
)

from autohet.control.values.observation import StartingNode, StartState
from autohet.driver.sources.watch import Watch
from planner.inputs.documents import Json

POLL_S = 5.0
NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
ORDINARY_WAITS = ("ContainerCreating", "PodInitializing")
"""Reasons of a container's wait that are no error."""
MAX_WORDS = 200


class Pods:
    """Polls Kubernetes in a thread of its own, since its answer may take a minute.

    Without the rights, `starting` is None and Ray's own view has to do; that is logged once.
    """

    def __init__(self, cluster_name: str) -> None:
        self._path = f"pods?labelSelector=ray.io/cluster%3D{cluster_name}"
        self._client: KubernetesHttpApiClient | None = None
        self._watch = Watch("Kubernetes' list of pods", self._ask, POLL_S)

    def starting(self) -> tuple[StartingNode, ...] | None:
        """Return the pods that have not joined Ray; None if Kubernetes does not tell."""
        # An answer of long ago says nothing of today's pods.
        return None if self._watch.trouble else self._watch.answer

    def _ask(self) -> tuple[StartingNode, ...]:
        if self._client is None:
            self._client = KubernetesHttpApiClient(NAMESPACE.read_text().strip())
        found = []
        for pod in self._client.get(self._path)["items"]:
            node = starting_node(pod)
            if node is not None:
                found.append(node)
        return tuple(found)

    def close(self) -> None:
        self._watch.close()


def pods_of_this_cluster() -> Pods | None:
    """Return a watch of this cluster's pods; None outside a pod of KubeRay."""
    name = os.environ.get("RAY_CLUSTER_NAME")
    if "KUBERNETES_SERVICE_HOST" not in os.environ or not name:
        return None
    return Pods(name)


def starting_node(pod: Json) -> StartingNode | None:
    """Return a worker's pod that has not joined Ray; None for any other pod."""
    labels = pod["metadata"].get("labels") or {}
    status = pod.get("status") or {}
    is_ending = "deletionTimestamp" in pod["metadata"] or status.get("phase") in (
        "Succeeded",
        "Failed",
    )
    if labels.get(KUBERAY_LABEL_KEY_KIND) != KUBERAY_KIND_WORKER or is_ending:
        return None
    conditions = {each["type"]: each for each in status.get("conditions") or []}
    # KubeRay's readiness probe asks the node's raylet.
    if conditions.get("Ready", {}).get("status") == "True":
        return None

    state, why = _state(status, conditions.get("PodScheduled", {}))
    name = pod["metadata"]["name"]
    words = " ".join(why.split())[:MAX_WORDS]
    return StartingNode(name, labels[KUBERAY_LABEL_KEY_TYPE], state, 0.0, words)


def _state(status: Json, scheduled: Json) -> tuple[StartState, str]:
    """Return the state of a pod that is not ready, and Kubernetes' words for it."""
    if scheduled.get("status") != "True":
        if status.get("nominatedNodeName"):
            # A machine is meant for it: the scheduler, or who brings machines, has said so.
            return StartState.STARTING, ""
        if not scheduled:
            return StartState.REQUESTED, ""
        return StartState.UNSCHEDULABLE, scheduled.get("message") or scheduled.get("reason", "")

    for key in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(key) or []:
            waiting = container.get("state", {}).get("waiting") or {}
            reason = waiting.get("reason", "")
            if reason and reason not in ORDINARY_WAITS:
                return StartState.STUCK, f"{reason}: {waiting.get('message', '')}".strip(": ")
    return StartState.STARTING, ""
