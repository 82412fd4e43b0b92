"""EC2's events by EventBridge through an SQS queue: interruption warnings, rebalance
recommendations, state changes.

`scripts/aws/prepare` makes rule and queue. The queue is read by one job: what was taken from it is
deleted once it is remembered here, of other instances too, so that nothing comes again for ever
(aws-node-termination-handler issues 360, 787, 1100).

Event shapes: Amazon EC2 User Guide, "Spot Instance interruption notices", "Monitor rebalance
recommendation signals", "Automate Amazon EC2 using EventBridge"; the warning comes two minutes
ahead.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from autohet.driver.control.observation import Notice
from autohet.driver.sources.protocol import WatchedNode
from autohet.driver.sources.watch import Watch

logger = logging.getLogger("autohet.sources")
WARNING_S = 120.0
STALE_S = 600.0
"""An event older than this says nothing of an instance that still lives."""
MAX_CLOCK_SKEW_S = 30.0
"""EC2's clock may be ahead of the queue's by this much. A later time is forged: taken as newest, it
would hide every true event of that instance.
"""
MOST_REMEMBERED = 10_000
MOST_SEEN = 50_000
LONG_POLL_S = 5
RISK, WARNED, CHANGED = (
    "EC2 Instance Rebalance Recommendation",
    "EC2 Spot Instance Interruption Warning",
    "EC2 Instance State-change Notification",
)
ENDING = ("shutting-down", "terminated", "stopping", "stopped")


@dataclass(frozen=True)
class InstanceEvent:
    """One event of EC2's.

    `moment`: when EC2 made it, on this process's monotonic clock; `in_s`: from then until the
    instance is gone.
    """

    event_id: str
    instance_id: str
    text: str
    moment: float
    risk: bool
    in_s: float | None


def parse_event(
    body: str, now: float, date_unix_s: float, account: str | None = None
) -> InstanceEvent | None:
    """Parse a message; None where it announces no end of an instance. `now`: monotonic, when
    `date_unix_s` was the queue's clock. `account`: the only one whose events count (None: any).

    Raises:
        ValueError: the message is garbage, another account's, or from the future.
    """
    try:
        document = json.loads(body)
        kind, detail = document["detail-type"], document["detail"]
        event_id, instance_id = document["id"], detail["instance-id"]
        moment = now + datetime.fromisoformat(document["time"]).timestamp() - date_unix_s
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise ValueError(f"not an event of EC2's: {body[:80]!r} ({type(error).__name__})") from None
    if (
        document.get("source") != "aws.ec2"
        or not isinstance(event_id, str)
        or not isinstance(instance_id, str)
    ):
        raise ValueError(f"not an event of EC2's: {body[:80]!r}")
    _check_origin(document, moment - now, account)
    if kind == RISK:
        return InstanceEvent(event_id, instance_id, "rebalance recommendation", moment, True, None)
    if kind == WARNED:
        return InstanceEvent(
            event_id,
            instance_id,
            str(detail.get("instance-action", "terminate"))[:40],
            moment,
            False,
            WARNING_S,
        )
    if kind == CHANGED and detail.get("state") in ENDING:
        return InstanceEvent(event_id, instance_id, str(detail["state"]), moment, False, 0.0)
    return None


def _check_origin(document: Mapping[str, Any], ahead_s: float, account: str | None) -> None:
    """Raise ValueError for an event of another account, or one that lies `ahead_s` in the future.

    A bus that takes events of other accounts, and a queue that lets others send, forward them. EC2
    always names its account; emulators of EventBridge leave it out.
    """
    theirs = document.get("account")
    if account is not None and theirs is not None and theirs != account:
        raise ValueError(f"of account {str(theirs)[:20]!r}, not of the queue's account {account}")
    if ahead_s > MAX_CLOCK_SKEW_S:
        raise ValueError(
            f"from {ahead_s:.0f} s in the future; at most {MAX_CLOCK_SKEW_S:.0f} s are accepted"
        )


def account_of(url: str) -> str | None:
    """Return the account id in a queue's URL (https://sqs.REGION.amazonaws.com/ACCOUNT/NAME)."""
    found = re.search(r"://[^/]+/(?:queue/)?(\d{12})/", url)
    return found.group(1) if found else None


class QueueNotices:
    """Owns a thread that takes the queue's messages. Events of accounts other than the queue's are
    refused.

    `client`: boto3's, made in the thread; made anew where making it failed.
    """

    def __init__(
        self, url: str, make_client: Callable[[str], Any] | None = None, poll_s: float = 0.2
    ) -> None:
        self._url = url
        self._account = account_of(url)
        if self._account is None:
            logger.warning(
                "The queue's URL %s names no account of 12 digits; events of any account count", url
            )
        self._make = make_client or sqs_client
        self._client: Any = None
        self._by_instance: dict[str, dict[bool, InstanceEvent]] = {}
        self._seen: dict[str, None] = {}
        self._watch = Watch("the queue of EC2's events", self._take, poll_s)

    def notices(self, nodes: Sequence[WatchedNode], now: float) -> list[Notice]:
        """`now` and the events' moments are both monotonic; what differs is where they start."""
        ahead = now - time.monotonic()
        return [
            Notice(
                node.name,
                f"EventBridge: {event.text}",
                now,
                None if event.in_s is None else event.moment + event.in_s + ahead,
                event.risk,
            )
            for node in nodes
            if node.instance_id is not None
            for event in tuple(self._by_instance.get(node.instance_id, {}).values())
            if now - ahead - event.moment < STALE_S
        ]

    def _take(self) -> int:
        """One long poll; how many messages came."""
        if self._client is None:
            self._client = self._make(self._url)
        answer = self._client.receive_message(
            QueueUrl=self._url,
            MaxNumberOfMessages=10,
            WaitTimeSeconds=LONG_POLL_S,
            VisibilityTimeout=30,
        )
        now, date = time.monotonic(), _date_of(answer)
        messages = answer.get("Messages", [])
        for message in messages:
            try:
                self._remember(parse_event(message.get("Body", ""), now, date, self._account))
            except ValueError as error:
                logger.warning("A message in the queue of notices is %s", error)
            self._client.delete_message(QueueUrl=self._url, ReceiptHandle=message["ReceiptHandle"])
        return len(messages)

    def _remember(self, event: InstanceEvent | None) -> None:
        """The newest event of each sort for each instance: messages may come again, and in any
        order.
        """
        if event is None or event.event_id in self._seen:
            return
        self._seen[event.event_id] = None
        known = dict(self._by_instance.get(event.instance_id, {}))
        if event.risk not in known or known[event.risk].moment <= event.moment:
            self._by_instance[event.instance_id] = {**known, event.risk: event}
        for kept, most in ((self._seen, MOST_SEEN), (self._by_instance, MOST_REMEMBERED)):
            while len(kept) > most:
                del kept[next(iter(kept))]  # type: ignore[arg-type]

    def close(self) -> None:
        self._watch.close(LONG_POLL_S + 3.0)


def sqs_client(url: str) -> Any:
    """A client for the region that the queue's URL names."""
    import boto3

    region = re.search(r"//sqs\.([a-z0-9-]+)\.", url)
    return boto3.client("sqs", region_name=region.group(1) if region else None)


def _date_of(answer: Mapping[str, Any]) -> float:
    """The queue's clock when it answered; this machine's where it says nothing that can be read."""
    header = (answer.get("ResponseMetadata") or {}).get("HTTPHeaders", {}).get("date", "")
    try:
        return parsedate_to_datetime(header).timestamp()
    except (ValueError, TypeError):
        return datetime.now(UTC).timestamp()
