"""KubeRay's documents as KubeRay and Ray mean them, in forms that public files have."""

import copy
import itertools
import random
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.errors import ConfigError
from planner.inputs.cluster import cluster_from_document, cluster_from_yaml
from planner.inputs.documents import quantity
from planner.inputs.fleet import NodeType
from planner.inputs.kuberay import as_launcher_document
from planner.inputs.machines import device_name

LABELS = {"autohet.io/intra-node-gbps": "128", "autohet.io/inter-node-gbps": "16"}


def group(name: str = "gpu", *, gpus: Any = "1", selector: Any = None, **more: Any) -> Any:
    container = {
        "name": "ray",
        "resources": {"limits": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": gpus}},
    }
    pod = {"containers": [container], "nodeSelector": selector or {}}
    found = {"groupName": name, "minReplicas": 0, "maxReplicas": 4, "template": {"spec": pod}}
    return found | more


def cluster(*groups: Any, **more: Any) -> dict[str, Any]:
    head = {"template": {"spec": {"containers": [{"resources": {"limits": {"cpu": "2"}}}]}}}
    spec = {"enableInTreeAutoscaling": True, "headGroupSpec": head, "workerGroupSpecs": [*groups]}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "c", "namespace": "default"},
        "spec": spec | more,
    }


def on(instance: str) -> dict[str, str]:
    return {"node.kubernetes.io/instance-type": instance}


def kinds_of(document: dict[str, Any]) -> dict[str, NodeType]:
    launcher = as_launcher_document(document, "the file")
    return {kind.name: kind for kind in cluster_from_document(launcher).node_types}


