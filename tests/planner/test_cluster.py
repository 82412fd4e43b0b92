"""Clusters and fleets: catalogue, labels that override it, strict errors that name the remedy."""

import copy
import itertools
import json

import pytest

from planner.errors import ConfigError
from planner.inputs.autoscaling import autoscaling_config
from planner.inputs.catalogue import (
    canonical_gpu_type,
    find_gpu_type,
    instance_types,
    may_have_gpus,
)
from planner.inputs.cluster import cluster_from_document, cluster_from_yaml, node_type_from_labels
from planner.inputs.fleet import Fleet, Node
from planner.inputs.machines import ec2_gpu_name

LABELS = {
    "autohet.io/gpu-type": "T4",
    "autohet.io/gpu-memory-gib": "16",
    "autohet.io/intra-node-gbps": "50",
    "autohet.io/inter-node-gbps": "25",
}


def _cluster(**entry):
    return {
        "cluster_name": "c",
        "max_workers": 4,
        "provider": {"type": "aws", "region": "us-east-1"},
        "head_node_type": "head",
        "available_node_types": {
            "head": {"resources": {"CPU": 4}, "node_config": {"InstanceType": "m5.large"}},
            "gpu": {"node_config": {"InstanceType": "g5.12xlarge"}, "max_workers": 2} | entry,
        },
    }


def test_the_catalogue_supplies_what_the_file_leaves_out():
    (kind,) = cluster_from_document(_cluster()).node_types
    assert (kind.gpu_type, kind.num_gpus, kind.max_nodes, kind.usd_per_hour) == (
        "A10G",
        4,
        2,
        5.672,
    )
    assert kind.inter_node_bytes_per_s == 40e9 / 8
    assert not kind.spot


def test_labels_override_the_catalogue():
    (kind,) = cluster_from_document(
        _cluster(labels=LABELS | {"autohet.io/usd-per-hour": "1.5"})
    ).node_types
    assert (kind.gpu_type, kind.gpu_memory_bytes, kind.usd_per_hour) == ("T4", 16 * 2**30, 1.5)
    assert (kind.intra_node_bytes_per_s, kind.inter_node_bytes_per_s) == (50e9 / 8, 25e9 / 8)


def test_prices_of_another_region_than_the_catalogues_are_said_to_be_of_that_one():
    """Wrong: a node in Frankfurt, a quarter dearer, has Virginia's price without a word."""
    document = _cluster()
    for region, zone, price, is_said in (
        ("us-east-1", "us-east-1a", None, False),
        ("eu-central-1", "eu-central-1a,eu-central-1b", None, True),
        (None, "ap-northeast-2a", None, True),
        ("eu-central-1", None, "1.258", False),
    ):
        document["provider"] = {"type": "aws", "region": region, "availability_zone": zone}
        labels = {} if price is None else {"autohet.io/usd-per-hour": price}
        document["available_node_types"]["gpu"]["labels"] = labels
        notes = cluster_from_document(document).notes
        assert any("us-east-1" in note and "usd-per-hour" in note for note in notes) == is_said


def test_a_price_of_zero_stays_zero():
    assert (
        node_type_from_labels(
            "n", LABELS | {"autohet.io/usd-per-hour": "0"}, 1, "g5.xlarge"
        ).usd_per_hour
        == 0.0
    )


def test_rays_own_label_names_the_gpu_type_where_ours_does_not():
    labels = {k: v for k, v in LABELS.items() if k != "autohet.io/gpu-type"} | {
        "ray.io/accelerator-type": "A100-40G"
    }
    assert node_type_from_labels("n", labels, 8).gpu_type == "A100-40"


@pytest.mark.parametrize(
    ("instance", "label", "expected"),
    [
        ("p4de.24xlarge", "A100", "A100-80"),
        ("a2-ultragpu-8g", "A100", "A100-80"),
        ("Standard_ND96amsr_A100_v4", "A100", "A100-80"),
        ("p4d.24xlarge", "A100", "A100-40"),
        ("p3dn.24xlarge", "V100", "V100-32"),
        ("p4d.24xlarge", "A100-80", "A100-80"),
        ("g6e.xlarge", "L4", "L4"),
    ],
)
def test_rays_label_names_a_device_whose_memory_the_machine_says(instance, label, expected):
    labels = {"ray.io/accelerator-type": label}
    assert node_type_from_labels("n", labels, 1, instance).gpu_type == expected


