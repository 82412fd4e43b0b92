"""Zones and regions: bandwidth between two zones, and price of a gigabyte sent between them.

Nodes of one zone, and nodes whose zone is unknown, exchange data at their own speed and for free.
Two zones of one region have EC2's speed and price (`SAME_REGION`). Two regions have no link unless
the cluster file names one, so that no plan crosses an ocean unasked.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from planner.errors import ConfigError
from planner.inputs.documents import check_keys, is_number, read_mapping

GB = 1e9
"""Bytes that prices of data transfer call a gigabyte."""
ZONE_LINKS = "autohet.io/zone-links"
"""Key of a cluster file's `metadata` (of a RayCluster's annotations) that holds the table."""
_KEYS = frozenset({"between", "gbps", "latency-ms", "usd-per-gb"})
_REGIONS = (
    re.compile(r"([a-z]+(?:-[a-z]+)+-\d+)(?:[a-z]|-[a-z]+-\d+[a-z]|-wl\d+-[a-z]+-wlz-\d+)?"),
    re.compile(r"([a-z]+-[a-z]+\d+)(?:-[a-z])?"),
)
"""Names of EC2's zones and of Google's.

EC2 has us-east-1a, the local zone us-west-2-lax-1a and the Wavelength zone
us-east-1-wl1-bos-wlz-1; Google has us-east1-b.
"""

ZonePair = tuple[str, str]
"""Two zones, in order of their names."""


@dataclass(frozen=True, slots=True)
class ZoneLink:
    """Data between two zones. bytes_per_s: what one stream between two GPUs reaches at most.
    latency_s: of one message, one way. usd_per_gb: for a gigabyte that goes one way, what leaving
    the one zone and entering the other cost together.
    """

    bytes_per_s: float
    latency_s: float
    usd_per_gb: float


SAME_REGION = ZoneLink(bytes_per_s=10e9, latency_s=0.5e-3, usd_per_gb=0.02)
"""Two zones of one EC2 region.

