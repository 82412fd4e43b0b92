"""Limits of the gain over reading everything from S3.

Bounds of both policies over a range of S3 speeds, and what the fitted model predicts for several
sizes of state. Nothing is measured here.

    python -m scripts.benchmarks.recovery.sweep [NETWORK_GBPS]      prints one JSON document
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from autohet.bench.recovery.cases import SCENARIOS, config_of_size, policy_schedule
from autohet.bench.recovery.simulated import restore_seconds
from recovery.transfer.links import LinkRates

S3_BYTES_PER_S = tuple(speed * 1e9 for speed in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 12.0, 25.0))
STATE_BYTES = (1e9, 8e9)
SMALL_STATE_BYTES = 20e6
"""State size in bytes of the sweep of bounds.

All lines are bytes over a speed, so ratios of bounds do not depend on the state's size.
"""


def s3_sweep(cloud: LinkRates, scenarios: Sequence[str]) -> list[dict[str, Any]]:
    """Return the bounds' ratio for each scenario and S3 speed per node, with links like `cloud`.

    Each entry is {"scenario", "s3_bytes_per_s", "bound_ratio"}: the bound of `s3_only` over that of
    `local_first`, None if ours moves nothing.

    Bytes from S3 enter through the network card, so beyond the network's speed a faster S3 changes
    nothing.
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
            found.append(
                {
                    "scenario": name,
                    "s3_bytes_per_s": speed,
                    "bound_ratio": theirs / ours if ours else None,
                }
            )
    return found


def predicted_sweep(cloud: LinkRates, scenarios: Sequence[str]) -> list[dict[str, Any]]:
    """Predict restores for each scenario, size of state and S3 speed per node.

    Each entry is {"scenario", "state_bytes", "s3_bytes_per_s", "local_first_s", "s3_only_s",
    "ratio"}, in seconds of a restore by `restore_seconds`: the schedule's makespan, plus the cost
    of each read and message.

    The model was fitted to throttled links, on which processors were never the limit: where it
    predicts a few tenths of a second, this machine's copies would take longer.
    """
    found = []
    for state_bytes in STATE_BYTES:
        config = config_of_size(state_bytes)
        for name in scenarios:
            for speed in S3_BYTES_PER_S:
                links = replace(cloud, s3_bytes_per_s=speed)
                ours, theirs = (
                    _predicted(policy, name, config, links) for policy in ("local_first", "s3_only")
                )
                found.append(
                    {
                        "scenario": name,
                        "state_bytes": state_bytes,
                        "s3_bytes_per_s": speed,
                        "local_first_s": ours,
                        "s3_only_s": theirs,
                        "ratio": theirs / ours,
                    }
                )
    return found


def _predicted(policy: str, name: str, config: PreTrainedConfig, links: LinkRates) -> float:
    _, _, transfers = policy_schedule(policy, SCENARIOS[name], config, links, checked=False)
    return restore_seconds(transfers)


def main() -> None:
    gbps = float(sys.argv[1]) if len(sys.argv) > 1 else 25.0
    cloud = LinkRates(network_bytes_per_s=gbps * 1e9 / 8)
    scenarios = tuple(SCENARIOS)
    document = {
        "s3_sweep": s3_sweep(cloud, scenarios),
        "s3_sweep_predicted": predicted_sweep(cloud, scenarios),
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
