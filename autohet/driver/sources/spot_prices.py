"""Prices of spot instances by EC2's `describe_spot_price_history`.

Without an answer, the catalogue's dated on-demand price is used.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Any, NamedTuple

from autohet.driver.sources.watch import Watch
from autohet.runtime.process.metadata_server import InstanceFacts
from planner.inputs.autoscaling import autoscaling_config
from planner.inputs.catalogue import instance_types
from planner.inputs.cluster import Cluster
from planner.inputs.documents import Json
from planner.inputs.fleet import NodeType
from planner.inputs.zones import region_of

logger = logging.getLogger("autohet")
POLL_S = 300.0
PRODUCTS = ("Linux/UNIX", "Linux/UNIX (Amazon VPC)")
"""EC2's names of Linux; the second is used in accounts that once had EC2-Classic."""
PRICE_LABEL = "autohet.io/usd-per-hour"
USUAL_S = 3 * 86400.0
"""Seconds of the past whose median is a usual price."""
Changes = Sequence[tuple[float, float]]
"""Changes of a price, by time: (second, dollars an hour from then on)."""


class KnownPrice(NamedTuple):
    """Newest and usual price of an instance type in a zone, in dollars an hour."""

    newest: float
    usual: float


Prices = Mapping[tuple[str, str], KnownPrice]
"""Prices by instance type and zone."""


class PricePoint(NamedTuple):
    """Spot price of an instance type in a zone, in dollars an hour, that holds from `since` on."""

    instance_type: str
    zone: str
    since: datetime
    usd_per_hour: float


def price_points(pages: Iterable[Json]) -> Iterator[PricePoint]:
    """Yield the entries of the pages that boto3 or the AWS CLI (`--output json`) returns.

    Entries that cannot be read are left out, and so are prices of other systems than Linux.
    """
    for page in pages:
        for entry in page.get("SpotPriceHistory", ()):
            try:
                point = _price_point(entry)
                is_linux = entry.get("ProductDescription", PRODUCTS[0]) in PRODUCTS
            except (AttributeError, KeyError, TypeError, ValueError):
                continue
            if is_linux and 0 < point.usd_per_hour < math.inf:
                yield point


def _price_point(entry: Json) -> PricePoint:
    """Read one entry; boto3 gives a moment as a datetime, the AWS CLI as text."""
    since = entry["Timestamp"]
    usd_per_hour = float(entry["SpotPrice"])
    if not isinstance(since, datetime):
        since = datetime.fromisoformat(since)
    if not since.tzinfo:
        since = since.replace(tzinfo=UTC)
    instance_type = str(entry["InstanceType"])
    return PricePoint(instance_type, str(entry["AvailabilityZone"]), since, usd_per_hour)


def price_changes(pages: Iterable[Json]) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Return the price of each type and zone over time, in seconds of the epoch."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for point in sorted(price_points(pages), key=lambda point: point.since):
        changes = found.setdefault((point.instance_type, point.zone), [])
        changes.append((point.since.timestamp(), point.usd_per_hour))
    return found


def newest_price(changes: Changes) -> float:
    return changes[-1][1]


def usual_price(changes: Changes, now: float) -> float:
    """Return the median of a price over the last USUAL_S seconds."""
    ends = [at for at, _ in changes[1:]]
    weighted = []
    for (begin, usd), end in zip(changes, [*ends, now], strict=True):
        weighted.append((usd, max(0.0, min(end, now) - max(begin, now - USUAL_S))))
    half_s = sum(seconds for _, seconds in weighted) / 2
    for usd, seconds in sorted(weighted):
        half_s -= seconds
        if half_s <= 0:
            return usd
    return newest_price(changes)


@dataclass(frozen=True)
class SpotType:
    """Spot node type in EC2's terms.

    zones: zones in which its nodes may come; empty if unknown.
    """

    instance_type: str
    zones: frozenset[str]
    region: str


