"""What EventBridge says of the end of instances, in the payloads that AWS documents."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from autohet.driver.sources.ec2_events import RULE, UnreadableMessage, parse_events
from autohet.driver.sources.protocol import FAR_S, WatchedNode
from autohet.driver.sources.sqs_queue import QueueNotices
from tests.harness.notice_sources import ACCOUNT, QUEUE_URL, FakeQueue

NOW = datetime(2026, 11, 26, 12, 0, tzinfo=UTC)
"""Of every event here, and of the queues that answer with them: tests' ids must not move."""
MINE, OTHER = "i-0123456789abcdef0", "i-0fedcba9876543210"


def iso(in_s: float) -> str:
    return (NOW + timedelta(seconds=in_s)).isoformat().replace("+00:00", "Z")


def event(kind: str, detail: dict[str, Any], source: str = "aws.ec2", **more: Any) -> str:
    document = {
        "version": "0",
        "id": "12345678-1234-1234-1234-123456789012",
        "detail-type": kind,
        "source": source,
        "account": ACCOUNT,
        "time": iso(0),
        "region": "us-east-1",
        "resources": [],
        "detail": detail,
    }
    return json.dumps({**document, **more})


SPOT = event(
    "EC2 Spot Instance Interruption Warning",
    {"instance-id": MINE, "instance-action": "terminate"},
)
RESERVATION = event(
    "EC2 Capacity Reservation Instance Interruption Warning",
    {
        "instance-id": MINE,
        "instance-action": "terminate",
        "instance-termination-time": iso(600),
        "availability-zone-id": "use1-az1",
        "instance-lifecycle": "capacity-block",
    },
)
HOOK = event(
    "EC2 Instance-terminate Lifecycle Action",
    {
        "LifecycleActionToken": "0befcbdb-6ecd-498a-9ff7-ae9b54447cd6",
        "AutoScalingGroupName": "group",
        "LifecycleHookName": "hook",
        "EC2InstanceId": MINE,
        "LifecycleTransition": "autoscaling:EC2_INSTANCE_TERMINATING",
    },
    source="aws.autoscaling",
)
BLOCK = json.dumps(
    {
        "customer_event_id": "cr-0123456789abcdef0-approaching-expiry",
        "detail_type": "Capacity Block Reservation Expiration Warning",
        "source": "aws.ec2",
        "account": ACCOUNT,
        "time": iso(0),
        "resources": ["arn:aws:ec2:us-east-1:123456789012:capacity-reservation/cr-1"],
        "detail": {"capacity-reservation-id": "cr-1", "end-date": iso(2400)},
    }
)


def health(in_s: float, **more: Any) -> str:
    detail = {
        "eventArn": "arn:aws:health:us-east-1::event/EC2/AWS_EC2_INSTANCE_RETIREMENT_SCHEDULED/1",
        "service": "EC2",
        "eventTypeCode": "AWS_EC2_INSTANCE_RETIREMENT_SCHEDULED",
        "eventTypeCategory": "scheduledChange",
        "startTime": format_datetime(NOW + timedelta(seconds=in_s), usegmt=True),
        "affectedEntities": [{"entityValue": MINE}, {"entityValue": OTHER}],
    }
    return event("AWS Health Event", detail | more, source="aws.health")


def enveloped(body: str) -> str:
    """As an SNS topic between the rule and the queue delivers it."""
    return json.dumps(
        {
            "Type": "Notification",
            "MessageId": "22b80b92-fdea-4c2c-8f9d-bdfb0c7bf324",
            "TopicArn": "arn:aws:sns:us-west-2:123456789012:MyTopic",
            "Message": body,
            "Timestamp": "2012-05-02T00:54:06.655Z",
            "SignatureVersion": "1",
        }
    )


@pytest.mark.parametrize("wrap", [str, enveloped, lambda body: enveloped(enveloped(body))])
@pytest.mark.parametrize(
    ("body", "instances", "in_s"),
    [
        (SPOT, [MINE], 120.0),
        (RESERVATION, [MINE], 600.0),
        (HOOK, [MINE], 30.0),
        (health(900), [MINE, OTHER], 900.0),
        (BLOCK, [""], 600.0),
        (BLOCK.replace("Block Reservation", "Block"), [""], 600.0),
    ],
)
def test_each_payload_names_its_instances_and_their_end(
    wrap: Any, body: str, instances: list[str], in_s: float
) -> None:
    found = parse_events(wrap(body), 50.0, NOW.timestamp(), ACCOUNT)
    assert [each.instance_id for each in found] == instances
    assert [each.in_s for each in found] == [in_s] * len(instances)
    assert [each.moment for each in found] == [50.0] * len(instances)
    assert not any(each.risk for each in found)
    assert len({each.event_id for each in found}) == len(found)


