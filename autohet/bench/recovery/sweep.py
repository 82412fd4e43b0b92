"""Where the gain over reading everything from S3 ends: bounds of both policies over a range of S3 speeds. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autohet.bench.recovery.cases import SCENARIOS, config_of_size, policy_schedule
from recovery.transfer.links import Links

S3_BYTES_PER_S = tuple(speed * 1e9 for speed in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 12.0, 25.0))
SMALL_STATE_BYTES = 20e6
"""All lines are bytes over a speed, so ratios of bounds do not depend on the state's size."""


def s3_sweep(cloud: Links, scenarios: Sequence[str]) -> list[dict[str, Any]]:
    """For each scenario and S3 speed a node, of links like `cloud`: {"scenario", "s3_bytes_per_s", "bound_ratio"}, the bound of
    `s3_only` over that of `local_first`. None where ours moves nothing.

    What enters from S3 enters through the card, so beyond the network's speed a faster S3 changes nothing.
    """
    config = config_of_size(SMALL_STATE_BYTES)
    found = []
    for name in scenarios:
        for speed in S3_BYTES_PER_S:
            links = replace(cloud, s3_bytes_per_s=speed)
            ours, theirs = (
                policy_schedule(policy, SCENARIOS[name], config, links)[2].lower_bound_s
                for policy in ("local_first", "s3_only")
            )
            found.append({"scenario": name, "s3_bytes_per_s": speed, "bound_ratio": theirs / ours if ours else None})
    return found
