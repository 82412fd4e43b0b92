"""Spot prices over time from a file, and a sentence on the source of each price.

The file is EC2's answer to `describe-spot-price-history` or a CSV.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from autohet.driver.sources.spot_prices import (
    PRICE_LABEL,
    PricePoint,
    SpotType,
    price_points,
)
from autohet.simulate.dollars.prices import PriceRow
from planner.errors import ConfigError
from planner.inputs.autoscaling import AutoscaledType, autoscaling_config
from planner.inputs.catalogue import PRICES_AS_OF
from planner.inputs.cluster import Cluster
from planner.inputs.documents import parse_csv, read_text
from planner.inputs.fleet import NodeType
from planner.inputs.zones import region_of

COLUMNS = ("time_s", "node_type", "usd_per_hour")
HISTORY = "SpotPriceHistory"
ByPlace = Mapping[tuple[str, str], Sequence[PricePoint]]
"""Points by instance type and zone, in order of time."""


@dataclass(frozen=True)
class RecordedPrices:
    """Rows of prices, and the source of the prices of each node type that has rows."""

    rows: Sequence[PriceRow] = ()
    sources: Mapping[str, str] = field(default_factory=dict)


def read_prices(
    path: str | Path, cluster: Cluster, document: object = None, begin: datetime | None = None
) -> RecordedPrices:
    """Read prices from a CSV or from JSON.

    The CSV has `time_s, node_type, usd_per_hour` (of a node). The JSON is as `aws ec2
    describe-spot-price-history` prints it (a list of such answers, too). For it, `document`, the
    cluster file, gives the node types' instance types, and its spot nodes get prices. The trace
    begins at `begin`, by default when all of them have a price.

    Raises:
        ConfigError: a column or a value that does not fit, a node type that the cluster does not
        have; nothing for any spot node type, several zones for one that names none, a `begin`
        outside the file.
    """
    text = read_text(path, "prices")
    if text.lstrip()[:1] in ("{", "["):
        places = _places(cluster, document)
        return _from_history(_by_place(text, path), path, cluster, places, begin)
    if begin is not None:
        raise ConfigError(
            f"prices '{path}' are a CSV, whose time_s counts from the trace's begin: leave out"
            " --prices-from"
        )
    columns, rows = parse_csv(text, f"prices '{path}'")
    if columns != COLUMNS:
        raise ConfigError(
            f"prices '{path}' has columns {', '.join(columns) or 'none'}; they must be"
            f" {', '.join(COLUMNS)}"
        )
    names = {kind.name for kind in cluster.node_types}
    found = []
    for number, row in enumerate(rows, 1):
        if row["node_type"] not in names:
            raise ConfigError(
                f"row {number} of prices '{path}' names node type '{row['node_type']}'; the cluster"
                f" has {', '.join(sorted(names))}"
            )
        time_s = _number(row, "time_s", number, path)
        usd_per_hour = _number(row, "usd_per_hour", number, path)
        found.append((time_s, row["node_type"], usd_per_hour))
    return RecordedPrices(found, {name: f"over time, by '{path}'" for _, name, _ in found})


def price_sources(cluster: Cluster, document: object, recorded: RecordedPrices) -> dict[str, str]:
    """Return the source of each node type's price; the text says so if the price is constant."""
    types = autoscaling_config(document).types if document is not None else {}
    found = {}
    for kind in cluster.node_types:
        recorded_source = recorded.sources.get(kind.name)
        found[kind.name] = recorded_source or _constant_source(kind, types.get(kind.name))
    return found


def _constant_source(kind: NodeType, known: AutoscaledType | None) -> str:
    if kind.usd_per_hour is None:
        return "no price is known: its hours count as free"
    if known is not None and PRICE_LABEL in known.labels:
        return f"constant, the cluster file's label {PRICE_LABEL}"
    instance = None if known is None else known.instance_type
    return f"constant, the catalogue's price of {instance}: {PRICES_AS_OF}"


def _places(cluster: Cluster, document: object) -> dict[str, SpotType]:
    """Return each node type's instance type (empty if unknown), zones and region."""
    types = autoscaling_config(document).types if document is not None else {}
    found = {}
    for kind in cluster.node_types:
        known = types.get(kind.name)
        found[kind.name] = SpotType("", frozenset(), "")
        if known is not None:
            instance = known.instance_type or ""
            found[kind.name] = SpotType(instance, known.zones, known.region)
    return found


# EC2's answer
# ------------------------------------------------------------------------------


