"""SIMULATED dollars beside the machines': data between zones by generation, requests to S3."""

from types import SimpleNamespace

import pytest

from autohet.simulate.costs import Costs
from autohet.simulate.dollars.spending import PART_BYTES, S3Requests, usd_document, zone_bill
from autohet.simulate.trained_span import TrainedSpan

PAIR = ["us-east-1a", "us-east-1b"]
TRANSFER = {"zones": PAIR, "bytes_per_step": 1e9, "usd_per_gb": 0.02}
COPIES = {
    "every_steps": 10,
    "bytes": 4e9,
    "by_zones": [{"zones": PAIR, "bytes": 2e9, "usd_per_gb": 0.02}],
}


def span(generation, num_steps):
    return TrainedSpan(generation, 0, 0.0, 1.0, 8, num_steps)


def test_steps_and_rounds_of_each_generation_are_paid_under_its_own_plan():
    events = [
        {"kind": "plan", "generation": 1, "transfers": [TRANSFER], "replication": COPIES},
        {"kind": "decision", "generation": 1},
        {"kind": "plan", "generation": 2, "transfers": [], "replication": None},
    ]
    bill = zone_bill(events, [span(1, 25), span(1, 10), span(2, 1000)])
    found = {row.use: (row.num_bytes, row.usd) for row in bill.rows()}
    assert found["training"] == (35e9, pytest.approx(0.7))
    assert found["copies"] == (3 * 2e9, pytest.approx(0.12))


def test_uploads_and_restores_are_counted_in_parts():
    layout = SimpleNamespace(shard_bytes=lambda shard: shard)
    small = SimpleNamespace(layout=layout, checkpoint_shards=(PART_BYTES // 2,))
    large = SimpleNamespace(layout=layout, checkpoint_shards=(PART_BYTES * 2, 1))
    requests = S3Requests()
    requests.count_checkpoint({"a": small, "b": large})
    requests.count_restore(PART_BYTES + 1)
    requests.count_restore(0)
    assert (requests.puts, requests.gets) == (1 + (3 + 2) + 1, 2)
    costs = Costs()
    assert requests.usd(costs) == pytest.approx(7 * 5e-6 + 2 * 4e-7)
    document = usd_document(10.0, zone_bill([], []), requests, costs)
    assert document["usd_in_all"] == pytest.approx(10.0 + requests.usd(costs))
    assert document["usd_by_use"]["nodes"] == 10.0
