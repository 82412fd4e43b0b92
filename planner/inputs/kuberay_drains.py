"""Warnings on worker groups of a KubeRay cluster whose pods end without a notice, or for no reason.

Kubernetes ends a pod for a spot interruption, a drain and a consolidation alike. KubeRay starts
`ray start` below a shell, which does not pass SIGTERM on: without a hook the node just dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from planner.inputs.documents import Json, is_integer, read_section, read_sections

DEFAULT_GRACE_S = 30
LEAST_GRACE_S = 60
"""Seconds that moving a small model's state away and a Ray drain need."""
OWN_COMMAND = "ray.io/overwrite-container-cmd"
"""Annotation of a cluster whose containers have commands of their own."""
KEEP = {
    "karpenter.sh/do-not-disrupt": "true",
    "karpenter.sh/do-not-evict": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}
"""Annotations that keep a pod from consolidation: Karpenter (now and before 1.0), GKE and AKS."""


def drain_notes(groups: Iterable[Json], annotations: Json) -> list[str]:
    """Return a warning for each lack, with the groups that have it."""
    scaled = [group for group in groups if isinstance(group, Mapping)]
    found = []
    if str(annotations.get(OWN_COMMAND, "")).lower() != "true":
        found += _note(
            scaled,
            _tells_ray,
            "a drain or spot interruption is a crash there, since no preStop hook sends SIGTERM to"
            " `ray start` (cluster_configs/kuberay-raycluster.yaml has one)",
        )
    found += _note(
        scaled,
        lambda group: _grace_s(group) >= LEAST_GRACE_S,
        f"Kubernetes kills their pods less than {LEAST_GRACE_S} s after a notice; set"
        " terminationGracePeriodSeconds: 110",
    )
    found += _note(
        scaled,
        _is_kept,
        "a consolidation may move their pods at any time; annotate the pod template with"
        ' karpenter.sh/do-not-disrupt: "true" (GKE, AKS:'
        ' cluster-autoscaler.kubernetes.io/safe-to-evict: "false")',
    )
    return found


def _note(groups: list[Json], is_safe: Callable[[Json], bool], words: str) -> list[str]:
    names = [str(group.get("groupName")) for group in groups if not is_safe(group)]
    if not names:
        return []
    plural = "s" if len(names) > 1 else ""
    return [f"worker group{plural} {', '.join(names)}: {words}"]


def _template(group: Json, part: str) -> Json:
    template = group.get("template")
    found = template.get(part) if isinstance(template, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _tells_ray(group: Json) -> bool:
    """Return True if a hook of the pod signals `ray start`, or drains the node."""
    for container in read_sections(_template(group, "spec"), "containers"):
        hook = read_section(read_section(container, "lifecycle"), "preStop")
        command = read_section(hook, "exec").get("command") or ()
        text = " ".join(map(str, command))
        # `ray stop`, which many files have, ends Ray at once.
        if "kill" in text or "drain" in text:
            return True
    return False


def _grace_s(group: Json) -> float:
    seconds = _template(group, "spec").get("terminationGracePeriodSeconds")
    # What is no count is Kubernetes' to refuse.
    return seconds if is_integer(seconds) else DEFAULT_GRACE_S


def _is_kept(group: Json) -> bool:
    annotations = _template(group, "metadata").get("annotations")
    if not isinstance(annotations, Mapping):
        return False
    return any(str(annotations.get(key)).lower() == value for key, value in KEEP.items())