def test_spot_and_zone_come_from_the_launchers_own_keys():
    config = {"InstanceType": "g5.xlarge", "InstanceMarketOptions": {"MarketType": "spot"}}
    document = _cluster(node_config=config)
    document["provider"]["availability_zone"] = "us-east-1a"
    (kind,) = cluster_from_document(document).node_types
    assert kind.spot
    assert kind.zone == "us-east-1a"


def test_fleet_names_nodes_and_workers():
    fleet = cluster_from_document(_cluster()).fleet()
    assert [node.name for node in fleet.nodes] == ["gpu-0", "gpu-1"]
    assert fleet.workers[4] == "gpu-1/0"
    assert fleet.gpu_type("gpu-1/3") == "A10G"
    assert fleet.usd_per_hour() == pytest.approx(2 * 5.672)
    with pytest.raises(ConfigError, match="gpu-9/0"):
        fleet.node_of("gpu-9/0")
    with pytest.raises(ConfigError, match="same name"):
        Fleet(0, (fleet.nodes[0], Node("gpu-0", fleet.nodes[1].node_type)))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d.update(max_worker=1), "max_worker"),
        (lambda d: d["available_node_types"]["gpu"].update(maxworkers=1), "maxworkers"),
        (lambda d: d["available_node_types"]["gpu"].update(max_workers=-1), "max_workers"),
        (
            lambda d: d["available_node_types"]["gpu"].update(docker={"run_options": []}),
            "unknown key 'run_options' in docker of node type 'gpu'",
        ),
        (
            lambda d: d["available_node_types"]["gpu"].update(labels={"autohet.io/gpu": "T4"}),
            "autohet.io/gpu",
        ),
        (
            lambda d: d["available_node_types"]["gpu"].update(labels={"autohet.io/spot": "yes"}),
            "spot",
        ),
        (
            lambda d: d["available_node_types"]["gpu"].update(
                labels={"autohet.io/gpu-memory-gib": 16}
            ),
            "string",
        ),
        (
            lambda d: d["available_node_types"]["gpu"].update(
                labels={"autohet.io/gpu-memory-gib": "much"}
            ),
            "positive",
        ),
        (
            lambda d: d["available_node_types"].pop("gpu"),
            "no node type of cluster has GPUs and max_workers above 0",
        ),
        (
            lambda d: d["available_node_types"]["gpu"].update(
                labels={"autohet.io/usd-per-hour": "-1"}
            ),
            "positive number or 0",
        ),
    ],
)
def test_a_wrong_cluster_is_an_error_that_names_the_value(change, named):
    document = _cluster()
    change(document)
    with pytest.raises(ConfigError, match=named):
        cluster_from_document(document)


@pytest.mark.parametrize("label", ["gpu-type", "intra-node-gbps", "inter-node-gbps"])
def test_a_missing_fact_names_the_label_that_supplies_it(label):
    labels = {k: v for k, v in LABELS.items() if not k.endswith(label)}
    with pytest.raises(ConfigError, match=f"autohet.io/{label}"):
        node_type_from_labels("n", labels, 1, "x9.unknown")


