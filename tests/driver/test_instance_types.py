"""Instance types that the catalogue lacks, as EC2 describes them: by moto, which carries AWS's own
answers, and by botocore's stub for what moto has not.
"""

import copy
import logging

import boto3
import botocore.session
import pytest
from botocore.stub import Stubber
from moto import mock_aws
from moto.ec2.models.instance_types import INSTANCE_TYPES

from autohet.driver.sources import instance_types
from autohet.driver.sources.instance_types import describe_types, with_described_types
from planner.errors import ConfigError
from planner.inputs.catalogue import canonical_gpu_type, find_instance_type
from planner.inputs.cluster import cluster_from_document
from planner.inputs.gpu_names import identify_gpu


def document_of(instance_type, **more):
    return {
        "cluster_name": "c",
        "max_workers": 4,
        "provider": {"type": "aws", "region": "us-east-1"},
        "head_node_type": "head",
        "available_node_types": {
            "head": {"node_config": {"InstanceType": "m5.large"}},
            "gpu": {"node_config": {"InstanceType": instance_type}, "max_workers": 2, **more},
        },
    }


@pytest.fixture
def aws(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of tests")
    with mock_aws():
        yield


@pytest.mark.parametrize(
    ("instance_type", "num_gpus", "network_gbps"), [("g5g.xlarge", 1, 1.25), ("g5g.metal", 2, 25)]
)
def test_a_type_that_the_catalogue_lacks_is_planned_as_ec2_describes_it(
    aws, instance_type, num_gpus, network_gbps, caplog
):
    caplog.set_level(logging.INFO)
    document = document_of(instance_type)
    with pytest.raises(ConfigError, match="is not in the catalogue"):
        cluster_from_document(document)
    before = copy.deepcopy(document)
    (kind,) = cluster_from_document(with_described_types(document)).node_types
    assert document == before
    assert (kind.gpu_type, kind.num_gpus, kind.gpu_memory_bytes) == ("T4", num_gpus, 16 << 30)
    assert kind.inter_node_bytes_per_s == network_gbps * 1e9 / 8
    assert kind.usd_per_hour is None
    assert "assumed between its GPUs" in caplog.text
    assert "its price is not known" in caplog.text


def test_what_a_file_says_replaces_what_ec2_says(aws):
    labels = {"autohet.io/inter-node-gbps": "7", "autohet.io/usd-per-hour": "2"}
    document = document_of("g5g.metal", labels=labels, resources={"GPU": 1})
    (kind,) = cluster_from_document(with_described_types(document)).node_types
    assert (kind.num_gpus, kind.inter_node_bytes_per_s, kind.usd_per_hour) == (1, 7e9 / 8, 2.0)


def test_a_part_of_a_gpu_is_no_gpu(aws, caplog):
    """EC2 counts none in a g6f, which has an eighth of an L4."""
    caplog.set_level(logging.INFO)
    with pytest.raises(ConfigError, match="no node type of"):
        cluster_from_document(with_described_types(document_of("g6f.large")))
    assert "no whole NVIDIA GPU" in caplog.text


def test_a_type_that_ec2_does_not_know_is_named_and_others_are_described(aws, caplog):
    found = describe_types(["p99.48xlarge", "g5g.xlarge"], "us-east-1")
    assert list(found) == ["g5g.xlarge"]
    assert "does not describe p99.48xlarge in us-east-1 (InvalidInstanceType)" in caplog.text
    document = document_of("p99.48xlarge")
    assert with_described_types(document) == document


def test_without_credentials_nothing_is_asked(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    assert describe_types(["p99.48xlarge"], "us-east-1") == {}


@pytest.mark.parametrize("change", [{"provider": {"type": "gcp"}}, {"provider": None}])
def test_files_of_other_clouds_are_left_alone(change):
    document = document_of("p99.48xlarge") | change

    def describe(names, region):
        raise AssertionError("EC2 was asked")

    assert with_described_types(document, describe) is document
    assert with_described_types(document_of("g5.xlarge"), describe)
    assert with_described_types("no mapping", describe) == "no mapping"


def future_answer(name):
    """An answer in EC2's form for a machine with NVLink and several network cards."""
    gpu = {
        "Name": "H200",
        "Manufacturer": "NVIDIA",
        "Count": 4,
        "MemoryInfo": {"SizeInMiB": 143771},
    }
    card = {"NetworkPerformance": "400 Gigabit", "BaselineBandwidthInGbps": 400.0}
    cards = [{"NetworkCardIndex": index, **card} for index in range(4)]
    return {
        "InstanceType": name,
        "VCpuInfo": {"DefaultVCpus": 96},
        "MemoryInfo": {"SizeInMiB": 1048576},
        "GpuInfo": {"Gpus": [gpu], "TotalGpuMemoryInMiB": 4 * 143771},
        "NetworkInfo": {"NetworkPerformance": "1600 Gigabit", "NetworkCards": cards},
    }


def test_links_between_gpus_are_those_of_machines_with_the_same_gpu(monkeypatch):
    client = boto3.client(
        "ec2", region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="y"
    )
    name = "p5e.24xlarge"
    with Stubber(client) as stub:
        answer = {"InstanceTypes": [future_answer(name)]}
        stub.add_response("describe_instance_types", answer, {"InstanceTypes": [name]})
        monkeypatch.setattr(boto3.Session, "client", lambda *_, **__: client)
        monkeypatch.setattr(boto3.Session, "get_credentials", lambda _: object())
        (kind,) = cluster_from_document(with_described_types(document_of(name))).node_types
    assert (kind.gpu_type, kind.num_gpus) == ("H200", 4)
    assert kind.intra_node_bytes_per_s == 3600e9 / 8
    assert kind.inter_node_bytes_per_s == 1600e9 / 8
    assert kind.host_memory_bytes == 1 << 40


def test_an_endpoint_that_does_not_answer_is_said_once(monkeypatch, caplog, aws):
    def refuse(*_, **__):
        raise botocore.exceptions.EndpointConnectionError(endpoint_url="https://ec2")

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", refuse)
    assert describe_types(["p98.large", "p99.large"], "us-east-1") == {}
    assert caplog.text.count("EC2 was not reached") == 1
    assert instance_types.TIMEOUT_S <= 10


def test_ec2s_names_of_gpus_are_the_catalogues():
    """Every type that both know has the same GPUs, by name, number and memory."""
    unlike, compared = {}, 0
    for name, facts in INSTANCE_TYPES.items():
        row = find_instance_type(name)
        if row is None or not facts.get("GpuInfo"):
            continue
        (gpu,) = facts["GpuInfo"]["Gpus"]
        memory_mib = gpu["MemoryInfo"]["SizeInMiB"]
        found = (canonical_gpu_type(identify_gpu(gpu["Name"], memory_mib << 20)), gpu["Count"])
        compared += 1
        if found != (canonical_gpu_type(row.gpu_type), row.num_gpus):
            unlike[name] = (gpu["Name"], *found, row.gpu_type)
    assert compared > 40
    assert unlike == {}
