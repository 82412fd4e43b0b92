"""Zone, type and price of a node, as EC2 says them: a recorded answer of
`describe_spot_price_history`, since moto serves none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from autohet.driver.sources.spot_prices import (
    USUAL_S,
    SpotPrices,
    live_node_type,
    newest_price,
    price_changes,
    spot_types,
    usual_price,
)
from autohet.runtime.process.metadata_server import InstanceFacts
from planner.inputs.cluster import cluster_from_document, node_type_from_labels
from tests.harness.waits import wait_until

RECORDED = """{"SpotPriceHistory": [
 {"AvailabilityZone": "us-east-1a", "InstanceType": "g5.2xlarge", "ProductDescription": "Linux/UNIX", "SpotPrice": "0.481200", "Timestamp": "2026-11-24T09:01:53+00:00"},
 {"AvailabilityZone": "us-east-1a", "InstanceType": "g5.2xlarge", "ProductDescription": "Linux/UNIX", "SpotPrice": "0.530100", "Timestamp": "2026-11-24T05:01:20+00:00"},
 {"AvailabilityZone": "us-east-1b", "InstanceType": "g5.2xlarge", "ProductDescription": "Linux/UNIX", "SpotPrice": "0.602000", "Timestamp": "2026-11-24T08:31:11+00:00"},
 {"AvailabilityZone": "us-east-1b", "InstanceType": "g5.2xlarge", "ProductDescription": "Linux/UNIX", "SpotPrice": "free", "Timestamp": "2026-11-24T10:31:11+00:00"},
 {"AvailabilityZone": "us-east-1b"}
]}"""  # noqa: E501


def recorded() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(RECORDED)
    for entry in document["SpotPriceHistory"]:
        if "Timestamp" in entry:
            entry["Timestamp"] = datetime.fromisoformat(entry["Timestamp"])
    return document


class FakeEc2:
    """Answers with the recorded pages, once it works."""

    works = False

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def get_paginator(self, name: str) -> FakeEc2:
        assert name == "describe_spot_price_history"
        return self

    def paginate(self, **arguments: Any) -> Iterator[dict[str, Any]]:
        self.asked.append(arguments)
        if not self.works:
            raise PermissionError("UnauthorizedOperation")
        yield recorded()
        yield {"SpotPriceHistory": []}


def test_the_newest_price_of_each_type_and_zone_counts() -> None:
    found = price_changes([recorded()])
    assert {key: newest_price(changes) for key, changes in found.items()} == {
        ("g5.2xlarge", "us-east-1a"): 0.4812,
        ("g5.2xlarge", "us-east-1b"): 0.602,
    }


def test_the_usual_price_is_the_median_over_time_of_the_last_days() -> None:
    """Wrong: the mean, the median of the changes, or a price of last week."""
    jumps = [(0.0, 9.0), (USUAL_S, 1.0), (1.4 * USUAL_S, 3.0), (1.5 * USUAL_S, 1.1)]
    assert usual_price(jumps, 2 * USUAL_S) == 1.1
    assert usual_price(jumps[:3], 1.5 * USUAL_S) == 3.0
    assert usual_price([(5.0, 2.0)], 5.0) == 2.0


def test_a_price_that_nobody_tells_is_none_and_asked_for_again() -> None:
    fake = FakeEc2()
    prices = SpotPrices(lambda region: fake, 0.02)
    try:
        assert prices.usd_per_hour("g5.2xlarge", "us-east-1a") is None
        wait_until(lambda: len(fake.asked) > 1, "a second question")
        fake.works = True
        wait_until(lambda: prices.usd_per_hour("g5.2xlarge", "us-east-1a") == 0.4812, "the price")
        assert prices.usd_per_hour("p4d.24xlarge", "us-east-1a") is None
        wait_until(
            lambda: "p4d.24xlarge" in fake.asked[-1]["InstanceTypes"], "a question for the new type"
        )
        assert fake.asked[-1]["ProductDescriptions"] == [
            "Linux/UNIX",
            "Linux/UNIX (Amazon VPC)",
        ]
    finally:
        prices.close()


def test_a_new_type_is_asked_for_at_once() -> None:
    """Not at the next turn, five minutes later."""
    fake = FakeEc2()
    fake.works = True
    prices = SpotPrices(lambda region: fake)
    try:
        prices.usd_per_hour("g5.xlarge", "us-east-1a")
        wait_until(lambda: len(fake.asked) == 1, "the first question")
        prices.usd_per_hour("g5.2xlarge", "us-east-1a")
        wait_until(lambda: prices.usd_per_hour("g5.2xlarge", "us-east-1a") == 0.4812, "the price")
    finally:
        prices.close()


def test_a_type_that_nobody_has_bought_yet_has_the_dearest_price_of_its_zones() -> None:
    """Of the launcher's file: spot types whose price no label says."""
    types: dict[str, Any] = {
        name: {
            "node_config": {
                "InstanceType": "g5.2xlarge",
                "InstanceMarketOptions": {"MarketType": "spot"},
            },
            "max_workers": 1,
        }
        for name in ("spot", "here", "labelled", "demand")
    }
    types["here"]["node_config"]["Placement"] = {"AvailabilityZone": "us-east-1a"}
    types["labelled"]["labels"] = {"autohet.io/usd-per-hour": "0.3"}
    del types["demand"]["node_config"]["InstanceMarketOptions"]
    provider = {"type": "aws", "region": "us-east-1", "availability_zone": "us-east-1a, us-east-1b"}
    document = {"cluster_name": "c", "provider": provider, "available_node_types": types}
    kinds = spot_types(cluster_from_document(document), document)
    fake = FakeEc2()
    fake.works = True
    prices = SpotPrices(lambda region: fake)
    try:
        wait_until(lambda: prices.of(kinds) == {"spot": 0.602, "here": 0.4812}, "the prices")
        del provider["availability_zone"]
        assert prices.of(spot_types(cluster_from_document(document), document))["spot"] == 0.602, (
            "in any zone"
        )
    finally:
        prices.close()


def test_what_the_node_says_counts_before_labels_and_catalogue() -> None:
    labels = {"autohet.io/zone": "us-east-1f", "autohet.io/spot": "false"}
    kind = node_type_from_labels("g5", labels, 1, "g5.2xlarge")
    assert live_node_type(kind, None, labels, None) == kind
    spot = InstanceFacts("i-1", "g5.2xlarge", "us-east-1a", "spot")
    live = live_node_type(kind, spot, labels, 0.4812)
    assert (live.zone, live.spot, live.usd_per_hour) == ("us-east-1a", True, 0.4812)
    assert live_node_type(kind, spot, labels, None).usd_per_hour == kind.usd_per_hour
    paid = {**labels, "autohet.io/usd-per-hour": "0.3"}
    assert (
        live_node_type(
            node_type_from_labels("g5", paid, 1, "g5.2xlarge"), spot, paid, 0.4812
        ).usd_per_hour
        == 0.3
    )
    demand = InstanceFacts("i-1", "g5.2xlarge", "us-east-1a", "on-demand")
    assert live_node_type(kind, demand, labels, 0.4812).usd_per_hour == kind.usd_per_hour
