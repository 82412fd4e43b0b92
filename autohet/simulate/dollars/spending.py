"""SIMULATED dollars other than those of machines: data between zones, and requests to S3."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autohet.driver.events.zone_bill import ZoneBill
from autohet.runtime.messages import GenerationOrder
from autohet.simulate.costs import Costs
from autohet.simulate.fleet.order_bytes import checkpoint_bytes
from autohet.simulate.trained_span import TrainedSpan
from planner.inputs.documents import Document, Json
from planner.inputs.zones import GB
from recovery.storage.protocol import StorageOptions

PART_BYTES = StorageOptions().part_bytes


@dataclass
class S3Requests:
    """S3 requests of one run.

    puts: parts of uploads, their beginnings and ends, and manifests. gets: ranges that restores
    read.
    """

    puts: int = 0
    gets: int = 0

    def count_checkpoint(self, orders: Mapping[str, GenerationOrder]) -> None:
        """Count the requests of a generation's checkpoint: each worker's part, and the manifest."""
        for order in orders.values():
            num_bytes = checkpoint_bytes(order)
            self.puts += math.ceil(num_bytes / PART_BYTES)
            if num_bytes > PART_BYTES:
                # A multipart upload has a request to begin it and one to complete it.
                self.puts += 2
        self.puts += 1

    def count_restore(self, num_bytes: int) -> None:
        self.gets += math.ceil(num_bytes / PART_BYTES)

    def usd(self, costs: Costs) -> float:
        return self.puts * costs.s3_put_usd + self.gets * costs.s3_get_usd


def zone_bill(events: Iterable[Json], spans: Sequence[TrainedSpan]) -> ZoneBill:
    """Return the bill of traffic between zones by a run's steps and its rounds of copies."""
    steps: dict[int, int] = {}
    for span in spans:
        steps[span.generation] = steps.get(span.generation, 0) + span.num_steps
    bill = ZoneBill()
    for event in events:
        if event["kind"] != "plan":
            continue
        bill.take(event)
        # Taken out, so that a generation's steps count once whatever number of events it has.
        number = steps.pop(event["generation"], 0)
        bill.take_many(number, _rounds(event.get("replication"), number))
    return bill


def _rounds(replication: Json | None, steps: int) -> int:
    every: int = (replication or {}).get("every_steps", 0)
    if not every:
        return 0
    return steps // every


def usd_document(nodes_usd: float, zones: ZoneBill, requests: S3Requests, costs: Costs) -> Document:
    """Return the dollars of a run by use."""
    s3_usd = requests.usd(costs)
    between_zones: list[Document] = []
    for row in zones.rows():
        between_zones.append(
            {
                "zones": list(row.zones),
                "use": row.use,
                "gb": row.num_bytes / GB,
                "usd": row.usd,
            }
        )
    return {
        "usd_by_use": {"nodes": nodes_usd, "between_zones": zones.usd, "s3_requests": s3_usd},
        "usd_in_all": nodes_usd + zones.usd + s3_usd,
        "between_zones": between_zones,
        "s3_requests": {"puts": requests.puts, "gets": requests.gets},
    }
