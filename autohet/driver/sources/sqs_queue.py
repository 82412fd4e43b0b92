"""Source of EC2's announcements, which EventBridge sends through an SQS queue (`ec2_events`).

`scripts/aws/prepare` makes rule and queue. The queue is read by one job. A message is deleted once
it is remembered here, also if it is about other instances, so that nothing comes again for ever
(aws-node-termination-handler issues 360, 787, 1100). A message that cannot be read stays in the
queue for others to look at, as long as the queue keeps it.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from autohet.control.values.observation import Notice
from autohet.driver.sources.ec2_events import InstanceEvent, UnreadableMessage, parse_events
from autohet.driver.sources.protocol import FAR_S, WatchedNode
from autohet.driver.sources.watch import Watch
from planner.inputs.documents import Document, Json

logger = logging.getLogger("autohet.sources")
STALE_S = 600.0
"""Seconds after an announced end at which it says nothing of an instance that still lives."""
MOST_REMEMBERED = 10_000
MOST_SEEN = 50_000
LONG_POLL_S = 5


def account_of(url: str) -> str | None:
    """Return the account id in a queue's URL (https://sqs.REGION.amazonaws.com/ACCOUNT/NAME)."""
    found = re.search(r"://[^/]+/(?:queue/)?(\d{12})/", url)
    if found is None:
        return None
    return found.group(1)


class QueueNotices:
    """Owns a thread that reads the queue's messages.

    Events of accounts other than the queue's are refused. `client`: boto3's, made in the thread;
    made again if making it failed.
    """

    def __init__(
        self,
        url: str,
        make_client: Callable[[str], Any] | None = None,
        poll_s: float = 0.2,
        make_ec2: Callable[[str], Any] | None = None,
    ) -> None:
        self._url = url
        self._account = account_of(url)
        if self._account is None:
            logger.warning(
                "The queue's URL %s names no account of 12 digits; events of any account count", url
            )
        self._make = make_client or sqs_client
        self._client: Any = None
        self.by_instance: dict[str, dict[bool, InstanceEvent]] = {}
        """Newest event of each instance by its sort: a risk, or an end."""
        self._make_ec2 = make_ec2 or ec2_client
        # Ids of events and messages, oldest first: dictionaries keep the order, sets do not.
        self._seen: dict[str, None] = {}
        self._unreadable: dict[str, None] = {}
        self._watch = Watch("the queue of EC2's events", self._take, poll_s)

    def notices(self, nodes: Sequence[WatchedNode], now: float) -> list[Notice]:
        """Return the notices of these nodes.

        `now` and the events' moments are both monotonic; they differ in where they start.
        """
        ahead = now - time.monotonic()
        notices = []
        for node in nodes:
            if node.instance_id is None:
                continue
            # The thread replaces an instance's events and never changes them.
            for event in self.by_instance.get(node.instance_id, {}).values():
                age_s = now - ahead - event.moment
                if age_s < STALE_S + (event.in_s or 0.0):
                    notices.append(_notice(node.name, event, now, ahead))
        return notices

    def _take(self) -> int:
        """Make one long poll; return the number of messages."""
        if self._client is None:
            self._client = self._make(self._url)
        answer = self._client.receive_message(
            QueueUrl=self._url,
            MaxNumberOfMessages=10,
            WaitTimeSeconds=LONG_POLL_S,
            VisibilityTimeout=30,
        )
        now = time.monotonic()
        date = _date_of(answer)
        messages = answer.get("Messages", [])
        for message in messages:
            try:
                found = parse_events(message.get("Body", ""), now, date, self._account)
            except UnreadableMessage as error:
                # Logged once: it comes again until the queue drops it.
                key = str(message.get("MessageId") or message.get("Body", ""))[:200]
                if key not in self._unreadable:
                    logger.warning("A message in the queue of notices stays there, %s", error)
                    self._unreadable[key] = None
                _drop_oldest(self._unreadable, MOST_REMEMBERED)
                continue
            except ValueError as error:
                logger.warning("A message in the queue of notices is %s", error)
                found = ()
            for event in found:
                for each in self._of_each_instance(event):
                    self.remember(each)
            # Last: if anything before fails, the message comes again.
            self._client.delete_message(QueueUrl=self._url, ReceiptHandle=message["ReceiptHandle"])
        return len(messages)

    def _of_each_instance(self, event: InstanceEvent) -> list[InstanceEvent]:
        """Split the event of a whole capacity reservation into one for each of its instances."""
        if event.reservation is None:
            return [event]
        ec2 = self._make_ec2(self._url)
        pages = ec2.get_paginator("describe_instances").paginate(
            Filters=[{"Name": "capacity-reservation-id", "Values": [event.reservation]}]
        )
        events = []
        for page in pages:
            for launch in page["Reservations"]:
                for instance in launch["Instances"]:
                    if instance.get("CapacityReservationId") != event.reservation:
                        continue
                    instance_id = instance["InstanceId"]
                    event_id = f"{event.event_id}/{instance_id}"
                    events.append(replace(event, event_id=event_id, instance_id=instance_id))
        return events

    def remember(self, event: InstanceEvent) -> None:
        """Keep the newest event of each sort for each instance.

        Messages may come again, and in any order.
        """
        if event.event_id in self._seen:
            return
        self._seen[event.event_id] = None
        known = self.by_instance.get(event.instance_id, {})
        if event.risk not in known or known[event.risk].moment <= event.moment:
            self.by_instance[event.instance_id] = {**known, event.risk: event}

        _drop_oldest(self._seen, MOST_SEEN)
        _drop_oldest(self.by_instance, MOST_REMEMBERED)

    def close(self) -> None:
        self._watch.close(LONG_POLL_S + 3.0)


def _drop_oldest(entries: Document, most: int) -> None:
    while len(entries) > most:
        oldest = next(iter(entries))
        del entries[oldest]


def _notice(node: str, event: InstanceEvent, now: float, ahead: float) -> Notice:
    """Return an event's notice for a node at `now`.

    `ahead`: seconds by which this clock is ahead of the events' clock.
    """
    text = f"EventBridge: {event.text}"
    if event.in_s is None:
        return Notice(node, text, now, None, event.risk)

    deadline = event.moment + event.in_s + ahead
    if deadline - now > FAR_S:
        return Notice(node, text, now, None, risk=True)
    return Notice(node, text, now, deadline, event.risk)


def sqs_client(url: str) -> Any:
    """Return an SQS client for the region that the queue's URL names."""
    import boto3

    return boto3.client("sqs", region_name=_region_of(url))


def ec2_client(url: str) -> Any:
    """Return an EC2 client for the region that the queue's URL names."""
    import boto3

    return boto3.client("ec2", region_name=_region_of(url))


def _region_of(url: str) -> str | None:
    region = re.search(r"//sqs\.([a-z0-9-]+)\.", url)
    if region is None:
        return None
    return region.group(1)


def _date_of(answer: Json) -> float:
    """Return the queue's clock at its answer; this machine's clock if the answer has none."""
    header = (answer.get("ResponseMetadata") or {}).get("HTTPHeaders", {}).get("date", "")
    try:
        return parsedate_to_datetime(header).timestamp()
    except (ValueError, TypeError):
        return datetime.now(UTC).timestamp()
