"""Cluster files in the forms that Ray's and KubeRay's documentation publishes.

What is planned is what Ray's own scheduler launches and what is priced; what cannot be planned is
refused by what it lacks.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from autohet.driver.ray.requests.node_requests import node_request
from planner.errors import ConfigError
from planner.inputs.catalogue import instance_types
from planner.inputs.cluster import Cluster, cluster_from_document
from planner.inputs.cluster_documents import read_cluster_yaml, with_legacy_types
from tests.harness.launches import schedule_launches, standing_nodes

AWS = {"type": "aws", "region": "us-west-2", "availability_zone": "us-west-2a,us-west-2b"}
GCP = {"type": "gcp", "region": "us-west1", "availability_zone": "us-west1-b", "project_id": None}
AZURE = {"type": "azure", "location": "westus2", "resource_group": "ray-cluster"}
AUTH = {"ssh_user": "ubuntu"}
SPOT = {"InstanceMarketOptions": {"MarketType": "spot"}}


def file_of(provider: dict[str, Any], head: str, most: int, /, **types: Any) -> dict[str, Any]:
    return {
        "cluster_name": "example",
        "max_workers": most,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 5,
        "provider": provider,
        "auth": AUTH,
        "head_node_type": head,
        "available_node_types": types,
    }


def ec2(instance: str, most: int | None = None, **more: Any) -> dict[str, Any]:
    entry = {"resources": {}, "node_config": {"InstanceType": instance}, **more}
    return entry if most is None else {**entry, "max_workers": most}


def t4_of_gcp(preemptible: bool) -> dict[str, Any]:
    scheduling = [{"preemptible": preemptible}, {"onHostMaintenance": "TERMINATE"}]
    accelerator = {"acceleratorType": "nvidia-tesla-t4", "acceleratorCount": 1}
    return {
        "machineType": "n1-standard-2",
        "guestAccelerators": [accelerator],
        "scheduling": scheduling,
    }


def legacy(provider: dict[str, Any], head: Any, workers: Any) -> dict[str, Any]:
    return {
        "cluster_name": "legacy",
        "min_workers": 2,
        "max_workers": 4,
        "initial_workers": 2,
        "autoscaling_mode": "default",
        "target_utilization_fraction": 0.8,
        "provider": provider,
        "auth": AUTH,
        "head_node": head,
        "worker_nodes": workers,
    }


def pods(group: str, gpus: object, selector: dict[str, str], **counts: int) -> dict[str, Any]:
    limits = {"cpu": "8", "memory": "32G", "nvidia.com/gpu": gpus}
    container = {"name": "ray", "image": "rayproject/ray:2.50.1", "resources": {"limits": limits}}
    template = {"spec": {"nodeSelector": selector, "containers": [container]}}
    return {"groupName": group, **counts, "rayStartParams": {}, "template": template}


def ray_cluster(*groups: dict[str, Any], autoscaling: bool = True) -> dict[str, Any]:
    container = {"name": "head", "image": "rayproject/ray", "resources": {"limits": {"cpu": "1"}}}
    head = {"template": {"spec": {"containers": [container]}}}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": {"name": "raycluster"},
        "spec": {
            "enableInTreeAutoscaling": autoscaling,
            "headGroupSpec": head,
            "workerGroupSpecs": list(groups),
        },
    }


def ray_job(cluster: dict[str, Any]) -> dict[str, Any]:
    spec = {"entrypoint": "python train.py", "rayClusterSpec": cluster["spec"]}
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "job"}, "spec": spec}


CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code"}, "data": {}}
LINKS = {"autohet.io/inter-node-gbps": "10", "autohet.io/intra-node-gbps": "128"}
A10G = {"node.kubernetes.io/instance-type": "g5.12xlarge", "karpenter.sh/capacity-type": "spot"}
T4 = {"cloud.google.com/gke-accelerator": "nvidia-tesla-t4"}

PLANNED: dict[str, tuple[list[dict[str, Any]], dict[str, tuple[str, int, int, str | None]]]] = {
    "aws: several types with resources of their own": (
        [
            file_of(
                AWS,
                "cpu",
                40,
                cpu=ec2("m4.xlarge", 5),
                gpu_1=ec2("p3.2xlarge", 4, resources={"CPU": 8, "GPU": 1, "Custom2": 2}),
                gpu_4=ec2("p3.8xlarge", 2, resources={"GPU": 4, "accelerator_type:V100": 1}),
            )
        ],
        {"gpu_1": ("V100-16", 1, 4, "p3.2xlarge"), "gpu_4": ("V100-16", 4, 2, "p3.8xlarge")},
    ),
    "aws: a GPU at the head alone": (
        [file_of(AWS, "ray.head.gpu", 2, **{"ray.head.gpu": ec2("p3.2xlarge")})],
        {"ray.head.gpu": ("V100-16", 1, 1, "p3.2xlarge")},
    ),
    "aws: minimal": (
        [
            file_of(
                AWS,
                "ray.head.default",
                3,
                **{
                    "ray.head.default": ec2("m5.2xlarge"),
                    "ray.worker.default": ec2("g4dn.xlarge", 3, min_workers=3),
                },
            )
        ],
        {"ray.worker.default": ("T4", 1, 3, "g4dn.xlarge")},
    ),
    "aws: no limit of its own": (
        [file_of(AWS, "head", 5, head=ec2("m5.large"), spot=ec2("g5.2xlarge", min_workers=0))],
        {"spot": ("A10G", 1, 5, "g5.2xlarge")},
    ),
    "aws: the form before node types": (
        [legacy(AWS, {"InstanceType": "m5.xlarge"}, {"InstanceType": "p3.2xlarge", **SPOT})],
        {"ray-legacy-worker-node-type": ("V100-16", 1, 4, "p3.2xlarge")},
    ),
    "gcp: one T4 on a general machine": (
        [
            file_of(
                GCP,
                "head",
                2,
                head={"resources": {"CPU": 2}, "node_config": {"machineType": "n1-standard-2"}},
                worker={
                    "max_workers": 2,
                    "labels": LINKS,
                    "resources": {"CPU": 2, "GPU": 1},
                    "node_config": t4_of_gcp(preemptible=True),
                },
            )
        ],
        {"worker": ("T4", 1, 2, None)},
    ),
    "gcp: a2 and g2": (
        [
            file_of(
                GCP,
                "head",
                6,
                head={"resources": {"CPU": 4}, "node_config": {"machineType": "n2-standard-4"}},
                l4={
                    "max_workers": 4,
                    "resources": {"CPU": 24, "GPU": 2},
                    "node_config": {"machineType": "g2-standard-24"},
                },
            )
        ],
        {"l4": ("L4", 2, 4, None)},
    ),
    "azure: A100": (
        [
            file_of(
                AZURE,
                "head",
                4,
                head={
                    "resources": {"CPU": 2},
                    "node_config": {"azure_arm_parameters": {"vmSize": "Standard_D2s_v3"}},
                },
                worker={
                    "max_workers": 4,
                    "resources": {"CPU": 24, "GPU": 1},
                    "node_config": {
                        "azure_arm_parameters": {
                            "vmSize": "Standard_NC24ads_A100_v4",
                            "priority": "Spot",
                            "billingProfile": {"maxPrice": -1},
                        }
                    },
                },
            )
        ],
        {"worker": ("A100-80", 1, 4, None)},
    ),
    "kuberay: an autoscaled group on EKS": (
        [ray_cluster(pods("gpu", "4", A10G, replicas=0, minReplicas=0, maxReplicas=4))],
        {"gpu": ("A10G", 4, 4, "g5.12xlarge")},
    ),
    "kuberay: replicas of several hosts": (
        [ray_cluster(pods("gpu", 4, A10G, minReplicas=0, maxReplicas=2, numOfHosts=2))],
        {"gpu": ("A10G", 4, 4, "g5.12xlarge")},
    ),
    "kuberay: a job, its code and no autoscaler": (
        [
            ray_job(
                ray_cluster(
                    pods("small-group", 4, A10G, replicas=2, minReplicas=1, maxReplicas=5),
                    autoscaling=False,
                )
            ),
            CONFIG_MAP,
        ],
        {"small-group": ("A10G", 4, 2, "g5.12xlarge")},
    ),
    "kuberay: half of a machine": (
        [ray_cluster(pods("half", 2, A10G, minReplicas=0, maxReplicas=8))],
        {"half": ("A10G", 2, 8, "g5.12xlarge")},
    ),
}

REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "aws: no GPU": (
        [file_of(AWS, "head", 2, head=ec2("m5.large"), worker=ec2("m5.large", 2))],
        "no node type of .* has GPUs and max_workers above 0",
    ),
    "aws: launch templates": (
        [
            file_of(
                AWS,
                "head",
                2,
                head={"node_config": {"LaunchTemplate": {"LaunchTemplateName": "head"}}},
                worker={"node_config": {"LaunchTemplate": {"LaunchTemplateId": "lt-0"}}},
            )
        ],
        "'worker' names no instance type; GPUs that it has must be said under resources",
    ),
    "azure: a machine that the catalogue lacks": (
        [legacy(AZURE, *[{"azure_arm_parameters": {"vmSize": "Standard_NC6s_v2"}}] * 2)],
        "Standard_NC6s_v2.*is not in the catalogue",
    ),
    "gcp: a T4 without its machine's links": (
        [
            file_of(
                GCP,
                "head",
                2,
                head={"resources": {"CPU": 2}, "node_config": {"machineType": "n1-standard-2"}},
                worker={"resources": {"GPU": 1}, "node_config": t4_of_gcp(preemptible=False)},
            )
        ],
        "has no intra node gbps and no inter node gbps: .*'autohet.io/inter-node-gbps'",
    ),
    "machines by address": (
        [
            {
                "cluster_name": "default",
                "provider": {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2"]},
                "auth": AUTH,
            }
        ],
        "name node types under available_node_types",
    ),
    "kuberay: a part of a GPU by annotation": (
        [ray_cluster(pods("shared", 0, {}, replicas=2, minReplicas=2, maxReplicas=2))],
        "no node type of .* has GPUs",
    ),
    "kuberay: nothing says which GPU": (
        [ray_cluster(pods("gpu", 4, {}, minReplicas=0, maxReplicas=4))],
        "no gpu type.*'autohet.io/gpu-type'.*'autohet.io/inter-node-gbps'",
    ),
}


def written(documents: list[dict[str, Any]], directory: Path) -> Path:
    path = directory / "cluster.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return path


def whole_fleets(cluster: Cluster, head: object) -> list[dict[str, int]]:
    """All nodes of each type that are no head, and all of them together if that is allowed."""
    whole = {kind.name: kind.max_nodes for kind in cluster.node_types if kind.name != head}
    alone = [{name: count} for name, count in whole.items()]
    together = cluster.bound is None and len(alone) > 1
    return [*alone, whole] if together else alone


@pytest.mark.parametrize("name", PLANNED)
def test_what_is_planned_is_what_ray_launches_and_what_is_priced(name: str, tmp_path: Path) -> None:
    documents, expected = PLANNED[name]
    document: Any = with_legacy_types(read_cluster_yaml(written(documents, tmp_path)))  # type: ignore[arg-type]
    cluster = cluster_from_document(document)
    found = {k.name: (k.gpu_type, k.num_gpus, k.max_nodes) for k in cluster.node_types}
    assert found == {node_type: facts[:3] for node_type, facts in expected.items()}
    for kind in cluster.node_types:
        machine = expected[kind.name][3]
        row = None if machine is None else instance_types()[machine]
        part = 1.0 if row is None else kind.num_gpus / row.num_gpus
        price = None if row is None else row.usd_per_hour
        assert kind.usd_per_hour == (None if price is None else price * part)
    standing = standing_nodes(document)
    for counts in whole_fleets(cluster, document.get("head_node_type")):
        request = node_request(cluster, document, counts)
        assert schedule_launches(document, request) == standing | counts, counts


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_planned_is_refused_by_what_it_lacks(name: str, tmp_path: Path) -> None:
    documents, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=reason):
        cluster_from_document(read_cluster_yaml(written(documents, tmp_path)))