def test_a_file_that_is_no_yaml_says_so(tmp_path):
    (tmp_path / "c.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="not YAML"):
        cluster_from_yaml(tmp_path / "c.yaml")
    with pytest.raises(ConfigError, match="cannot read"):
        cluster_from_yaml(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("[a]")
    with pytest.raises(ConfigError, match=r"list\.yaml"):
        cluster_from_yaml(tmp_path / "list.yaml")


def test_every_instance_type_of_the_catalogue_has_a_known_device_and_price():
    for name, row in instance_types().items():
        device = find_gpu_type(row.gpu_type)
        assert device is not None, name
        assert device.memory_bytes == row.gpu_memory_bytes, name
        assert row.usd_per_hour is None or row.usd_per_hour > 0
        assert row.num_gpus in (1, 2, 4, 8)
    families = {name.split(".")[0] for name in instance_types()}
    assert {"p3", "p4d", "p4de", "p5", "g4dn", "g5", "g6", "g6e"} <= families
    assert {"p5e", "p5en", "p6-b200", "p6-b300", "g7", "g7e", "gr6"} <= families


def test_gpu_names_have_one_spelling():
    assert canonical_gpu_type("a100-40g") == "A100-40"
    assert canonical_gpu_type("unheard-of") == "unheard-of"


# ---- Ray's own schema ----


def _schema_value(schema: dict) -> object:
    """Something of the type that a key of the schema has."""
    plain = {
        "string": "x",
        "integer": 1,
        "number": 1.0,
        "boolean": False,
        "array": [],
        "object": {},
    }
    return plain[schema.get("type", "array")]


def test_every_key_that_rays_schema_allows_is_accepted():
    from importlib.resources import files

    schema = json.loads((files("ray.autoscaler") / "ray-schema.json").read_text())["properties"]
    node_type = schema["available_node_types"]["patternProperties"][".*"]["properties"]
    document = _cluster(
        **{
            key: _schema_value(value)
            for key, value in node_type.items()
            if key not in ("node_config", "resources", "max_workers")
        }
    )
    ours = {"cluster_name", "max_workers", "provider", "head_node_type", "available_node_types"}
    document |= {key: _schema_value(value) for key, value in schema.items() if key not in ours}
    assert {"priority", "initialization_commands"} <= set(document["available_node_types"]["gpu"])
    assert "metadata" in document
    (kind,) = cluster_from_document(document).node_types
    assert (kind.name, kind.num_gpus, kind.max_nodes) == ("gpu", 4, 2)


def test_sizes_that_burst_count_with_what_they_keep_up():
    assert instance_types()["g5.xlarge"].inter_node_bytes_per_s == 2.5e9 / 8
    assert node_type_from_labels("n", {}, None, "g4dn.xlarge").inter_node_bytes_per_s == 5e9 / 8


def test_host_memory_is_the_labels_or_the_catalogues_or_nobodys():
    assert node_type_from_labels("n", LABELS, 1).host_memory_bytes is None
    assert node_type_from_labels("n", {}, None, "g5.xlarge").host_memory_bytes == 16 * 2**30
    labels = {"autohet.io/host-memory-gib": "12.5"}
    assert node_type_from_labels("n", labels, None, "g5.xlarge").host_memory_bytes == 12.5 * 2**30


def test_every_gpu_of_nvidia_that_ec2_describes_is_in_the_catalogue():
    """On x86 machines with whole GPUs: the image and torch's wheels are for those."""
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    for name, row in INSTANCE_TYPES.items():
        gpus = (row.get("GpuInfo") or {}).get("Gpus") or [{}]
        whole = gpus[0].get("Manufacturer") == "NVIDIA" and gpus[0]["Count"] > 0
        if not whole or "x86_64" not in row["ProcessorInfo"]["SupportedArchitectures"]:
            continue
        assert instance_types()[name].num_gpus == gpus[0]["Count"], name
        known = find_gpu_type(gpus[0]["Name"])
        named = find_gpu_type(instance_types()[name].gpu_type)
        assert known is not None, name
        assert named.name.split("-")[0] == known.name.split("-")[0], name


def test_machines_without_gpus_are_known_from_those_that_the_catalogue_lacks():
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    without = {n for n, row in INSTANCE_TYPES.items() if not row.get("GpuInfo")}
    assert {name for name in without if may_have_gpus(name)} == set()
    for name in ("p7.48xlarge", "g8e.xlarge", "p4d.24xlrge", "a5-highgpu-8g", "Standard_NC6s_v3"):
        assert may_have_gpus(name), name
    for name in ("n1-standard-8", "e2-medium", "c2d-standard-4", "Standard_D4s_v3"):
        assert not may_have_gpus(name), name


def test_the_catalogues_figures_are_what_describe_instance_types_says():
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    known = {name: row for name, row in instance_types().items() if name in INSTANCE_TYPES}
    assert instance_types().keys() - known.keys() == {
        "p3.2xlarge",
        "p3.8xlarge",
        "p3.16xlarge",
        "p6e-gb200.36xlarge",
    }
    for name, row in known.items():
        assert row.vcpus == INSTANCE_TYPES[name]["VCpuInfo"]["DefaultVCpus"], name
        assert ec2_gpu_name(row) == INSTANCE_TYPES[name]["GpuInfo"]["Gpus"][0]["Name"], name
        assert row.host_memory_bytes == INSTANCE_TYPES[name]["MemoryInfo"]["SizeInMiB"] * 2**20, (
            name
        )


# ---- bounds on numbers as Ray means them ----


def _file(top, **types):
    head = {"node_config": {"InstanceType": "m5.large"}}
    document = {
        "cluster_name": "c",
        "provider": {"type": "aws", "region": "us-east-1"},
        "head_node_type": "head",
        "available_node_types": {"head": head, **types},
    }
    return document | top


def _type(instance, **more):
    return {"node_config": {"InstanceType": instance}, **more}


def _ray_allows(document, counts):
    """Whether Ray's own scheduler launches so many beside what stands."""
    from autohet.driver.ray.requests.node_requests import NodeRequest, simulate_launches

    labelled = copy.deepcopy(document)
    for name, entry in labelled["available_node_types"].items():
        entry["labels"] = {"type": name}
    names = [name for name, count in counts.items() for _ in range(count)]
    config = autoscaling_config(labelled)
    gpus = {name: config.types[name].resources["GPU"] for name in counts}
    request = NodeRequest(
        tuple({"GPU": gpus[name]} for name in names), tuple({"type": name} for name in names)
    )
    found = simulate_launches(config, request)
    return all(found.get(name, 0) >= count for name, count in counts.items() if name != "head")


@pytest.mark.parametrize(
    "document",
    [
        _file(
            {"max_workers": 8}, a=_type("g5.xlarge"), b=_type("g6.xlarge"), c=_type("p4d.24xlarge")
        ),
        _file({}, a=_type("g5.xlarge"), b=_type("g6.xlarge", max_workers=3)),
        _file(
            {"max_workers": 5},
            a=_type("g5.xlarge", min_workers=2),
            b=_type("g6.xlarge", max_workers=4),
            cpu=_type("m5.large", min_workers=1, resources={"CPU": 2, "GPU": 0}),
        ),
        _file(
            {"max_workers": 4},
            a=_type("g5.xlarge", max_workers=4),
            b=_type("g6.xlarge", max_workers=0),
        ),
    ],
)
def test_as_many_nodes_may_exist_as_rays_scheduler_launches(document):
    """Every combination of up to nine nodes: `max_workers` bounds all of them together, 2 where the
    file has none, and nodes that stand are among them.
    """
    cluster = cluster_from_document(document)
    kinds = {kind.name: kind.max_nodes for kind in cluster.node_types}
    for numbers in itertools.product(*(range(min(4, most) + 1) for most in kinds.values())):
        counts = dict(zip(kinds, numbers, strict=True))
        ours = cluster.bound is None or cluster.bound.allows(counts)
        assert ours == _ray_allows(document, counts), counts


def test_a_head_with_gpus_is_one_node_and_no_worker_unless_the_file_says_so():
    document = _file({"max_workers": 1}, gpu=_type("g5.xlarge"))
    document["available_node_types"]["head"] = _type("g5.2xlarge")
    cluster = cluster_from_document(document)
    assert {kind.name: kind.max_nodes for kind in cluster.node_types} == {"head": 1, "gpu": 1}
    assert cluster.bound is None
    document["available_node_types"]["head"]["max_workers"] = 1
    bounded = cluster_from_document(document)
    assert bounded.bound is not None
    assert bounded.bound.allows({"head": 1, "gpu": 1})
    assert not bounded.bound.allows({"head": 2, "gpu": 1})
    assert bounded.most_gpus() == 2


@pytest.mark.parametrize(
    ("document", "named"),
    [
        (
            _file(
                {"max_workers": 3},
                a=_type("g5.xlarge", min_workers=2),
                b=_type("g6.xlarge", min_workers=2),
            ),
            "max_workers of cluster is 3, below the sum of min_workers 4",
        ),
        (
            _file({"max_workers": 9}, a=_type("g5.xlarge", min_workers=3, max_workers=2)),
            "min_workers of node type 'a' is 3, above its max_workers 2",
        ),
        (_file({"head_node_type": "hed"}, a=_type("g5.xlarge")), "head_node_type of .* is 'hed'"),
        (_file({"max_workers": 2**31 - 1}, a=_type("g5.xlarge")), "at most 100000"),
    ],
)
def test_what_ray_refuses_is_refused(document, named):
    with pytest.raises(ConfigError, match=named):
        cluster_from_document(document)


def test_types_that_the_catalogue_lacks_are_named_beside_known_ones():
    document = _file(
        {"max_workers": 9},
        known=_type("g5.xlarge"),
        later=_type("p9.48xlarge"),
        typo=_type("p4d.24xlrge"),
        cpu=_type("c6i.large"),
    )
    cluster = cluster_from_document(document)
    assert [kind.name for kind in cluster.node_types] == ["known"]
    assert len(cluster.notes) == 2
    assert "'p9.48xlarge' of 'later'" in cluster.notes[0]
    assert "did you mean p4d.24xlarge?" in cluster.notes[1]


@pytest.mark.parametrize("machine", ["g6f.xlarge", "Standard_NV6ads_A10_v5"])
def test_a_machine_with_a_part_of_a_gpu_is_named_as_one(machine):
    document = _file({}, part=_type(machine, max_workers=1), g5=_type("g5.xlarge", max_workers=1))
    found = cluster_from_document(document)
    assert [kind.name for kind in found.node_types] == ["g5"]
    assert found.notes == (
        f"instance type '{machine}' of 'part' has a part of a GPU: it is not planned on",
    )


def test_all_that_a_file_lacks_is_said_at_once():
    unknown = _type("x9.unknown", resources={"GPU": 2})
    document = _file({"max_workers": 9}, one=unknown, two=_type("y9.unknown", resources={"GPU": 1}))
    with pytest.raises(ConfigError) as refused:
        cluster_from_document(document)
    for name in ("'one'", "'two'"):
        assert f"node type {name}" in str(refused.value)
    for label in ("gpu-type", "gpu-memory-gib", "intra-node-gbps", "inter-node-gbps"):
        assert str(refused.value).count(f"'autohet.io/{label}'") == 2


def test_machines_of_other_clouds_are_read_by_their_own_keys():
    gcp = {
        "machineType": "a2-highgpu-4g",
        "scheduling": [{"preemptible": True}],
    }
    azure = {"azure_arm_parameters": {"vmSize": "Standard_NC24ads_A100_v4", "priority": "Spot"}}
    attached = {
        "machineType": "n1-standard-8",
        "guestAccelerators": [{"acceleratorType": "nvidia-tesla-t4", "acceleratorCount": 2}],
    }
    labels = {"autohet.io/intra-node-gbps": "128", "autohet.io/inter-node-gbps": "16"}
    document = _file(
        {"max_workers": 9},
        gcp={"node_config": gcp},
        azure={"node_config": azure},
        attached={"node_config": attached, "labels": labels},
    )
    found = {
        kind.name: (kind.gpu_type, kind.num_gpus, kind.spot)
        for kind in cluster_from_document(document).node_types
    }
    assert found == {
        "gcp": ("A100-40", 4, True),
        "azure": ("A100-80", 1, True),
        "attached": ("T4", 2, False),
    }


def test_sagemakers_names_are_ec2s_with_a_prefix():
    (kind,) = cluster_from_document(_file({}, a=_type("ml.p4d.24xlarge"))).node_types
    assert (kind.gpu_type, kind.num_gpus) == ("A100-40", 8)


def test_a_legacy_file_is_read_as_ray_rewrites_it():
    document = {
        "cluster_name": "legacy",
        "max_workers": 3,
        "min_workers": 1,
        "provider": {"type": "aws", "region": "us-east-1"},
        "head_node": {"InstanceType": "m5.large"},
        "worker_nodes": {
            "InstanceType": "g5.xlarge",
            "InstanceMarketOptions": {"MarketType": "spot"},
        },
    }
    (kind,) = cluster_from_document(document).node_types
    assert (kind.gpu_type, kind.max_nodes, kind.spot) == ("A10G", 3, True)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("head: {enabled: true}\nworker: {replicas: 1}\n", "KubeRay's Helm chart"),
        ("cloud: c\nhead_node: {instance_type: m5.2xlarge}\nworker_nodes: []\n", "Anyscale"),
        ("apiVersion: v1\nkind: Pod\n", "is a Pod of v1"),
        ("services: {head: {image: ray}}\n", "has no key of a Ray cluster file, but services"),
        ("a: {{ .Values.a }}\n  b: [{{- if }}\n", "is a template"),
        (
            "cluster_name: c\nprovider: {type: local, head_ip: a, worker_ips: [b]}\n",
            "lists machines",
        ),
        (
            "apiVersion: v1\nkind: Pod\n---\napiVersion: v1\nkind: Secret\n",
            "none of which is a Ray",
        ),
        ("resources: {accelerators: A100:8}\nnum_nodes: 2\nrun: train\n", "a SkyPilot task"),
        ("name: pipeline\n---\nsetup: a\nrun: b\n", "a SkyPilot task"),
        ("#!/bin/bash\n#SBATCH --gres=gpu:8\nsrun ray start --head\n", "a Slurm script"),
        ("#!/bin/bash\nray up: [\n", "is a script"),
        ("cluster_name: c\nprovider: {type: vsphere}\n", "file for vSphere"),
        (
            "cluster_name: c\nprovider: {type: vsphere}\n"
            "available_node_types: {a: {resources: {}}}\n",
            "file for vSphere",
        ),
    ],
)
def test_files_of_other_tools_get_their_own_sentence(tmp_path, text, named):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=named):
        cluster_from_yaml(tmp_path / "c.yaml")
