"""What is asked of Ray's autoscaler is what Ray's own scheduler launches."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from autohet.driver.ray.requests.node_requests import (
    NodeRequest,
    node_request,
)
from planner.errors import ConfigError
from planner.inputs.cluster import Cluster, cluster_from_document
from planner.inputs.cluster_documents import read_cluster_yaml
from tests.harness.launches import schedule_launches, standing_nodes

CONFIGS = Path(__file__).parents[2] / "cluster_configs"
SHIPPED = ["aws-mixed-spot", "aws-p5-p4d", "aws-cheap-spot", "kuberay-raycluster"]


def fleets(cluster: Cluster) -> list[dict[str, int]]:
    """One node of each type, all of each type, all of all types."""
    whole = {kind.name: kind.max_nodes for kind in cluster.node_types}
    alone = [{name: count} for name, most in whole.items() for count in {1, most}]
    return [*alone, whole]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_fleet_of_a_shipped_file_is_launched_as_it_is_meant(name: str) -> None:
    document: Any = read_cluster_yaml(CONFIGS / f"{name}.yaml")
    cluster = cluster_from_document(document)
    for counts in fleets(cluster):
        request = node_request(cluster, document, counts)
        assert schedule_launches(document, request) == standing_nodes(document) | counts, counts


AWS = {"type": "aws", "region": "us-east-1"}
RACKS = {"type": "external", "module": "racks.Provider"}
"""A provider for which Ray looks nothing up."""


def file_of(provider: dict[str, Any] = RACKS, /, **types: dict[str, Any]) -> dict[str, Any]:
    head = {"node_config": {"InstanceType": "m5.2xlarge"}, "resources": {"CPU": 8}}
    return {
        "cluster_name": "public",
        "max_workers": 20,
        "provider": provider,
        "head_node_type": "head",
        "available_node_types": {"head": head, **types},
    }


def machine(instance: str, most: int = 4, **more: Any) -> dict[str, Any]:
    return {"node_config": {"InstanceType": instance}, "max_workers": most, **more}


def unlabelled() -> dict[str, Any]:
    """Types that nothing but their size tells apart: four g5 are cheaper than what Ray launches."""
    return file_of(
        g5=machine("g5.12xlarge", resources={"CPU": 48, "GPU": 4}),
        p4d=machine("p4d.24xlarge", resources={"CPU": 96, "GPU": 8}),
        p4de=machine("p4de.24xlarge", resources={"CPU": 96, "GPU": 8}),
    )


def test_types_that_no_request_names_are_refused_with_the_labels_to_add() -> None:
    document = unlabelled()
    cluster = cluster_from_document(document)
    with pytest.raises(ConfigError) as refused:
        node_request(cluster, document, {"g5": 4})
    message = str(refused.value)
    assert re.search(r"would launch .*p4d.* \(\d+\.\d\d \$/h\) where 4 g5 \(22\.69 \$/h\)", message)
    assert "g5: labels: {node-type: g5}" in message
    document["available_node_types"]["g5"]["labels"] = {"node-type": "g5"}
    request = node_request(cluster, document, {"g5": 4})
    assert schedule_launches(document, request) == {"g5": 4}
    assert set(request.selectors[0]) == {"node-type"}


def test_what_version_1_launches_is_asked_of_version_1s_scheduler() -> None:
    document = unlabelled()
    document["available_node_types"]["g5"]["labels"] = {"node-type": "g5"}
    cluster = cluster_from_document(document)
    with pytest.raises(ConfigError, match=r"version 1 knows no labels.*resources: {g5: 1}"):
        node_request(cluster, document, {"g5": 4}, version=1)
    document["available_node_types"]["g5"]["resources"]["g5"] = 1
    request = node_request(cluster, document, {"g5": 4}, version=1)
    assert schedule_launches(document, request, version=1) == {"g5": 4}
    assert not request.labelled


def test_types_of_ec2_are_told_apart_by_the_gpus_that_ray_looks_up() -> None:
    document = unlabelled() | {"provider": AWS}
    cluster = cluster_from_document(document)
    request = node_request(cluster, document, {"g5": 4})
    assert schedule_launches(document, request) == {"g5": 4}
    assert request.bundles[0]["accelerator_type:A10G"] == 1
    with pytest.raises(ConfigError, match=r"would launch .*p4d.* where 2 p4de .* is meant"):
        node_request(cluster, document, {"p4de": 2})


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ({"head_node_type": "gpus"}, {"gpus": 2, "more": 1}),
        ({"head_node_type": "ray.head.default"}, {"gpus": 3, "more": 1}),
        ({}, {"gpus": 3, "more": 1}),
    ],
    ids=["head of a worker's type", "head of its own", "Ray's default head"],
)
def test_a_head_with_gpus_takes_no_workers_place(
    version: int, head: dict[str, str], expected: dict[str, int]
) -> None:
    """A bundle that the head can hold launches nothing: it has to be asked for, too."""
    gpus = machine("g5.12xlarge", most=4)
    document = file_of(AWS, gpus=gpus, more=machine("g6e.12xlarge"))
    del document["head_node_type"], document["available_node_types"]["head"]
    document |= head
    if head.get("head_node_type") != "gpus":
        gpu_head = {"node_config": {"InstanceType": "g5.12xlarge"}}
        document["available_node_types"]["ray.head.default"] = gpu_head
    cluster = cluster_from_document(document)
    counts = {"gpus": 3, "more": 1}
    request = node_request(cluster, document, counts, version=version)
    assert schedule_launches(document, request, version=version) == expected
    without_head = [b for b in request.bundles if "accelerator_type:L40S" not in b][1:]
    others = NodeRequest(tuple(without_head), tuple({} for _ in without_head))
    assert schedule_launches(document, others, version=version) != expected


def test_a_type_whose_gpus_ray_does_not_know_is_not_asked_for() -> None:
    """Elsewhere than on EC2 the autoscaler knows what the file states, and a node what it has."""
    azure = {"azure_arm_parameters": {"vmSize": "Standard_NC24ads_A100_v4"}}
    document = file_of({"type": "azure"}, gpu={"node_config": azure, "max_workers": 4})
    with pytest.raises(ConfigError, match=r"'gpu' states no GPU .*add resources: \{GPU: 1\}"):
        cluster_from_document(document)
    assert schedule_launches(document, NodeRequest(({"GPU": 1},), ({},))) == {}
    document["available_node_types"]["gpu"]["min_workers"] = 2
    (kind,) = cluster_from_document(document).node_types
    assert kind.max_nodes == 2
    document["available_node_types"]["gpu"]["resources"] = {"GPU": 1}
    (kind,) = cluster_from_document(document).node_types
    request = node_request(cluster_from_document(document), document, {"gpu": 4})
    assert kind.max_nodes == 4
    assert schedule_launches(document, request) == {"gpu": 4}


def test_a_resource_of_its_own_names_a_type() -> None:
    """On the head of `ray up` each type of EC2's GPU machines has `accelerator_type:...`."""
    document = unlabelled()
    for name, entry in document["available_node_types"].items():
        entry["resources"] = {**entry["resources"], f"accelerator_type:{name}": 1, "memory": 7e9}
    cluster = cluster_from_document(document)
    request = node_request(cluster, document, {"g5": 3, "p4de": 1})
    assert schedule_launches(document, request) == {"g5": 3, "p4de": 1}
    assert not any("memory" in bundle for bundle in request.bundles)