def spot_types(cluster: Cluster, document: Json) -> dict[str, SpotType]:
    """Return the spot node types of a cluster-launcher document by name.

    Types whose price is given by a label are left out.
    """
    found = {}
    types = autoscaling_config(document).types if document else {}
    for kind in cluster.node_types:
        known = types[kind.name]
        instance = known.instance_type
        if kind.spot and instance in instance_types() and PRICE_LABEL not in known.labels:
            found[kind.name] = SpotType(instance, known.zones, known.region)
    return found


class SpotPrices:
    """Looks up spot prices in a thread, which starts with the first lookup.

    A type is looked up regularly once it was asked for.
    """

    def __init__(
        self, make_client: Callable[[str], Any] | None = None, poll_s: float = POLL_S
    ) -> None:
        self._make = make_client or ec2_client
        self._poll_s = poll_s
        self._wanted: set[str] = set()
        self._incomplete: set[str] = set()
        self._region = ""
        self._watch: Watch[Prices] | None = None

    def usd_per_hour(self, instance_type: str, zone: str) -> float | None:
        """Return the current price, or None while none is known; never blocks."""
        known = self._known(instance_type, region_of(zone)).get((instance_type, zone))
        return None if known is None else known.newest

    def usual(self, kinds: Mapping[str, SpotType]) -> dict[str, float]:
        """Return usual prices by name; see `of`."""
        return self.of(kinds, attrgetter("usual"))

    def of(
        self,
        kinds: Mapping[str, SpotType],
        read: Callable[[KnownPrice], float] = attrgetter("newest"),
    ) -> dict[str, float]:
        """Return prices by name, for types whose price is known in all zones of the type.

        The price is that of the dearest zone in which a node may come, since a bound on the price
        holds wherever it does. Never blocks.
        """
        found = {}
        for name, kind in kinds.items():
            prices = {}
            for (instance, zone), price in self._known(kind.instance_type, kind.region).items():
                is_possible = not kind.zones or zone in kind.zones
                if instance == kind.instance_type and is_possible:
                    prices[zone] = read(price)
            missing = kind.zones - prices.keys()
            if prices and not missing:
                found[name] = max(prices.values())
            elif prices and name not in self._incomplete:
                self._incomplete.add(name)
                logger.warning(
                    "EC2 names no spot price of %s in %s: the on-demand price stands for '%s'",
                    kind.instance_type,
                    ", ".join(sorted(missing)),
                    name,
                )
        return found

    def _known(self, instance_type: str, region: str) -> Prices:
        if instance_type not in self._wanted:
            # A new set, since the thread may be reading the old one.
            self._wanted = self._wanted | {instance_type}
            self._region = self._region or region
            if self._watch is None:
                self._watch = Watch("EC2's spot price history", self._ask, self._poll_s)
            else:
                self._watch.ask_now()
        return {} if self._watch is None else self._watch.answer or {}

    def _ask(self) -> Prices:
        """Return the prices, of whose past EC2 begins with those in effect at the start."""
        client = self._make(self._region)
        now = datetime.now(UTC)
        pages = client.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=sorted(self._wanted),
            ProductDescriptions=[*PRODUCTS],
            StartTime=now - timedelta(seconds=USUAL_S),
        )
        # Here, since the driver asks for usual prices twenty times a second.
        found = {}
        for key, changes in price_changes(pages).items():
            usual = usual_price(changes, now.timestamp())
            found[key] = KnownPrice(newest_price(changes), usual)
        return found

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()


def ec2_client(region: str) -> Any:
    import boto3

    return boto3.client("ec2", region_name=region or None)


def live_node_type(
    kind: NodeType,
    facts: InstanceFacts | None,
    labels: Mapping[str, str],
    usd_per_hour: float | None,
) -> NodeType:
    """Return the node's type with the zone and market that the node itself reports.

    A spot node has the spot price unless a label gives the price that is paid.
    """
    if facts is None:
        return kind
    is_spot = facts.market == "spot"
    live = replace(kind, zone=facts.zone, spot=is_spot)
    if is_spot and usd_per_hour is not None and PRICE_LABEL not in labels:
        live = replace(live, usd_per_hour=usd_per_hour)
    return live
