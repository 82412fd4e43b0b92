"""Messages about the end of EC2 instances, as EventBridge sends them: plain, or enveloped by SNS.

Shapes: Amazon EC2 User Guide, "Spot Instance interruption notices", "Monitor rebalance
recommendation signals", "Monitor Capacity Blocks using EventBridge", "Monitor interruptible
Capacity Reservations"; Amazon EC2 Auto Scaling User Guide, "Amazon EC2 Auto Scaling event
reference"; AWS Health User Guide, "EventBridge event schema for AWS Health".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from planner.inputs.documents import Json

WARNING_S = 120.0
"""Seconds from a warning until the instance is gone, if the warning names no time."""
HOOK_S = 30.0
"""Least seconds for which a hook of an auto scaling group holds an instance.

No event says how long it really does.
"""
BLOCK_ENDS_EARLY_S = 1800.0
"""Seconds before a capacity block's end date at which EC2 begins to end its instances."""
MAX_CLOCK_SKEW_S = 30.0
"""Maximum seconds by which EC2's clock may be ahead of the queue's.

An event of a later time is forged: taken as newest, it would hide every true event of that
instance.
"""
RISK = "EC2 Instance Rebalance Recommendation"
CHANGED = "EC2 Instance State-change Notification"
WARNINGS = (
    "EC2 Spot Instance Interruption Warning",
    "EC2 Capacity Reservation Instance Interruption Warning",
    "EC2 Interruptible Capacity Reservation Instance Interruption Warning",
)
BLOCK_ENDS = ("Capacity Block Expiration Warning", "Capacity Block Reservation Expiration Warning")
"""Names of one event; AWS's guide had the second one until 2026."""
BLOCK_BEGINS = ("Capacity Block Delivered", "Capacity Block Reservation Delivered")
HOOK = "EC2 Instance-terminate Lifecycle Action"
HEALTH = "AWS Health Event"
RULE = {
    "source": ["aws.ec2", "aws.autoscaling", "aws.health"],
    "detail-type": [*WARNINGS, RISK, CHANGED, *BLOCK_ENDS, HOOK, HEALTH],
}
"""EventBridge's pattern for all of these events; `scripts/aws/prepare` creates a rule with it."""
SOURCES = frozenset(RULE["source"])
ENDING = ("shutting-down", "terminated", "stopping", "stopped")


class UnreadableMessage(ValueError):
    """Raised for a message that is no event, or an event of a kind that is unknown here."""


@dataclass(frozen=True)
class InstanceEvent:
    """Announcement about one instance, or about all of a capacity reservation.

    `moment`: time of the announcement on this process's monotonic clock; `in_s`: seconds from then
    until the instance is gone.
    """

    event_id: str
    instance_id: str
    text: str
    moment: float
    risk: bool
    in_s: float | None
    reservation: str | None = None


def parse_events(
    body: str, now: float, date_unix_s: float, account: str | None = None
) -> tuple[InstanceEvent, ...]:
    """Parse a message into the events that it announces; empty if it announces no end.

    `now`: monotonic time at which the queue's clock showed `date_unix_s`. `account`: the only
    account whose events count (None: any).

    Raises:
        UnreadableMessage: the message is garbage.
        ValueError: the message is another account's, or from the future.
    """
    try:
        document = _unwrap(json.loads(body))
        if document.get("Event") == "autoscaling:TEST_NOTIFICATION":
            return ()
        kind = document.get("detail-type", document.get("detail_type"))
        event_id = document.get("id", document.get("customer_event_id"))
        made_unix_s = datetime.fromisoformat(document["time"]).timestamp()
        detail = document["detail"]
        known = isinstance(event_id, str) and isinstance(kind, str) and isinstance(detail, dict)
        if document.get("source") not in SOURCES or not known:
            raise ValueError(f"source {str(document.get('source'))[:40]!r}")
        drafts = list(_announcements(kind, detail, made_unix_s))
        if not all(isinstance(each.instance_id, str) for each in drafts):
            raise ValueError("no instance id")
        moment = now + made_unix_s - date_unix_s
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise UnreadableMessage(
            f"not an event of EC2's: {body[:80]!r} ({type(error).__name__}: {str(error)[:120]})"
        ) from None
    _check_origin(document, moment - now, account)

    events = []
    for each in drafts:
        # One event of AWS Health may be about several instances, and each is remembered by its id.
        own_id = f"{event_id}/{each.instance_id}" if len(drafts) > 1 else event_id
        events.append(each.at(own_id, moment))
    return tuple(events)