def test_a_pod_with_a_part_of_its_machine_has_that_part_of_price_network_and_memory() -> None:
    part = group("part", gpus="2", selector=on("p4d.24xlarge"))
    del part["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
    whole = group("whole", gpus="8", selector=on("p4d.24xlarge"))
    kinds = kinds_of(cluster(part, whole))
    assert kinds["part"].usd_per_hour == pytest.approx(kinds["whole"].usd_per_hour / 4)
    assert kinds["part"].inter_node_bytes_per_s == kinds["whole"].inter_node_bytes_per_s / 4
    assert kinds["part"].intra_node_bytes_per_s == kinds["whole"].intra_node_bytes_per_s
    assert kinds["part"].host_memory_bytes == 1152 * 2**30 / 4
    with pytest.raises(ConfigError, match=r"16 GPUs on a p4d\.24xlarge, which has 8"):
        kinds_of(cluster(group(gpus="16", selector=on("p4d.24xlarge"))))


def test_a_group_without_a_bound_is_refused_and_does_not_hang() -> None:
    begin = time.monotonic()
    for document in (
        cluster(group(selector=on("g5.xlarge"), maxReplicas=2147483647)),
        cluster(group(selector=on("g5.xlarge"), maxReplicas=2147483647, numOfHosts=2)),
    ):
        with pytest.raises(ConfigError, match="has no bound: maxReplicas is 2147483647"):
            kinds_of(document)
    assert time.monotonic() - begin < 60


def test_without_an_autoscaler_the_replicas_are_the_nodes() -> None:
    """As KubeRay makes them: within the bounds, maxReplicas absent is the API's default."""
    for replicas, least, most, expected in (
        (3, 0, 2147483647, 3),
        (3, 0, 2, 2),
        (0, 1, 4, 1),
        (None, 1, 4, 1),
    ):
        sizes = {"replicas": replicas, "minReplicas": least, "maxReplicas": most}
        one = group(selector=on("g5.xlarge"), **sizes)
        if replicas is None:
            del one["replicas"]
        document = cluster(one, enableInTreeAutoscaling=False)
        launcher = as_launcher_document(document, "the file")
        entry = launcher["available_node_types"]["gpu"]
        assert (entry["min_workers"], entry["max_workers"]) == (expected, expected)
    nowhere = group(selector=on("g5.xlarge"))
    del nowhere["maxReplicas"]
    nowhere["replicas"] = 2
    assert kinds_of(cluster(nowhere, enableInTreeAutoscaling=False))["gpu"].max_nodes == 2


def test_a_suspended_group_has_no_pods_and_a_suspended_cluster_says_so() -> None:
    document = cluster(group("a", selector=on("g5.xlarge")), group("b", selector=on("g6.xlarge")))
    document["spec"]["workerGroupSpecs"][1]["suspend"] = True
    found = cluster_from_document(as_launcher_document(document, "the file"))
    assert [kind.name for kind in found.node_types] == ["a"]
    assert "worker group 'b' is suspended" in found.notes[0]
    document["spec"]["suspend"] = True
    notes = cluster_from_document(as_launcher_document(document, "the file")).notes
    assert any("the file is suspended" in note for note in notes)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"minReplicas": 5}, "minReplicas 5 above maxReplicas 4"),
        ({"minReplicas": "two"}, "minReplicas of worker group 'gpu' must be a count, not 'two'"),
        ({"rayStartParams": {"num-gpus": "0.5"}}, "num-gpus of group 'gpu' must be a whole number"),
        ({"resources": {"GPU": "half"}}, "GPU of group 'gpu' must be a quantity"),
    ],
)
def test_what_is_wrong_is_named_without_a_traceback(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        kinds_of(cluster(group(selector=on("g5.xlarge"), **change)))


def test_all_that_groups_lack_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        kinds_of(cluster(group("a"), group("b", minReplicas=9)))
    assert "'b' has minReplicas 9" in str(refused.value)
    with pytest.raises(ConfigError) as refused:
        kinds_of(cluster(group("a"), group("b")))
    for name in ("'a'", "'b'"):
        assert f"node type {name} has no gpu type" in str(refused.value)


def test_market_and_instance_type_are_read_from_labels_and_affinity() -> None:
    terms = [
        {"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]}
        for key, value in (("node.kubernetes.io/instance-type", "g6.2xlarge"),)
    ]
    terms[0]["matchExpressions"].append(
        {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["spot"]}
    )
    one = group("affinity")
    rule = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    one["template"]["spec"]["affinity"] = {"nodeAffinity": rule}
    two = group("label", selector=on("g6.2xlarge"), labels={"ray.io/market-type": "spot"})
    three = group("both", selector=on("g6.2xlarge"))
    either = copy.deepcopy(rule)
    values = either["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"][0]
    values["matchExpressions"][1]["values"] = ["spot", "on-demand"]
    three["template"]["spec"]["affinity"] = {"nodeAffinity": either}
    kinds = kinds_of(cluster(one, two, three))
    assert {name: (kind.gpu_type, kind.spot) for name, kind in kinds.items()} == {
        "affinity": ("L4", True),
        "label": ("L4", True),
        "both": ("L4", False),
    }


@pytest.mark.parametrize(
    ("label", "value", "gpu_type"),
    [
        ("nvidia.com/gpu.product", "NVIDIA-A100-SXM4-80GB", "A100-80"),
        ("nvidia.com/gpu.product", "NVIDIA-A100-SXM4-40GB", "A100-40"),
        ("nvidia.com/gpu.product", "NVIDIA-H100-80GB-HBM3", "H100-80"),
        ("nvidia.com/gpu.product", "Tesla-V100-SXM2-32GB", "V100-32"),
        ("nvidia.com/gpu.product", "NVIDIA-L40S", "L40S"),
        ("cloud.google.com/gke-accelerator", "nvidia-tesla-t4", "T4"),
        ("cloud.google.com/gke-accelerator", "nvidia-l4", "L4"),
        ("cloud.google.com/gke-accelerator", "nvidia-tesla-a100", "A100-40"),
        ("cloud.google.com/gke-accelerator", "nvidia-a100-80gb", "A100-80"),
        ("cloud.google.com/gke-accelerator", "nvidia-h100-mega-80gb", "H100-80"),
        ("cloud.google.com/gke-accelerator", "nvidia-h200-141gb", "H200"),
        ("k8s.amazonaws.com/accelerator", "nvidia-tesla-v100", "V100-16"),
        ("karpenter.k8s.aws/instance-gpu-name", "a10g", "A10G"),
    ],
)
def test_gpus_are_known_by_the_labels_of_their_nodes(label: str, value: str, gpu_type: str) -> None:
    kinds = kinds_of(cluster(group(selector={label: value}, labels=dict(LABELS))))
    assert kinds["gpu"].gpu_type == gpu_type


def test_a_name_that_nobody_knows_stays_as_it_is() -> None:
    assert device_name("ACME-XPU-9000") == "ACME-XPU-9000"


@pytest.mark.parametrize(
    ("text", "value"),
    [("8", 8), ("500m", 0.5), ("1.5Gi", 1.5 * 2**30), ("2k", 2e3), ("1e3", 1e3), ("12E", 12e18)],
)
def test_quantities_are_kubernetes(text: str, value: float) -> None:
    """As the client library that KubeRay's autoscaler ships reads them."""
    from ray.autoscaler._private.kuberay.utils import parse_quantity

    assert quantity(text) == pytest.approx(float(parse_quantity(text)))
    assert quantity(text) == pytest.approx(value)
    assert quantity("half") is None


def test_labels_are_refused_where_ray_refuses_them() -> None:
    """Ray's own check ends its autoscaler. Wrong: a plan for groups that never start."""
    from ray._private.label_utils import validate_node_label_syntax

    chance = random.Random(0)
    words = ["".join(chance.choices("a.-_/Z9 !", k=chance.randrange(1, 5))) for _ in range(400)]
    words += ["x" * 63, "x" * 64, "a.b/" + "x" * 63, "team.io/pool", ""]
    for key, value in itertools.product(("pool", ""), words):
        labels = {key: value} if key else {value: "x"}
        theirs = ours = None
        try:
            validate_node_label_syntax(labels)
        except ValueError as error:
            theirs = error
        try:
            as_launcher_document(cluster(group(labels=labels)), "f")
        except ConfigError as error:
            ours = error
        assert (ours is None) == (theirs is None), labels


def test_one_cluster_is_found_among_the_documents_of_a_file(tmp_path: Path) -> None:
    """Most public files hold accounts, volumes or a service beside the cluster."""
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "a"}}
    one = cluster(group(selector=on("g5.xlarge")))
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump_all([account, one, None]))
    assert cluster_from_yaml(path).node_types[0].gpu_type == "A10G"
    path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [account, one]}))
    assert cluster_from_yaml(path).node_types[0].gpu_type == "A10G"
    wrapper: dict[str, Any] = {"apiVersion": "workload.codeflare.dev/v1beta2", "kind": "AppWrapper"}
    wrapper["spec"] = {"components": [{"template": one}]}
    path.write_text(yaml.safe_dump(wrapper))
    assert cluster_from_yaml(path).node_types[0].gpu_type == "A10G"
    path.write_text(yaml.safe_dump_all([account, one, one]))
    with pytest.raises(ConfigError, match=r"holds 2 clusters \(RayCluster c, RayCluster c\)"):
        cluster_from_yaml(path)


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("RayJob", lambda spec: {"rayClusterSpec": spec}),
        ("RayService", lambda spec: {"rayClusterConfig": spec}),
        ("RayCronJob", lambda spec: {"jobTemplate": {"rayClusterSpec": spec}}),
    ],
)
def test_whatever_brings_a_cluster_is_one(kind: str, spec: Any) -> None:
    document = cluster(group(selector=on("g5.xlarge")))
    brought = document | {"kind": kind, "spec": spec(document["spec"])}
    assert kinds_of(brought) == kinds_of(document)


