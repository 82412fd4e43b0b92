"""What a run carried between zones, from its events: by step, by copies, by pair of zones."""

import pytest

from autohet.driver.events.zone_bill import ZoneBill
from autohet.driver.report.page import report_page

PAIR = ["us-east-1a", "us-east-1b"]
TRANSFER = {"zones": PAIR, "bytes_per_step": 3e9, "usd_per_gb": 0.02}
COPIES = {"bytes": 40, "by_zones": [{"zones": PAIR, "bytes": 10, "usd_per_gb": 0.02}]}


def plan(**facts):
    return {"kind": "plan", "time": 0.0, "generation": 1, "transfers": [], **facts}


def step(number):
    facts = {"step": number, "loss": 1.0, "tokens": 10, "seconds": 1.0}
    return {"kind": "step", "time": float(number), "generation": 1, **facts}


def sent(peer, s3=0):
    parts = [{"tier": "peer", "bytes": peer}, {"tier": "s3", "bytes": s3}]
    return {"kind": "transfers", "time": 9.0, "generation": 1, "transfers": parts}


def test_each_step_carries_what_its_own_plan_says():
    bill = ZoneBill()
    for event in (step(0), plan(transfers=[TRANSFER]), step(1), step(2), plan(), step(3)):
        bill.take(event)
    (row,) = bill.rows()
    assert (row.zones, row.use, row.num_bytes) == (tuple(PAIR), "training", 6e9)
    assert bill.usd == row.usd == pytest.approx(0.12)


def test_of_copies_the_part_of_their_rounds_that_leaves_the_zone_is_paid():
    bill = ZoneBill()
    for event in (sent(1e9), plan(replication=COPIES), sent(8e9, s3=5e9), plan(replication=None)):
        bill.take(event)
    bill.take(sent(8e9))
    (row,) = bill.rows()
    assert (row.use, row.num_bytes) == ("copies", 2e9)
    assert row.usd == pytest.approx(0.04)


def test_the_report_shows_it_where_there_is_any():
    events = [plan(transfers=[TRANSFER], replication=COPIES), step(0), sent(8e9), step(1)]
    page = report_page(events, "zones")
    assert "<h2>Data between zones</h2>" in page
    assert "us-east-1a - us-east-1b" in page
    assert "<td>6.000</td><td>0.12</td>" in page
    assert "<td>2.000</td><td>0.04</td>" in page
    assert "Data between zones" not in report_page([plan(), step(0)], "one zone")