@dataclass(frozen=True)
class _Announced:
    """Event without an id and a moment yet."""

    instance_id: str
    text: str
    in_s: float | None
    risk: bool = False
    reservation: str | None = None

    def at(self, event_id: str, moment: float) -> InstanceEvent:
        return InstanceEvent(
            event_id,
            self.instance_id,
            self.text,
            moment,
            self.risk,
            self.in_s,
            self.reservation,
        )


def _unwrap(document: Json) -> Json:
    """Return the event in SNS's envelope, or the document itself.

    Source: Amazon SNS Developer Guide, "HTTP/HTTPS notification JSON format". In an SQS
    subscription without raw delivery the event is the message's text.
    """
    while document.get("Type") == "Notification" and isinstance(document.get("Message"), str):
        document = json.loads(document["Message"])
    return document


def _announcements(kind: str, detail: Json, made_unix_s: float) -> Iterator[_Announced]:
    if kind == RISK:
        yield _Announced(detail["instance-id"], "rebalance recommendation", None, risk=True)
    elif kind in WARNINGS:
        end = _unix_s(detail.get("instance-termination-time"))
        in_s = WARNING_S if end is None else max(0.0, end - made_unix_s)
        action = str(detail.get("instance-action", "terminate"))[:40]
        yield _Announced(detail["instance-id"], action, in_s)
    elif kind == CHANGED:
        if detail.get("state") in ENDING:
            yield _Announced(detail["instance-id"], str(detail["state"]), 0.0)
    elif kind in BLOCK_ENDS:
        end = _unix_s(detail["end-date"])
        if end is None:
            raise ValueError("no end date")
        in_s = max(0.0, end - BLOCK_ENDS_EARLY_S - made_unix_s)
        reservation = str(detail["capacity-reservation-id"])
        yield _Announced("", "the capacity block ends", in_s, reservation=reservation)
    elif kind == HOOK:
        if detail.get("LifecycleTransition") == "autoscaling:EC2_INSTANCE_TERMINATING":
            yield _Announced(detail["EC2InstanceId"], "the auto scaling group ends it", HOOK_S)
    elif kind == HEALTH:
        yield from _of_health(detail, made_unix_s)
    elif kind not in BLOCK_BEGINS:
        raise ValueError(f"an event of an unknown kind, {kind[:80]!r}")


def _of_health(detail: Json, made_unix_s: float) -> Iterator[_Announced]:
    """Yield scheduled changes of EC2 instances: retirement, stop, reboot, maintenance."""
    if detail.get("service") != "EC2" or detail.get("eventTypeCategory") != "scheduledChange":
        return
    if str(detail.get("statusCode", "open")).lower() == "closed":
        return
    begin = _unix_s(detail.get("startTime"))
    in_s = WARNING_S if begin is None else max(0.0, begin - made_unix_s)
    for entity in detail.get("affectedEntities") or ():
        found = re.search(r"\bi-[0-9a-f]+$", str(entity["entityValue"]))
        if found and entity.get("status") not in ("RESOLVED", "UNIMPAIRED"):
            yield _Announced(found.group(0), str(detail.get("eventTypeCode"))[:60], in_s)


def _unix_s(text: object) -> float | None:
    """Parse a moment in ISO 8601 or, as AWS Health has it, RFC 2822; None if it is neither."""
    if not isinstance(text, str):
        return None
    for read in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            moment = read(text)
        except (ValueError, TypeError):
            continue
        if not moment.tzinfo:
            moment = moment.replace(tzinfo=UTC)
        return moment.timestamp()
    return None


def _check_origin(document: Json, ahead_s: float, account: str | None) -> None:
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
