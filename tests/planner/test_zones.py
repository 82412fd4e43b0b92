"""Zones by their names, and links between them as cluster files have them."""

import math

import pytest

from planner.errors import ConfigError
from planner.inputs.cluster import cluster_from_document
from planner.inputs.zones import (
    EC2_ZONES,
    SAME_REGION,
    ZONE_LINKS,
    ZoneTable,
    read_zone_table,
    region_of,
)


@pytest.mark.parametrize(
    ("zone", "region"),
    [
        ("us-east-1a", "us-east-1"),
        ("us-west-2-lax-1a", "us-west-2"),
        ("us-east-1-wl1-bos-wlz-1", "us-east-1"),
        ("us-gov-west-1b", "us-gov-west-1"),
        ("us-east-1", "us-east-1"),
        ("us-east1-b", "us-east1"),
        ("europe-west4-a", "europe-west4"),
        ("local", ""),
        ("rack-7", ""),
        ("", ""),
    ],
)
def test_the_region_of_a_zone(zone, region):
    assert region_of(zone) == region


def test_nothing_is_said_of_one_zone_ec2_of_a_region_and_nothing_goes_between_regions():
    assert EC2_ZONES.link("us-east-1a", "us-east-1a") is None
    assert EC2_ZONES.link("us-east-1a", "") is None
    assert EC2_ZONES.link("us-east-1a", "us-east-1b") == SAME_REGION
    assert EC2_ZONES.link("rack-1", "rack-2") == SAME_REGION
    assert EC2_ZONES.usd_per_gb("us-east-1a", "us-east-1b") == 0.02
    assert not EC2_ZONES.connects("us-east-1a", "eu-west-1a")
    assert EC2_ZONES.usd_per_gb("us-east-1a", "eu-west-1a") == math.inf
    assert EC2_ZONES.first_unconnected(["us-east-1b", "eu-west-1a", ""]) == (
        "eu-west-1a",
        "us-east-1b",
    )
    assert ZoneTable(ignored=True).first_unconnected(["us-east-1b", "eu-west-1a"]) is None


def table(*links):
    return read_zone_table({"metadata": {ZONE_LINKS: list(links)}}, "cluster 'x'")


OCEAN = {
    "between": ["us-east-1", "eu-west-1"],
    "gbps": 4,
    "latency-ms": 70,
    "usd-per-gb": 0.02,
}


def test_a_file_names_links_by_region_or_by_zone_and_the_nearest_name_counts():
    near = {"between": ["us-east-1a", "us-east-1b"], "usd-per-gb": 0}
    found = table(OCEAN, near)
    assert found.link("us-east-1a", "us-east-1b").usd_per_gb == 0.0
    assert found.link("us-east-1a", "us-east-1b").latency_s == SAME_REGION.latency_s
    assert found.link("us-east-1a", "us-east-1c") == SAME_REGION
    ocean = found.link("eu-west-1c", "us-east-1a")
    assert (ocean.bytes_per_s, ocean.latency_s, ocean.usd_per_gb) == (5e8, 0.07, 0.02)
    assert not found.connects("us-east-1a", "us-west-2a")


@pytest.mark.parametrize(
    ("link", "words"),
    [
        ({"between": ["us-east-1a"]}, ["link 1", "two zones or regions"]),
        ({**OCEAN, "gpbs": 1}, ["gpbs", "gbps"]),
        ({"between": ["us-east-1", "eu-west-1"], "gbps": 1}, ["latency-ms, usd-per-gb"]),
        ({**OCEAN, "usd-per-gb": -1}, ["usd-per-gb", "-1"]),
        ({**OCEAN, "gbps": "5"}, ["gbps", "'5'"]),
    ],
)
def test_what_is_wrong_in_the_table_is_named(link, words):
    with pytest.raises(ConfigError) as error:
        table(link)
    assert all(word in str(error.value) for word in words)


def test_cluster_files_bring_their_table():
    types = {"gpu": {"node_config": {"InstanceType": "g6.xlarge"}, "max_workers": 2}}
    document = {
        "cluster_name": "two",
        "max_workers": 2,
        "available_node_types": types,
        "metadata": {ZONE_LINKS: [OCEAN]},
    }
    assert cluster_from_document(document).zones.connects("us-east-1a", "eu-west-1a")
    del document["metadata"]
    assert cluster_from_document(document).zones == EC2_ZONES