def test_equal_labels_on_a_small_and_a_large_machine_do_not_hide_a_larger_launch() -> None:
    """Four nodes of one GPU would become one of four."""
    labels = {"ray.io/accelerator-type": "A10G"}
    document = file_of(
        small=machine("g5.xlarge", labels=labels, resources={"CPU": 4, "GPU": 1}),
        large=machine("g5.12xlarge", labels=labels, resources={"CPU": 48, "GPU": 4}),
    )
    cluster = cluster_from_document(document)
    with pytest.raises(ConfigError, match="would launch 1 large"):
        node_request(cluster, document, {"small": 4})


def test_more_nodes_than_the_files_bound_are_not_asked_for() -> None:
    """Ray would launch none of them: one bundle that has no place and it launches nothing."""
    document = file_of(AWS, g5=machine("g5.xlarge", most=8)) | {"max_workers": 4}
    cluster = cluster_from_document(document)
    with pytest.raises(ConfigError, match=r"would launch no node .* max_workers .* is 4"):
        node_request(cluster, document, {"g5": 6})


def test_nodes_that_stand_are_not_asked_for_twice() -> None:
    floor = machine("g5.xlarge", min_workers=2, labels={"node-type": "floor"})
    document = file_of(AWS, floor=floor, more=machine("g6.xlarge", labels={"node-type": "more"}))
    cluster = cluster_from_document(document)
    request = node_request(cluster, document, {"floor": 1, "more": 2})
    assert schedule_launches(document, request) == {"floor": 2, "more": 2}
    assert schedule_launches(document, NodeRequest()) == {"floor": 2}


def test_a_request_is_what_rays_function_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler is given what `request_cluster_resources` sends to the GCS."""
    from ray.autoscaler.v2 import sdk

    from autohet.driver.ray.requests import node_requests

    document = read_cluster_yaml(CONFIGS / "aws-mixed-spot.yaml")
    assert isinstance(document, dict)
    request = node_request(cluster_from_document(document), document, {"g5": 2, "p4d": 1})
    sent: list[Any] = []

    class Gcs:
        def __init__(self, address: str) -> None: ...

        def request_cluster_resource_constraint(self, *arguments: Any, **_: Any) -> None:
            sent.extend(arguments)

    monkeypatch.setattr(sdk, "GcsClient", Gcs)
    pairs = zip(request.bundles, request.selectors, strict=True)
    sdk.request_cluster_resources(
        "here:1", [{"resources": bundle, "label_selector": labels} for bundle, labels in pairs]
    )
    bundles, selectors, counts = sent
    (constraint,) = node_requests.resource_constraints(request)
    ours = {
        (
            tuple(sorted(each.request.resources_bundle.items())),
            tuple(
                (term.label_key, term.label_values[0])
                for selector in each.request.label_selectors
                for term in selector.label_constraints
            ),
            each.count,
        )
        for each in constraint.resource_requests
    }
    theirs = {
        (tuple(sorted(bundle.items())), tuple(sorted(labels.items())), count)
        for bundle, labels, count in zip(bundles, selectors, counts, strict=True)
    }
    assert ours == theirs


def test_a_document_is_left_as_it_is() -> None:
    document = unlabelled()
    before = copy.deepcopy(document)
    schedule_launches(document, NodeRequest())
    assert document == before
    assert yaml.safe_dump(document)