Price: 0.01 $/GB out of the one zone and 0.01 $/GB into the other (EC2 On-Demand Pricing, "Data
transfer within the same AWS Region"). Speed: 5 Gbit/s a flow outside of a placement group (EC2
User Guide, "Amazon EC2 instance network bandwidth") times the 16 sockets that NCCL opens to a peer
on EC2 (NCCL, net_socket.cc: two threads of eight sockets). Latency: zones of a region lie within
100 km (AWS, "Regions and Availability Zones"); about 1 ms there and back.
"""

NO_LINK = ZoneLink(bytes_per_s=1e6, latency_s=1.0, usd_per_gb=0.15)
"""Stands for a link that does not exist, so that plans which need one can be costed before they are
refused (`planner.search.walk.judge.unacceptable`).
"""


@cache
def region_of(zone: str) -> str:
    """Region of a zone by its name (us-east-1 of us-east-1a); empty for other names."""
    for pattern in _REGIONS:
        match = pattern.fullmatch(zone)
        if match:
            return match.group(1)
    return ""


def are_apart(one: str, other: str) -> bool:
    """Return True if both zones are known and differ."""
    return bool(one and other) and one != other


def zone_pair(one: str, other: str) -> ZonePair:
    return (one, other) if one <= other else (other, one)


@dataclass(frozen=True)
class ZoneTable:
    """Links between zones.

    links: by pair of names, each a zone's or a region's, as the cluster file has them.
    ignored: True: treat all nodes as if they were in one zone.
    """

    links: tuple[tuple[ZonePair, ZoneLink], ...] = ()
    ignored: bool = False

    def link(self, one: str, other: str) -> ZoneLink | None:
        """Return the link between two zones; None if there is none (`connects`).

        None too within one zone, and if a zone is not known.
        """
        if self.ignored or not are_apart(one, other):
            return None
        named = self._named_link(one, other)
        if named is not None:
            return named
        return SAME_REGION if _may_be_near(one, other) else None

    def connects(self, one: str, other: str) -> bool:
        """Return True if data may go between two zones.

        It may always go within a region, else only if the cluster file names the pair.
        """
        if self.ignored or not are_apart(one, other):
            return True
        return self.link(one, other) is not None

    def first_unconnected(self, zones: Iterable[str]) -> ZonePair | None:
        """Return the first two of these zones without a link between them; None if all have one."""
        for one, other in itertools.combinations(sorted(set(zones)), 2):
            if not self.connects(one, other):
                return one, other
        return None

    def usd_per_gb(self, one: str, other: str) -> float:
        """Price of a gigabyte from one zone to another; infinite where there is no link."""
        if not self.connects(one, other):
            return math.inf
        link = self.link(one, other)
        return 0.0 if link is None else link.usd_per_gb

    def usd(self, num_bytes: float, one: str, other: str) -> float:
        """Price of bytes from one zone to another; infinite where there is no link."""
        return num_bytes / GB * self.usd_per_gb(one, other)

    def _named_link(self, one: str, other: str) -> ZoneLink | None:
        """Return the file's link, by the most specific names.

        These are both zones, else a zone and the other's region, else both regions.
        """
        table = dict(self.links)
        for first in (one, region_of(one)):
            for second in (other, region_of(other)):
                found = table.get(zone_pair(first, second))
                if found is not None:
                    return found
        return None


EC2_ZONES = ZoneTable()
"""Default table for a cluster file that names no links."""


def refusal_of(pair: ZonePair) -> str:
    """Why nothing may go between two zones without a link, and the remedy."""
    return (
        f"{pair[0]} and {pair[1]} are in different regions, and the cluster file has no link"
        f" between them: name them under metadata, '{ZONE_LINKS}', with gbps, latency-ms and"
        " usd-per-gb, or plan on one region"
    )


def read_zone_table(top: Mapping[str, Any], where: str) -> ZoneTable:
    """The table of a cluster file; ConfigError names the entry that is wrong."""
    entries = None
    metadata = top.get("metadata")
    if isinstance(metadata, Mapping):
        entries = metadata.get(ZONE_LINKS)
    if entries is None:
        return ZoneTable()
    if not isinstance(entries, list):
        raise ConfigError(f"'{ZONE_LINKS}' of {where} must be a list of links, not {entries!r}")
    links: dict[ZonePair, ZoneLink] = {}
    for number, entry in enumerate(entries, 1):
        pair, link = _read_link(entry, f"link {number} of '{ZONE_LINKS}' in {where}")
        links[pair] = link
    return ZoneTable(tuple(sorted(links.items())))


def _read_link(entry: object, what: str) -> tuple[ZonePair, ZoneLink]:
    fields = read_mapping(entry, what)
    check_keys(fields, what, _KEYS, frozenset({"between"}))
    names = fields["between"]
    is_pair = isinstance(names, list) and len(names) == 2
    if not is_pair or not all(map(_is_name, names)):
        raise ConfigError(f"'between' of {what} must name two zones or regions, not {names!r}")
    missing = sorted(_KEYS - set(fields))
    if missing and not _may_be_near(*names):
        raise ConfigError(
            f"{what} lacks {', '.join(missing)}: between regions nothing is known of speed and"
            " price; say them"
        )
    gbps = _number(fields, "gbps", what, SAME_REGION.bytes_per_s * 8 / 1e9)
    latency_ms = _number(fields, "latency-ms", what, SAME_REGION.latency_s * 1e3, zero=True)
    usd_per_gb = _number(fields, "usd-per-gb", what, SAME_REGION.usd_per_gb, zero=True)
    link = ZoneLink(gbps * 1e9 / 8, latency_ms / 1e3, usd_per_gb)
    return zone_pair(*names), link


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _may_be_near(one: str, other: str) -> bool:
    """Return True if the names of two zones do not show that their regions differ."""
    regions = {region_of(one), region_of(other)} - {""}
    return len(regions) < 2


def _number(
    fields: Mapping[str, Any], key: str, what: str, default: float, *, zero: bool = False
) -> float:
    value = fields.get(key, default)
    is_allowed_zero = zero and value == 0.0
    is_positive = is_number(value) and 0.0 < value < math.inf
    if not is_number(value) or not (is_positive or is_allowed_zero):
        raise ConfigError(
            f"'{key}' of {what} must be a positive number{' or 0' * zero}, not {value!r}"
        )
    return float(value)


def known_zones(zones: Collection[str]) -> tuple[str, ...]:
    """Return each named zone once, sorted by name."""
    return tuple(sorted(set(zones) - {""}))
