"""Clusters and fleets: catalogue, labels that override it, strict errors that name the remedy."""

import json

import pytest

from planner.catalogue import canonical_gpu_type, find_gpu_type, instance_types
from planner.cluster import (
    Fleet,
    Node,
    cluster_from_document,
    cluster_from_yaml,
    node_type_from_labels,
)
from planner.errors import ConfigError

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
            "no node type.*'m5.large' of 'head' is not in the catalogue",
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
        assert row.usd_per_hour > 0
        assert row.num_gpus in (1, 4, 8)
    families = {name.split(".")[0] for name in instance_types()}
    assert {"p3", "p4d", "p4de", "p5", "g4dn", "g5", "g6", "g6e"} <= families


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
    rows = instance_types()
    bursting = {
        name: row for name, row in rows.items() if row.inter_node_burst_bytes_per_s is not None
    }
    assert len(bursting) == 12
    assert all(
        row.inter_node_bytes_per_s < row.inter_node_burst_bytes_per_s for row in bursting.values()
    )
    assert rows["g5.xlarge"].inter_node_bytes_per_s == 2.5e9 / 8
    assert rows["g5.xlarge"].inter_node_burst_bytes_per_s == 10e9 / 8
    assert node_type_from_labels("n", {}, None, "g4dn.xlarge").inter_node_bytes_per_s == 5e9 / 8


def test_host_memory_is_the_labels_or_the_catalogues_or_nobodys():
    assert node_type_from_labels("n", LABELS, 1).host_memory_bytes is None
    assert node_type_from_labels("n", {}, None, "g5.xlarge").host_memory_bytes == 16 * 2**30
    labels = {"autohet.io/host-memory-gib": "12.5"}
    assert node_type_from_labels("n", labels, None, "g5.xlarge").host_memory_bytes == 12.5 * 2**30


def test_the_catalogues_host_memory_is_what_describe_instance_types_says():
    from moto.ec2.models.instance_types import INSTANCE_TYPES

    known = {name: row for name, row in instance_types().items() if name in INSTANCE_TYPES}
    assert instance_types().keys() - known.keys() == {"p3.2xlarge", "p3.8xlarge", "p3.16xlarge"}
    for name, row in known.items():
        assert row.host_memory_bytes == INSTANCE_TYPES[name]["MemoryInfo"]["SizeInMiB"] * 2**20, (
            name
        )