def test_gpus_that_are_not_planned_on_are_named() -> None:
    sliced = group("slices", selector=on("g5.xlarge"))
    limits = sliced["template"]["spec"]["containers"][0]["resources"]["limits"]
    limits["nvidia.com/mig-1g.5gb"] = limits.pop("nvidia.com/gpu")
    found = cluster_from_document(
        as_launcher_document(cluster(sliced, group(selector=on("g5.xlarge"))), "the file")
    )
    assert [kind.name for kind in found.node_types] == ["gpu"]
    assert any("parts of a GPU (nvidia.com/mig-1g.5gb)" in note for note in found.notes)


HOOK = {"preStop": {"exec": {"command": ["/bin/bash", "-c", "pkill -TERM -f 'bin/ra[y] start'"]}}}
KEPT = {"annotations": {"karpenter.sh/do-not-disrupt": "true"}}


def lacks_of(document: dict[str, Any]) -> set[str]:
    """Return the lacks that the document's warnings name, each with its groups."""
    notes = as_launcher_document(document, "the file")["notes"]
    words = {"crash": "hook", "kills": "grace", "consolidation": "kept"}
    return {
        f"{words[word]} {note.split(':')[0]}" for note in notes for word in words if word in note
    }


def safe(name: str = "gpu") -> Any:
    made = group(name)
    made["template"]["metadata"] = copy.deepcopy(KEPT)
    made["template"]["spec"]["terminationGracePeriodSeconds"] = 110
    made["template"]["spec"]["containers"][0]["lifecycle"] = copy.deepcopy(HOOK)
    return made