def _by_place(text: str, path: str | Path) -> ByPlace:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"prices '{path}' are no JSON: {error}") from None
    pages = document if isinstance(document, list) else [document]
    for page in pages:
        if not (isinstance(page, Mapping) and isinstance(page.get(HISTORY), list)):
            raise ConfigError(
                f"prices '{path}' have no list {HISTORY}, as `aws ec2 describe-spot-price-history`"
                " prints it"
            )
    found: dict[tuple[str, str], list[PricePoint]] = {}
    for point in sorted(price_points(pages), key=lambda point: point.since):
        found.setdefault((point.instance_type, point.zone), []).append(point)
    return found


def _from_history(
    by_place: ByPlace,
    path: str | Path,
    cluster: Cluster,
    places: Mapping[str, SpotType],
    begin: datetime | None,
) -> RecordedPrices:
    found = {}
    for kind in cluster.node_types:
        if kind.spot:
            points = _points_of(kind, places[kind.name], by_place, path)
            if points:
                found[kind.name] = points
    if not found:
        known = ", ".join(sorted({instance for instance, _ in by_place})) or "none"
        spot_names = [kind.name for kind in cluster.node_types if kind.spot]
        wanted = ", ".join(places[name].instance_type or "no instance type" for name in spot_names)
        raise ConfigError(
            f"prices '{path}' have nothing for any spot node type of the cluster: they are of"
            f" {known}, the cluster's spot nodes of {wanted or 'none'}"
        )

    first = max(points[0].since for points in found.values())
    last = max(points[-1].since for points in found.values())
    if begin is None:
        begin = first
    elif not begin.tzinfo:
        begin = begin.replace(tzinfo=UTC)
    if not first <= begin <= last:
        raise ConfigError(
            f"--prices-from is {begin.isoformat()}; prices '{path}' are of {first.isoformat()} to"
            f" {last.isoformat()}"
        )
    rows: list[PriceRow] = []
    sources = {}
    for name, points in found.items():
        sources[name] = (
            f"over time, EC2's spot price history of {points[0].instance_type} in"
            f" {points[0].zone}; the trace begins at {begin.isoformat()}"
        )
        for point in points:
            # A point before the beginning has a negative second: its price holds from 0 on.
            time_s = (point.since - begin).total_seconds()
            rows.append((time_s, name, point.usd_per_hour))
    return RecordedPrices(rows, sources)


def _points_of(
    kind: NodeType, spot: SpotType, by_place: ByPlace, path: str | Path
) -> Sequence[PricePoint]:
    """Return the prices of a node type: of its zone, or of the dearest in which it may come.

    `SpotPrices` takes the dearest for a run, too: a bound on the price holds wherever a node comes.
    """
    zones = sorted(zone for of, zone in by_place if of == spot.instance_type)
    if not zones:
        return ()
    allowed = {kind.zone} if kind.zone else spot.zones
    possible = []
    for zone in zones:
        in_region = not spot.region or region_of(zone) in ("", spot.region)
        if zone in allowed or (not allowed and in_region):
            possible.append(zone)
    if not possible:
        where = ", ".join(sorted(allowed)) or spot.region
        raise ConfigError(
            f"prices '{path}' have {spot.instance_type} in {', '.join(zones)}; node type"
            f" '{kind.name}' is in {where}"
        )
    if len(possible) > 1 and not allowed and not spot.region:
        raise ConfigError(
            f"prices '{path}' have {spot.instance_type} in {', '.join(zones)}; node type"
            f" '{kind.name}' names no zone: set the label 'autohet.io/zone' if it comes in one"
            " alone, or the provider's region"
        )
    return _dearest([by_place[spot.instance_type, zone] for zone in possible])


def _dearest(series: Sequence[Sequence[PricePoint]]) -> Sequence[PricePoint]:
    """Return the highest price of several zones over time, from when all of them have one."""
    if len(series) == 1:
        return series[0]
    zones = ", ".join(points[0].zone for points in series)
    current: dict[str, float] = {}
    found: list[PricePoint] = []
    for point in sorted(itertools.chain(*series), key=lambda point: point.since):
        current[point.zone] = point.usd_per_hour
        if len(current) == len(series):
            found.append(point._replace(zone=zones, usd_per_hour=max(current.values())))
    return found


# a CSV
# ------------------------------------------------------------------------------


def _number(row: Mapping[str, str], name: str, number: int, path: str | Path) -> float:
    try:
        value = float(row[name])
    except (TypeError, ValueError):
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise ConfigError(
            f"'{name}' of row {number} of prices '{path}' must be a number of at least 0, not"
            f" {row[name]!r}"
        )
    return value
