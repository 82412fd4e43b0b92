"""Client of Azure's Instance Metadata Service and of its Scheduled Events.

The first request for events switches them on and may take two minutes. Events name every machine of
a scale set's placement group, so each machine looks for its own name. An event that is acknowledged
begins at once. Source: Azure's guides "Azure Instance Metadata Service" and "Scheduled Events for
Linux VMs in Azure".
"""

import json
from collections.abc import Mapping
from typing import Any

from autohet.runtime.process.metadata_server import (
    TIMEOUT_S,
    InstanceFacts,
    InstanceNotice,
    MetadataAnswer,
    MetadataServer,
    MetadataUnavailable,
    unix_time,
)

ENDPOINT_VARIABLE = "AZURE_POD_IDENTITY_AUTHORITY_HOST"
"""Variable of Azure's own clients (azure-identity) for the address of the metadata service."""
INSTANCE = "/metadata/instance?api-version=2021-02-01"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
FIRST_EVENTS_S = 130.0
"""Seconds that the first request for events may take."""
DEPARTURES = ("Preempt", "Terminate", "Reboot", "Redeploy")
"""Events that end the node's processes; Freeze pauses them for some seconds."""


class AzureMetadata:
    """Metadata service of this machine; each call sends one request."""

    source = "Azure scheduled events"

    def __init__(self, endpoint: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        """Set the endpoint; None: $AZURE_POD_IDENTITY_AUTHORITY_HOST, else the link-local address.

        Raises:
            ConfigError: the endpoint is no http:// address.
        """
        self._server = MetadataServer(endpoint, timeout_s, ENDPOINT_VARIABLE)
        self._instance_id = ""
        self._name = ""
        self._has_events = False

    def facts(self) -> InstanceFacts:
        answer = self._request("GET", INSTANCE)
        compute = answer.document(INSTANCE).get("compute")
        if not isinstance(compute, Mapping) or not compute.get("name"):
            raise MetadataUnavailable(f"{INSTANCE} describes no machine: {answer.text[:80]!r}")
        location = str(compute.get("location", ""))
        zone = str(compute.get("zone") or "")
        is_spot = compute.get("priority") in ("Spot", "Low")
        self._name = str(compute["name"])
        self._instance_id = str(compute.get("vmId", ""))
        return InstanceFacts(
            self._instance_id,
            str(compute.get("vmSize", "")),
            f"{location}-{zone}" if zone else location,
            "spot" if is_spot else "on-demand",
            self._name,
            "azure",
        )

    def notices(self) -> tuple[InstanceNotice, ...]:
        timeout_s = None if self._has_events else FIRST_EVENTS_S
        answer = self._request("GET", EVENTS, timeout_s=timeout_s)
        self._has_events = True
        events = answer.document(EVENTS).get("Events")
        if not isinstance(events, list):
            raise MetadataUnavailable(f"{EVENTS} has no list of events: {answer.text[:80]!r}")
        found = []
        unreadable: MetadataUnavailable | None = None
        for event in events:
            try:
                notice = self._notice(event, answer)
            except MetadataUnavailable as error:
                unreadable = error  # It must hide no event that can be read.
                continue
            if notice is not None:
                found.append(notice)
        if unreadable is not None and not found:
            raise unreadable
        return tuple(found)

    def acknowledge(self, event_id: str) -> None:
        body = json.dumps({"StartRequests": [{"EventId": event_id}]}).encode()
        self._request("POST", EVENTS, body)

    def _notice(self, event: Any, answer: MetadataAnswer) -> InstanceNotice | None:
        """Return the notice of an event; None if it is another machine's, or over."""
        if not isinstance(event, Mapping) or not isinstance(event.get("Resources"), list):
            raise MetadataUnavailable(f"{EVENTS} holds {str(event)[:80]!r}, which is no event")
        if self._name not in event["Resources"]:
            return None
        kind = str(event.get("EventType"))[:40]
        status = event.get("EventStatus", "Scheduled")
        if status not in ("Scheduled", "Started"):
            return None
        if kind not in DEPARTURES:
            return InstanceNotice(self._instance_id, "risk", kind, 0.0)
        event_id = str(event.get("EventId", ""))
        # An event that has begun has an empty date.
        begin = event.get("NotBefore") or ""
        if status == "Started" or not begin:
            moment, deadline = answer.date_unix_s, answer.asked_at
            event_id = ""
        else:
            moment = unix_time(begin, EVENTS)
            deadline = answer.monotonic(moment)
        return InstanceNotice(self._instance_id, "interruption", kind, moment, deadline, event_id)

    def _request(
        self, method: str, path: str, body: bytes | None = None, timeout_s: float | None = None
    ) -> MetadataAnswer:
        answer = self._server.request(method, path, {"Metadata": "true"}, body, timeout_s)
        if answer.status != 200:
            raise MetadataUnavailable(f"Azure's metadata service answered {answer.status}")
        return answer
