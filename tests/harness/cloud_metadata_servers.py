"""Small metadata servers of Google and Azure, which refuse what the real ones refuse."""

import json
import threading
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.harness.imds_server import ImdsServer


def _iso(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


class GoogleServer(ImdsServer):
    """Compute Engine's metadata server.

    Every request needs `Metadata-Flavor: Google` and no X-Forwarded-For, else 403; every answer
    carries the header. Paths are under `computeMetadata/v1` alone; `upcoming-maintenance` is 503
    until something was announced.
    """

    def __init__(self, machine_type: str = "g2-standard-4") -> None:
        super().__init__()
        self.values = {
            "id": "4520031799277581759",
            "name": "trainer-0",
            "machine-type": f"projects/123456789012/machineTypes/{machine_type}",
            "zone": "projects/123456789012/zones/us-central1-a",
            "scheduling/preemptible": "TRUE",
            "scheduling/on-host-maintenance": "TERMINATE",
            "preempted": "FALSE",
            "maintenance-event": "NONE",
        }
        self.answer_headers = {"Metadata-Flavor": "Google"}

    def plan_maintenance(self, at_unix_s: float, status: str = "PENDING") -> None:
        self.values["upcoming-maintenance"] = json.dumps(
            {
                "can_reschedule": "false",
                "latest_window_start_time": _iso(at_unix_s + 3600),
                "maintenance_status": status,
                "type": "SCHEDULED",
                "window_end_time": _iso(at_unix_s + 7200),
                "window_start_time": _iso(at_unix_s),
            }
        )

    def _answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if self.status_for_all is not None:
            return self.status_for_all, ""
        if headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in headers:
            return 403, "Missing Metadata-Flavor:Google header."
        if method != "GET":
            return 405, ""
        parts = urlsplit(path)
        prefix = "/computeMetadata/v1/instance/"
        if not parts.path.startswith(prefix):
            return 404, "Not Found"
        key = parts.path.removeprefix(prefix)
        if key == "upcoming-maintenance" and key not in self.values:
            error = "no notifications have been received yet, try again later"
            return 503, json.dumps({"error": error})
        value = self.values.get(key)
        return (404, "Not Found") if value is None else (200, value)


class AzureServer(ImdsServer):
    """Azure's Instance Metadata Service with Scheduled Events.

    Every request needs `Metadata: true`, no X-Forwarded-For and a known api-version, else 400.
    The first request for events waits until `events_enabled` is set. Events of all machines of the
    scale set come to each of them. An event that is acknowledged has started.
    """

    versions = ("2017-08-01", "2019-08-01", "2020-07-01", "2021-02-01")

    def __init__(self) -> None:
        super().__init__()
        self.compute: Any = {
            "name": "pool_3",
            "vmId": "5c08b38e-4d57-4c23-ac45-aca61037f084",
            "vmSize": "Standard_NC24ads_A100_v4",
            "location": "westeurope",
            "zone": "2",
            "priority": "Spot",
        }
        self.events: list[Any] = []
        self.raw: str | None = None
        """Answer in place of the document of events."""
        self.acknowledged: list[str] = []
        self.events_enabled = threading.Event()
        self.events_enabled.set()

    def announce(self, kind: str, at_unix_s: float | None, *names: str, **more: Any) -> str:
        """Add an event about the machines `names`; None: it has begun. Return its id."""
        event_id = f"C7061BAC-AFDC-4513-B24B-{len(self.events):012d}"
        before = ""
        if at_unix_s is not None:
            moment = datetime.fromtimestamp(at_unix_s, UTC)
            before = format_datetime(moment, usegmt=True)
        event = {
            "EventId": event_id,
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": list(names),
            "EventStatus": "Started" if at_unix_s is None else "Scheduled",
            "NotBefore": before,
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }
        self.events.append({**event, **more})
        return event_id

    def _answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if self.status_for_all is not None:
            return self.status_for_all, ""
        if headers.get("metadata") != "true" or "x-forwarded-for" in headers:
            return 400, json.dumps({"error": "Bad request. Required metadata header not specified"})
        parts = urlsplit(path)
        if parts.path not in ("/metadata/instance", "/metadata/scheduledevents"):
            return 404, ""
        version = parse_qs(parts.query).get("api-version", [""])[0]
        if version not in self.versions:
            error = "Bad request. api-version was not specified in the request."
            return 400, json.dumps({"error": error, "newest-versions": list(self.versions[-3:])})
        if parts.path == "/metadata/instance":
            return (405, "") if method != "GET" else (200, json.dumps({"compute": self.compute}))
        self.events_enabled.wait(60)
        if method == "POST":
            return self._start()
        if self.raw is not None:
            return 200, self.raw
        return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.events})

    def _start(self) -> tuple[int, str]:
        try:
            requests = json.loads(self.body)["StartRequests"]
            wanted = [request["EventId"] for request in requests]
        except (ValueError, KeyError, TypeError):
            return 400, json.dumps({"error": "Bad request"})
        known = {event["EventId"] for event in self.events if event["EventStatus"] == "Scheduled"}
        if not wanted or not known.issuperset(wanted):
            return 400, json.dumps({"error": "Bad request. No such event"})
        self.acknowledged += wanted
        for event in self.events:
            if event["EventId"] in wanted:
                event |= {"EventStatus": "Started", "NotBefore": ""}
        return 200, ""
