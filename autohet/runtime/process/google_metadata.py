"""Client of Google Compute Engine's metadata server.

`preempted` turns TRUE when a Spot machine is to be taken, `maintenance-event` names a host
maintenance that begins soon, and `upcoming-maintenance` a later one with its window. None of the
first two names its deadline, so a stated least time counts from when it is first seen. Source:
Compute Engine's guides "Spot VMs", "Query metadata server for maintenance event notices" and
"Monitor and plan for a host maintenance event".
"""

import os
import time
from collections.abc import Mapping
from typing import Any

from autohet.runtime.process.metadata_server import (
    LINK_LOCAL,
    TIMEOUT_S,
    InstanceFacts,
    InstanceNotice,
    MetadataAnswer,
    MetadataServer,
    MetadataUnavailable,
    unix_time,
)

HOST_VARIABLE = "GCE_METADATA_HOST"
DISABLED_VARIABLE = "NO_GCE_CHECK"
PREEMPTION_NOTICE_S = 30.0
"""Least seconds from `preempted` to the end: the shutdown period of Spot machines.

Machines that are created with `--preemption-notice-duration=120s` have 120 s.
"""
MAINTENANCE_NOTICE_S = 60.0
"""Least seconds from `maintenance-event` to the maintenance; machines with GPUs may have an hour.
"""
FLAVOR = {"Metadata-Flavor": "Google"}
UPCOMING = "upcoming-maintenance?alt=json"
MAINTENANCE = {
    "MIGRATE_ON_HOST_MAINTENANCE": "live migration for host maintenance",
    "TERMINATE_ON_HOST_MAINTENANCE": "ends for host maintenance",
}


class GoogleMetadata:
    """Metadata server of this machine; each call sends requests, within TIMEOUT_S each."""

    source = "Google metadata"

    def __init__(self, endpoint: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        """Set the endpoint; None: $GCE_METADATA_HOST, else the link-local address.

        Raises:
            ConfigError: the endpoint is no http:// address.
        """
        host = os.environ.get(HOST_VARIABLE)
        address = endpoint or (f"http://{host}" if host else LINK_LOCAL)
        self._server = MetadataServer(address, timeout_s, HOST_VARIABLE)
        self.notice_s = PREEMPTION_NOTICE_S
        """Seconds from `preempted` to the end of this machine."""
        self._instance_id = ""
        self._can_migrate = False
        self._standing: dict[str, InstanceNotice] = {}
        """Notices without a date by the key that holds them, as they were first seen."""

    def facts(self) -> InstanceFacts:
        self._instance_id = self._require("id")
        self._can_migrate = self._require("scheduling/on-host-maintenance") == "MIGRATE"
        is_spot = self._require("scheduling/preemptible") == "TRUE"
        return InstanceFacts(
            self._instance_id,
            self._require("machine-type").rpartition("/")[2],
            self._require("zone").rpartition("/")[2],
            "spot" if is_spot else "on-demand",
            self._require("name"),
            "google",
        )

    def notices(self) -> tuple[InstanceNotice, ...]:
        # A preemption is said at once: what the other keys hold changes nothing any more.
        found = self._preemption() or self._maintenance()
        return () if found is None else (found,)

    def acknowledge(self, event_id: str) -> None:
        """Google waits for no answer: no-op."""

    def _preemption(self) -> InstanceNotice | None:
        value = self._require("preempted")
        if value not in ("TRUE", "FALSE"):
            raise MetadataUnavailable(f"preempted is {value[:80]!r}, neither TRUE nor FALSE")
        return self._seen("preempted", "preempted" if value == "TRUE" else "", self.notice_s)

    def _maintenance(self) -> InstanceNotice | None:
        """Return the notice of a host maintenance, with the date of its window if one is named."""
        event = self._require("maintenance-event")
        if event not in ("NONE", *MAINTENANCE):
            raise MetadataUnavailable(f"maintenance-event is {event[:80]!r}, which is unknown")
        text = MAINTENANCE.get(event, "")
        soon = self._seen("maintenance-event", text, MAINTENANCE_NOTICE_S)
        if event.startswith("MIGRATE"):
            return InstanceNotice(self._instance_id, "risk", text, 0.0)
        return self._upcoming() or soon

    def _upcoming(self) -> InstanceNotice | None:
        """Return the maintenance that has a window; None where the machine's type has none."""
        answer = self._get(UPCOMING)
        # 503: no maintenance has been announced yet. NONE: nothing is planned.
        if answer is None or answer.status != 200 or answer.text.strip('"') == "NONE":
            return None
        document: Mapping[str, Any] = answer.document(UPCOMING)
        status = document.get("maintenance_status", document.get("maintenanceStatus"))
        begin = document.get("window_start_time", document.get("windowStartTime"))
        if begin is None:
            return None
        text = "host maintenance"
        moment = unix_time(begin, UPCOMING)
        if self._can_migrate:
            return InstanceNotice(self._instance_id, "risk", text, moment)
        deadline = answer.asked_at if status == "ONGOING" else answer.monotonic(moment)
        return InstanceNotice(self._instance_id, "interruption", text, moment, deadline)

    def _seen(self, key: str, text: str, in_s: float) -> InstanceNotice | None:
        """Return the notice under `key` as first seen; forget it where `text` is empty."""
        known = self._standing.get(key)
        if not text:
            self._standing.pop(key, None)
            return None
        if known is None or known.action != text:
            now = time.monotonic()
            known = InstanceNotice(
                self._instance_id, "interruption", text, time.time() + in_s, now + in_s
            )
            self._standing[key] = known
        return known

    def _require(self, key: str) -> str:
        answer = self._get(key)
        if answer is None or answer.status != 200:
            status = 404 if answer is None else answer.status
            raise MetadataUnavailable(f"Google's metadata server answered {status} for {key}")
        return answer.text

    def _get(self, key: str) -> MetadataAnswer | None:
        """Return the answer for a key of the instance; None for 404."""
        if os.environ.get(DISABLED_VARIABLE, "").lower() == "true":
            raise MetadataUnavailable(f"{DISABLED_VARIABLE} is set")
        answer = self._server.request("GET", f"/computeMetadata/v1/instance/{key}", FLAVOR)
        # The header tells Google's server from others at the same address.
        if answer.headers.get("metadata-flavor") != "Google":
            raise MetadataUnavailable("the metadata server is not Google's")
        return None if answer.status == 404 else answer