def test_groups_whose_drain_is_a_crash_or_whose_pods_may_be_moved_are_named() -> None:
    assert lacks_of(cluster(safe())) == set()
    assert lacks_of(cluster(group("a"), safe("b"), group("c"))) == {
        "hook worker groups a, c",
        "grace worker groups a, c",
        "kept worker groups a, c",
    }


@pytest.mark.parametrize("command", [["ray", "stop"], ["sh", "-c", "sleep 30"]])
def test_a_hook_that_does_not_tell_ray_start_is_none(command: list[str]) -> None:
    made = safe()
    hook = made["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]
    hook["exec"]["command"] = command
    assert lacks_of(cluster(made)) == {"hook worker group gpu"}


def test_other_autoscalers_and_commands_of_ones_own_are_known() -> None:
    made = safe()
    made["template"]["metadata"]["annotations"] = {
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"
    }
    del made["template"]["spec"]["containers"][0]["lifecycle"]
    document = cluster(made)
    document["metadata"]["annotations"] = {"ray.io/overwrite-container-cmd": "true"}
    assert lacks_of(document) == set()


def test_the_shipped_cluster_has_none_of_these_lacks() -> None:
    configs = Path(__file__).parents[2] / "cluster_configs"
    assert cluster_from_yaml(configs / "kuberay-raycluster.yaml").notes == ()
    cluster = yaml.safe_load((configs / "kuberay-raycluster.yaml").read_text())
    budget = yaml.safe_load((configs / "kuberay-disruptionbudget.yaml").read_text())
    head = {"ray.io/cluster": cluster["metadata"]["name"], "ray.io/node-type": "head"}
    assert budget["spec"]["selector"]["matchLabels"] == head
    pods = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    assert all(each["template"]["metadata"]["annotations"] for each in pods)


@pytest.mark.parametrize(
    ("gpus", "cpus", "share"),
    [("1", "40", 1.0), ("1", "20", 0.5), ("1", "12", 0.25), ("2", "4", 0.5), ("3", "4", 1.0)],
)
def test_a_pod_takes_of_its_machine_what_no_other_of_its_kind_can_have(
    gpus: str, cpus: str, share: float
) -> None:
    """A g5.12xlarge has 4 GPUs and 48 vCPUs: beside 40 of them no second pod starts."""
    pod = group(gpus=gpus, selector=on("g5.12xlarge"))
    limits = pod["template"]["spec"]["containers"][0]["resources"]["limits"]
    limits["cpu"] = cpus
    assert kinds_of(cluster(pod))["gpu"].usd_per_hour == pytest.approx(5.672 * share)
    limits["cpu"] = "64"
    with pytest.raises(ConfigError, match=r"64 vCPUs on a g5\.12xlarge, which has 48"):
        kinds_of(cluster(pod))


@pytest.mark.parametrize(
    ("gpus", "memory", "start", "share"),
    [("1", "100Gi", {}, 1.0), ("1", "60Gi", {}, 1 / 3), ("4", "8Gi", {"num-gpus": "2"}, 1.0)],
)
def test_memory_and_gpus_that_ray_is_not_to_use_keep_others_away_too(
    gpus: str, memory: str, start: dict[str, str], share: float
) -> None:
    """Wrong: a pod with 100 of 192 GiB costs a quarter, and one that hides two of its GPUs half."""
    pod = group(gpus=gpus, selector=on("g5.12xlarge"), rayStartParams=start)
    limits = pod["template"]["spec"]["containers"][0]["resources"]["limits"]
    limits["memory"] = memory
    assert kinds_of(cluster(pod))["gpu"].usd_per_hour == pytest.approx(5.672 * share)
    limits["memory"] = "200Gi"
    with pytest.raises(ConfigError, match=r"200 GiB of memory on a g5\.12xlarge, which has 192"):
        kinds_of(cluster(pod))


@pytest.mark.parametrize(
    ("selector", "gpus", "expected"),
    [
        (
            {
                "karpenter.k8s.aws/instance-family": "g5",
                "karpenter.k8s.aws/instance-size": "xlarge",
            },
            "1",
            ("A10G", 1.006),
        ),
        ({"karpenter.k8s.aws/instance-family": "g5"}, "8", ("A10G", 16.288)),
        ({"karpenter.k8s.aws/instance-gpu-name": "l40s"}, "4", ("L40S", 15.06559)),
        ({"eks.amazonaws.com/instance-family": "p4de"}, "8", ("A100-80", 27.44705)),
        (
            {
                "karpenter.k8s.aws/instance-category": "p",
                "karpenter.k8s.aws/instance-generation": "4",
                "karpenter.k8s.aws/instance-gpu-name": "a100",
                "node.kubernetes.io/instance-type": "p4d.24xlarge",
            },
            "8",
            ("A100-40", 21.957642),
        ),
        ({"cloud.google.com/gke-accelerator": "nvidia-h100-mega-80gb"}, "8", ("H100-80", None)),
        ({"cloud.google.com/gke-accelerator": "nvidia-a100-80gb"}, "1", ("A100-80", None)),
        ({"karpenter.azure.com/sku-name": "Standard_NC24ads_A100_v4"}, "1", ("A100-80", None)),
    ],
)
def test_machines_are_known_by_what_their_labels_leave(
    selector: dict[str, str], gpus: str, expected: tuple[str, float | None]
) -> None:
    """Of several that remain the dearest counts, and the least of each figure."""
    kind = kinds_of(cluster(group(gpus=gpus, selector=selector)))["gpu"]
    price = kind.usd_per_hour
    assert (kind.gpu_type, price if price is None else pytest.approx(price)) == expected


def of_types(*names: str) -> dict[str, Any]:
    term = {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": list(names)}
    required = {"nodeSelectorTerms": [{"matchExpressions": [term]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def test_several_types_are_planned_as_the_least_and_priced_as_the_dearest() -> None:
    pod = group()
    pod["template"]["spec"]["affinity"] = of_types("g6e.2xlarge", "g6e.4xlarge")
    kind = kinds_of(cluster(pod))["gpu"]
    assert (kind.gpu_type, kind.usd_per_hour) == ("L40S", 3.00424)
    assert kind.inter_node_bytes_per_s == 5e9 / 8
    pod["template"]["spec"]["affinity"] = of_types("g6e.2xlarge", "g5.4xlarge")
    with pytest.raises(ConfigError, match=r"g5\.4xlarge, g6e\.2xlarge.*A10G, L40S"):
        kinds_of(cluster(pod))
    with pytest.raises(ConfigError, match="no machine of the catalogue with these labels"):
        kinds_of(cluster(group(gpus="16", selector={"karpenter.k8s.aws/instance-family": "g5"})))


AMD64 = "kubernetes.io/arch In amd64"
KARPENTER = "karpenter.k8s.aws/instance-"


def expression(text: str) -> dict[str, Any]:
    """As `family In g5 g6`, which is of Karpenter's label instance-family."""
    key, operator, *values = text.split()
    return {"key": key if "/" in key else KARPENTER + key, "operator": operator, "values": values}


@pytest.mark.parametrize(
    ("expressions", "expected"),
    [
        (["family In g5 g4dn", "generation Gt 4", "gpu-count Lt 4"], ("A10G", 4.096)),
        (["family In g5", "size NotIn 12xlarge 16xlarge 24xlarge 48xlarge"], ("A10G", 2.448)),
        (["family In p4d p4de", "gpu-memory Gte 80000"], ("A100-80", 27.44705 / 8)),
        (["category In g", "cpu Lte 4", "gpu-name NotIn t4 l4 l40s", AMD64], ("A10G", 1.006)),
        (["family In g6e", "node.kubernetes.io/instance-type NotIn g6e.48xlarge"], ("L40S", None)),
        (["category In g", "gpu-memory In 22888", "generation Lt 6"], ("A10G", 4.096)),
        (["category In p", "generation Gt 5", "gpu-name NotIn b200 b300", AMD64], ("", None)),
        (["generation Gt five", "family In p5 p4d", "memory Gt 1500000"], ("H100-80", None)),
    ],
)
def test_operators_of_karpenter_narrow_the_machines(
    expressions: list[str], expected: tuple[str, float | None]
) -> None:
    """Wrong: only In is read, so that machines remain that no node may be."""
    pod = group()
    required = {"nodeSelectorTerms": [{"matchExpressions": [*map(expression, expressions)]}]}
    rule = {"requiredDuringSchedulingIgnoredDuringExecution": required}
    pod["template"]["spec"]["affinity"] = {"nodeAffinity": rule}
    if not expected[0]:
        with pytest.raises(ConfigError, match="no machine of the catalogue with these labels"):
            kinds_of(cluster(pod))
        return
    kind = kinds_of(cluster(pod))["gpu"]
    assert kind.gpu_type == expected[0]
    assert expected[1] is None or kind.usd_per_hour == pytest.approx(expected[1])


def pool(name: str, *requirements: str, taints: Any = (), labels: Any = None, **more: Any) -> Any:
    spec = {"requirements": [*map(expression, requirements)], "taints": [*taints]}
    template = {"metadata": {"labels": labels or {}}, "spec": spec}
    return {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": name},
        "spec": {"template": template, **more},
    }


TAINT = {"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}
SPOT = ("family In g5", "size In xlarge", "karpenter.sh/capacity-type In spot")
CPUS = ("family In c6i m6i", "karpenter.sh/capacity-type In on-demand")


@pytest.mark.parametrize(
    ("pools", "pod", "expected"),
    [
        ([pool("cpus", *CPUS), pool("gpus", *SPOT, taints=[TAINT])], {}, ("A10G", True)),
        ([pool("a", *SPOT), pool("b", "family In g6")], {"karpenter.sh/nodepool": "b"}, ("L4", 0)),
        ([pool("a", *SPOT), pool("b", "family In g6", weight=9)], {}, ("L4", False)),
        ([pool("a", *SPOT, labels={"team": "x"})], {"team": "x"}, ("A10G", True)),
        ([pool("a", *SPOT), pool("b", "family In g6", "team/ Exists")], {"team/": "y"}, ("L4", 0)),
        ([pool("a", "family In p5 p4d", "cpu Gt 100"), pool("b", *SPOT)], {}, None),
    ],
)
def test_pools_of_karpenter_beside_the_cluster_say_what_its_nodes_are(
    pools: list[Any], pod: dict[str, str], expected: tuple[str, bool] | None, tmp_path: Path
) -> None:
    """Wrong: the pool is skipped as other documents are, and "it names no instance type"."""
    gpus = group(selector=pod)
    gpus["template"]["spec"]["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump_all([*pools, cluster(gpus)]))
    if expected is None:
        with pytest.raises(ConfigError, match=r"no gpu type|whose GPUs differ"):
            cluster_from_yaml(path)
        return
    (kind,) = cluster_from_yaml(path).node_types
    assert (kind.gpu_type, kind.spot) == expected


ON_DEMAND = ("family In g5", "size In xlarge 12xlarge", "karpenter.sh/capacity-type In on-demand")


def limited(name: str, *requirements: str, weight: int = 0, **limits: Any) -> Any:
    limits = {"nvidia.com/gpu" if key == "gpu" else key: value for key, value in limits.items()}
    return pool(name, *requirements, weight=weight, limits=limits)


def queue(*quotas: tuple[str, int, dict[str, str]], **more: Any) -> list[Any]:
    """Kueue's LocalQueue 'team', whose flavors have these quotas of GPUs and labels of nodes."""
    kinds = {"apiVersion": "kueue.x-k8s.io/v1beta1"}
    flavors = [
        {"name": name, "resources": [{"name": "nvidia.com/gpu", "nominalQuota": quota}]}
        for name, quota, _ in quotas
    ]
    group = {"coveredResources": ["nvidia.com/gpu"], "flavors": flavors}
    found = [
        {
            **kinds,
            "kind": "LocalQueue",
            "metadata": {"name": "team"},
            "spec": {"clusterQueue": "q"},
        },
        {
            **kinds,
            "kind": "ClusterQueue",
            "metadata": {"name": "q"},
            "spec": {"resourceGroups": [group], **more},
        },
    ]
    for name, _, labels in quotas:
        spec = {"nodeLabels": labels, "tolerations": [{"operator": "Exists"}]}
        found.append({**kinds, "kind": "ResourceFlavor", "metadata": {"name": name}, "spec": spec})
    return found


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ([limited("a", *SPOT, gpu=3)], ("A10G", 3, True)),
        ([limited("a", *SPOT, cpu="11")], ("A10G", 2, True)),
        ([limited("a", *SPOT, memory="40Gi", cpu=100)], ("A10G", 2, True)),
        ([limited("a", *SPOT, nodes=1)], ("A10G", 1, True)),
        ([limited("a", "family In g5", "size In 12xlarge", cpu=100)], ("A10G", 4, False)),
        ([limited("a", "family In g6", gpu=0), pool("b", *SPOT)], ("A10G", 4, True)),
        ([limited("a", *SPOT, gpu=2), limited("b", *SPOT, gpu=1)], ("A10G", 3, True)),
        ([limited("a", *SPOT, gpu=2, weight=9), pool("b", *ON_DEMAND)], ("A10G", 4, False)),
        ([limited("a", *SPOT, gpu=4, weight=9), pool("b", *ON_DEMAND)], ("A10G", 4, True)),
        (queue(("t4", 0, on("g4dn.xlarge")), ("a10", 4, on("g5.xlarge"))), ("A10G", 4, False)),
        (queue(("t4", 3, on("g4dn.xlarge")), ("a10", 2, on("g5.xlarge"))), ("T4", 3, False)),
        (queue(("t4", 3, on("g4dn.xlarge")), cohort="all"), ("T4", 4, False)),
        ([*queue(("any", 9, {})), limited("a", *SPOT, gpu=3)], ("A10G", 3, True)),
        (
            [
                *queue(("x", 9, {"team": "x"})),
                pool("a", *SPOT, taints=[TAINT], labels={"team": "x"}),
            ],
            ("A10G", 4, True),
        ),
    ],
)
def test_limits_of_pools_and_quotas_of_queues_bound_the_nodes(
    beside: list[Any], expected: tuple[str, int, bool], tmp_path: Path
) -> None:
    """Wrong: maxReplicas of which Karpenter or Kueue lets fewer start, without a word."""
    document = cluster(group())
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump_all([*beside, document]))
    found = cluster_from_yaml(path)
    (kind,) = found.node_types
    assert (kind.gpu_type, kind.max_nodes, kind.spot) == expected
    assert any("of its 4 nodes" in note for note in found.notes) == (kind.max_nodes < 4)
    assert any("elastic-job" in note for note in found.notes)


def test_what_kueue_never_admits_is_a_sentence() -> None:
    """Without an autoscaler all pods of a cluster are admitted, or none."""
    document = cluster(group(replicas=4), enableInTreeAutoscaling=False)
    document["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    queues = queue(("t4", 3, on("g4dn.xlarge")))
    with pytest.raises(ConfigError, match="no flavor of ClusterQueue 'q' has room for its 4 nodes"):
        as_launcher_document(document, "the file", queues)


def test_a_pool_whose_taint_a_pod_does_not_tolerate_has_none_of_it(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump_all([pool("gpus", *SPOT, taints=[TAINT]), cluster(group())]))
    with pytest.raises(ConfigError, match="no gpu type"):
        cluster_from_yaml(path)


def test_resources_of_the_start_parameters_are_read_as_ray_reads_them() -> None:
    """Ray's own function is the judge, of what it refuses too."""
    from ray.autoscaler._private.kuberay.autoscaling_config import (
        _derive_autoscaling_config_from_ray_cr,
    )

    start = {"resources": '"{\\"pool-a\\": 1, \\"ssd\\": 4}"'}
    document = cluster(group(selector=on("g5.xlarge"), rayStartParams=start))
    rays = _derive_autoscaling_config_from_ray_cr(copy.deepcopy(document))
    ours = as_launcher_document(document, "the file")["available_node_types"]["gpu"]["resources"]
    theirs = rays["available_node_types"]["gpu"]["resources"]
    assert ours == theirs
    assert ours["pool-a"] == 1
    for key, text in (
        ("resources", '{"pool-a": 1}'),
        ("resources", '"{\\"pool-a\\": 0.5}"'),
        ("resources", "pool-a"),
        ("memory", "10Gi"),
        ("num-cpus", "4.0"),
    ):
        document["spec"]["workerGroupSpecs"][0]["rayStartParams"] = {key: text}
        with pytest.raises((ValueError, AssertionError)):
            _derive_autoscaling_config_from_ray_cr(copy.deepcopy(document))
        with pytest.raises(ConfigError, match=rf"{key}( in rayStartParams)? of group 'gpu'"):
            kinds_of(document)


def test_facts_are_read_where_a_chart_can_set_them() -> None:
    facts = {"autohet.io/gpu-type": "T4", "autohet.io/gpu-memory-gib": "15", **LABELS}
    of_pod = group("of-pod")
    of_pod["template"]["metadata"] = {"labels": facts}
    labels = ",".join(f"{name}={value}" for name, value in facts.items())
    of_start = group("of-start", rayStartParams={"labels": labels})
    kinds = kinds_of(cluster(of_pod, of_start))
    assert {name: kind.gpu_type for name, kind in kinds.items()} == {
        "of-pod": "T4",
        "of-start": "T4",
    }
    launcher = as_launcher_document(cluster(of_start), "the file")
    assert not launcher["available_node_types"]["of-start"]["labels"], "Ray does not schedule by it"


@pytest.mark.parametrize(
    ("selector", "limits", "said"),
    [
        ({"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-3g.20gb"}, {}, "parts of a GPU"),
        ({"nvidia.com/gpu.product": "A10G-SHARED"}, {}, "parts of a GPU"),
        ({"cloud.google.com/gke-gpu-partition-size": "1g.5gb"}, {}, "parts of a GPU"),
        ({"cloud.google.com/gke-max-shared-clients-per-gpu": "4"}, {}, "parts of a GPU"),
        ({"nvidia.com/mig.config": "all-1g.10gb"}, {}, "parts of a GPU"),
        ({"nvidia.com/gpu.replicas": "4"}, {}, "parts of a GPU"),
        ({}, {"nvidia.com/gpu": 1, "nvidia.com/gpumem": "8000"}, "parts of a GPU"),
        ({}, {"nvidia.com/gpu": 1, "nvidia.com/gpucores": 30}, "parts of a GPU"),
        ({}, {"nvidia.com/gpu": 0, "amd.com/gpu": 8}, "has other GPUs than NVIDIA's"),
    ],
)
def test_what_is_no_whole_card_is_not_planned_on(
    selector: dict[str, str], limits: dict[str, Any], said: str
) -> None:
    part = group("part", selector=on("g5.xlarge") | selector)
    container = part["template"]["spec"]["containers"][0]
    if limits:
        container["resources"]["limits"] = {"cpu": "4", **limits}
    launcher = as_launcher_document(cluster(part, group("whole", selector=on("g5.xlarge"))), "f")
    found = cluster_from_document(launcher)
    assert [kind.name for kind in found.node_types] == ["whole"]
    assert any(said in note for note in found.notes)
    # the autoscaler counts them all the same
    assert launcher["available_node_types"]["part"]["resources"]["GPU"] > 0


@pytest.mark.parametrize(
    ("resource", "is_counted"), [("nvidia.com/gpu.sliced", 0), ("aliyun.com/gpu-mem", 0)]
)
def test_resources_that_are_shares_are_named(resource: str, is_counted: int) -> None:
    """Wrong: "no node type has GPUs", and not a word about the shares."""
    part = group("part", selector=on("g5.xlarge"))
    limits = part["template"]["spec"]["containers"][0]["resources"]["limits"]
    limits[resource] = limits.pop("nvidia.com/gpu")
    launcher = as_launcher_document(cluster(part), "f")
    assert launcher["available_node_types"]["part"]["resources"]["GPU"] == is_counted
    with pytest.raises(ConfigError, match=f"parts of a GPU \\({resource}"):
        cluster_from_document(launcher)


def test_gpus_that_ray_is_told_nothing_of_are_named() -> None:
    """Wrong: "no node type has GPUs" of pods that have some."""
    with pytest.raises(ConfigError, match=r"tells Ray of no GPUs, .* nvidia\.com/gpu: not planned"):
        kinds_of(cluster(group(rayStartParams={"num-gpus": "0"})))


def test_a_slice_and_a_shared_card_keep_their_names() -> None:
    assert device_name("NVIDIA-A100-SXM4-40GB-MIG-3g.20gb") == "A100-40-MIG-3g.20gb"
    assert device_name("NVIDIA-A10G-SHARED") == "A10G-SHARED"


def test_gpus_by_resource_claims_are_said_to_be_unknown_to_ray() -> None:
    claimed = group("claimed", gpus=0, selector=on("g5.xlarge"))
    container = claimed["template"]["spec"]["containers"][0]
    container["resources"]["claims"] = [{"name": "gpus"}]
    claimed["template"]["spec"]["resourceClaims"] = [
        {"name": "gpus", "resourceClaimTemplateName": "one-gpu"}
    ]
    with pytest.raises(ConfigError, match=r"resource claims \(gpus\).*num-gpus in rayStartParams"):
        kinds_of(cluster(claimed))
    claimed["rayStartParams"] = {"num-gpus": "1"}
    assert kinds_of(cluster(claimed))["claimed"].num_gpus == 1
    exactly = {"deviceClassName": "mig.nvidia.com"}
    devices = {"requests": [{"name": "slice", "exactly": exactly}]}
    template = {"kind": "ResourceClaimTemplate", "spec": {"spec": {"devices": devices}}}
    template["metadata"] = {"name": "one-gpu"}
    document = cluster(claimed)
    with pytest.raises(ConfigError, match=r"parts of a GPU \(mig\.nvidia\.com\)"):
        cluster_from_document(as_launcher_document(document, "f", [template, document]))
