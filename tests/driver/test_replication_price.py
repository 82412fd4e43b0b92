"""Rounds of copies are as far apart as what they cost and what they avert make best."""

import math

import pytest

from autohet.control.planning.replication_price import CopiedTraining, RoundTraffic, spacing_of
from planner.inputs.zones import EC2_ZONES

PAIR = ("us-east-1a", "us-east-1b")
LLAMA_8B = RoundTraffic(96 * 10**9, 8.0, {PAIR: 96 * 10**9})
"""A round of an 8B model on four g6e nodes in two zones."""
G6E = CopiedTraining(step_s=4.0, sync_share=0.5, fleet_usd_per_hour=42.0, change_s=1500.0)


def spacing(traffic=LLAMA_8B, training=G6E, **changes):
    wishes = {"least_steps": 1, "bandwidth_share": 0.25, "usd_per_hour": None, **changes}
    return spacing_of(traffic, training, EC2_ZONES, **wishes)


def test_copies_between_zones_cost_five_percent_of_the_fleet_at_most():
    found = spacing()
    assert LLAMA_8B.usd(EC2_ZONES) == pytest.approx(96 * 0.02)
    assert 0.9 * 0.05 * 42 < found.usd_per_hour <= 0.05 * 42
    assert "every 823 steps" in found.why
    assert "1.92 $" in found.why


def test_a_job_that_pays_more_gets_more_but_no_more_than_is_worth_its_price():
    rich = spacing(usd_per_hour=10_000.0)
    assert rich.every_steps < spacing().every_steps
    cost_s = 1.92 / 42 * 3600 + 8.0 * 0.5 * 0.25 / 0.75
    assert rich.every_steps == math.ceil(math.sqrt(2 * cost_s * 1500.0) / 4.0)


def test_rounds_within_a_zone_are_spaced_by_the_time_that_they_take_from_training():
    inside = RoundTraffic(96 * 10**9, 8.0, {})
    found = spacing(inside)
    lost_s = 8.0 * 0.5 * 0.25 / 0.75
    assert found.every_steps == math.ceil(math.sqrt(2 * lost_s * 1500.0) / 4.0)
    assert found.usd_per_hour == 0.0
    small = RoundTraffic(10**6, 0.01, {})
    assert spacing(small).every_steps == 1, "a round that nobody notices is never left out"
    assert spacing(small, least_steps=7).every_steps == 7


def test_a_fleet_without_prices_pays_nothing_unasked():
    free = CopiedTraining(4.0, 0.5, None, 1500.0)
    assert spacing(training=free).every_steps == 0
    assert spacing(training=free, usd_per_hour=2.0).usd_per_hour <= 2.0
    assert spacing(usd_per_hour=0.0).every_steps == 0