@pytest.mark.parametrize(
    "body",
    [
        health(900, service="RDS"),
        health(900, eventTypeCategory="accountNotification"),
        health(900, statusCode="closed"),
        event("EC2 Instance State-change Notification", {"instance-id": MINE, "state": "running"}),
        event("Capacity Block Reservation Delivered", {"capacity-reservation-id": "cr-1"}),
        event("Capacity Block Delivered", {"capacity-reservation-id": "cr-1"}),
        json.dumps({"Event": "autoscaling:TEST_NOTIFICATION", "Time": iso(0)}),
    ],
)
def test_what_announces_no_end_says_nothing(body: str) -> None:
    assert parse_events(body, 0.0, NOW.timestamp(), ACCOUNT) == ()


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "null",
        enveloped("not JSON"),
        event("EC2 Spot Instance Interruption Warning", {"instance-id": 5}),
        event("Capacity Block Reservation Expiration Warning", {"capacity-reservation-id": "cr"}),
        event("AWS Health Event", {"service": "EC2"}, source="evil"),
        event("EC2 Instance Gone By Another Name", {"instance-id": MINE}),
    ],
)
def test_garbage_is_unreadable(body: str) -> None:
    with pytest.raises(UnreadableMessage, match="not an event of EC2's"):
        parse_events(body, 0.0, NOW.timestamp(), ACCOUNT)


def test_the_rule_of_prepare_matches_every_payload() -> None:
    present = BLOCK.replace("Block Reservation", "Block")
    for body in (SPOT, RESERVATION, HOOK, BLOCK, present, health(1)):
        document = json.loads(body)
        assert document["source"] in RULE["source"]
        assert document.get("detail-type", document.get("detail_type")) in RULE["detail-type"]


class Ec2:
    """`describe_instances` of one capacity reservation, whose filter it honours."""

    def __init__(self) -> None:
        self.works = False

    def get_paginator(self, name: str) -> Ec2:
        assert name == "describe_instances"
        return self

    def paginate(self, Filters: Any) -> Any:
        assert Filters == [{"Name": "capacity-reservation-id", "Values": ["cr-1"]}]
        if not self.works:
            raise ConnectionError("EC2 is away")
        instances = [
            {"InstanceId": each, "CapacityReservationId": "cr-1"} for each in (MINE, OTHER)
        ]
        return [{"Reservations": [{"Instances": instances}]}]


class QueueAtNow(FakeQueue):
    """Its clock says NOW, however far that is from this machine's."""

    def receive_message(self, **asked: Any) -> dict[str, Any]:
        date = {"date": format_datetime(NOW, usegmt=True)}
        return {**super().receive_message(**asked), "ResponseMetadata": {"HTTPHeaders": date}}


def watched() -> list[WatchedNode]:
    return [WatchedNode(name, name, name, (), 0.0) for name in (MINE, OTHER)]


def wait(done: Any) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_all_nodes_of_a_block_end_together_once_ec2_says_which_they_are() -> None:
    queue, ec2 = QueueAtNow(), Ec2()
    queue.works = True
    source = QueueNotices(QUEUE_URL, lambda url: queue, 0.02, lambda url: ec2)
    try:
        queue.waiting.append(BLOCK)
        wait(lambda: not queue.waiting)
        time.sleep(0.1)
        assert queue.deleted == 0, "it is asked again"
        ec2.works = True
        queue.waiting.append(BLOCK)
        wait(lambda: len(source.notices(watched(), time.monotonic())) == 2)
        left = [
            each.deadline - time.monotonic() for each in source.notices(watched(), time.monotonic())
        ]
        assert all(500 < each <= 601 for each in left)
        assert queue.deleted == 1
    finally:
        source.close()


def test_an_end_that_is_far_away_is_a_risk_until_it_is_near() -> None:
    queue = QueueAtNow()
    queue.works = True
    source = QueueNotices(QUEUE_URL, lambda url: queue, 0.02)
    try:
        queue.waiting.append(health(14 * 86400))
        now = time.monotonic()
        wait(lambda: source.notices(watched(), now))
        assert all(each.risk and each.deadline is None for each in source.notices(watched(), now))
        passed = 14 * 86400 - FAR_S / 2
        for events in source.by_instance.values():
            for key, known in events.items():
                events[key] = replace(known, moment=known.moment - passed)
        found = source.notices(watched(), time.monotonic())
        assert [each.risk for each in found] == [False, False]
        assert all(each.deadline is not None for each in found)
    finally:
        source.close()


@pytest.mark.parametrize(
    "body",
    ['{"what": "is this"}', event("EC2 Instance Gone By Another Name", {"instance-id": MINE})],
)
def test_what_cannot_be_read_is_kept_and_said_once(
    body: str, caplog: pytest.LogCaptureFixture
) -> None:
    queue = QueueAtNow()
    queue.works = True
    source = QueueNotices(QUEUE_URL, lambda url: queue, 0.02)
    try:
        with caplog.at_level(logging.WARNING, "autohet.sources"):
            for _ in range(3):
                queue.waiting.append(body)
                wait(lambda: not queue.waiting)
            queue.waiting.append(SPOT)
            wait(lambda: queue.deleted == 1)
        said = [record for record in caplog.records if "stays there" in record.getMessage()]
        assert len(said) == 1
    finally:
        source.close()
