"""Node labels that a pod needs: by selector, affinity and the Karpenter pools of its file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from planner.errors import ConfigError
from planner.inputs.catalogue import may_have_gpus
from planner.inputs.documents import Json, read_list, read_section, read_sections
from planner.inputs.machines import Conditions, Needed, possible_machines

LabelTerm = list[tuple[str, str, tuple[str, ...]]]
"""Expressions that hold together: label, operator and values."""
WELL_KNOWN = re.compile(
    r"((beta\.|node\.|topology\.)?kubernetes\.io|failure-domain\.beta\.kubernetes\.io"
    r"|karpenter\.(sh|k8s\.aws|azure\.com)|eks\.amazonaws\.com)/"
)
"""Labels that Karpenter gives nodes itself, whether or not a pool names them."""
POOLS = ("NodePool", "Provisioner")


def is_pool(document: Json) -> bool:
    """Return True for a NodePool of Karpenter, or a Provisioner as it was called before."""
    is_karpenters = str(document.get("apiVersion", "")).startswith("karpenter.sh/")
    return is_karpenters and document.get("kind") in POOLS


def required_labels(
    pod: Json, pools: Sequence[Json], num_gpus: int, requests: Mapping[str, float]
) -> tuple[Needed, Conditions]:
    """Return the values that each node label may have, and the conditions by other operators.

    The node selector and the required node affinity say them, whose terms are alternatives, and the
    pool on whose nodes the pod may be; pools of equal weight are alternatives, too.
    """
    found: dict[str, tuple[str, ...]] = {
        key: (str(value),) for key, value in read_section(pod, "nodeSelector").items()
    }
    affinity = read_section(read_section(pod, "affinity"), "nodeAffinity")
    needed = read_section(affinity, "requiredDuringSchedulingIgnoredDuringExecution")
    terms = [
        list(_expressions(term, "matchExpressions", "a node affinity"))
        for term in read_sections(needed, "nodeSelectorTerms")
    ]
    conditions = _add_alternatives(found, terms)
    if num_gpus:
        hosts: dict[int, list[LabelTerm]] = {}
        for pool in pools:
            term = _term_of(pool, pod, found)
            if term is not None and _has_room(term, num_gpus, requests):
                weight = int(read_section(pool, "spec").get("weight") or 0)
                hosts.setdefault(weight, []).append(term)
        if hosts:
            conditions += _add_alternatives(found, hosts[max(hosts)])
    return found, conditions


def _expressions(document: Json, key: str, what: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    for expression in read_sections(document, key):
        operator = str(expression.get("operator"))
        values: list[object] = []
        if operator not in ("Exists", "DoesNotExist"):
            values = read_list({"values": None, **expression}, "values", what)
        yield str(expression.get("key")), operator, tuple(map(str, values))


def _add_alternatives(found: dict[str, tuple[str, ...]], terms: list[LabelTerm]) -> Conditions:
    """Add to `found` what all of these terms say; return the conditions that all have."""
    if not terms:
        return []
    for key, operator, _ in terms[0]:
        named = [[each[2] for each in term if each[:2] == (key, "In")] for term in terms]
        if operator != "In" or not all(named):
            continue
        values = dict.fromkeys(value for lists in named for value in lists[0])
        # what was known holds too
        found[key] = tuple(v for v in found.get(key, values) if v in values) or found[key]
    return [
        each for each in terms[0] if each[1] != "In" and all(each in term for term in terms[1:])
    ]


def _term_of(pool: Json, pod: Json, needed: Needed) -> LabelTerm | None:
    """Return what holds for the nodes of a pool; None if the pod cannot be on them."""
    spec = read_section(pool, "spec")
    template = spec.get("template") or {"metadata": {"labels": spec.get("labels")}, "spec": spec}
    inner = read_section(template, "spec")
    name = str(read_section(pool, "metadata").get("name"))
    labels = {
        "karpenter.sh/nodepool": name,
        "karpenter.sh/provisioner-name": name,
        **read_section(read_section(template, "metadata"), "labels"),
    }
    term: LabelTerm = [(key, "In", (str(value),)) for key, value in labels.items()]
    term += _expressions(inner, "requirements", f"NodePool '{name}'")
    allowed = {key: values for key, operator, values in term if operator == "In"}
    known = {key for key, operator, _ in term if operator != "DoesNotExist"}
    for key, values in needed.items():
        if key in allowed and not {*values} & {*allowed[key]}:
            return None
        if key not in known and not WELL_KNOWN.match(key):
            return None
    tolerations = read_sections(pod, "tolerations")
    for taint in read_sections(inner, "taints"):
        is_hard = taint.get("effect") != "PreferNoSchedule"
        if is_hard and not any(_tolerates(each, taint) for each in tolerations):
            return None
    return term


def _tolerates(toleration: Json, taint: Json) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("key") not in (None, "", taint.get("key")):
        return False
    is_any = toleration.get("operator") == "Exists"
    return is_any or (toleration.get("value") or "") == (taint.get("value") or "")


def _has_room(term: LabelTerm, num_gpus: int, requests: Mapping[str, float]) -> bool:
    """Return True unless no machine of the pool has room for the pod."""
    needed = {key: values for key, operator, values in term if operator == "In"}
    try:
        machines = possible_machines(needed, term, num_gpus, requests, "")
    except ConfigError:
        return False
    return not machines or any(map(may_have_gpus, machines))
