"""What the metadata services of all clouds share: requests, facts of an instance, and notices.

A deadline is a date, and this machine's clock may be wrong. So the time left is the deadline less
the date that the service itself puts on its answer (RFC 9110, section 6.6.1); the monotonic clock
counts it down.
"""

import http.client
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from planner.errors import ConfigError

LINK_LOCAL = "http://169.254.169.254"
TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 1 << 16


class MetadataUnavailable(Exception):
    """No metadata service answered, or its answer was invalid; normal outside its cloud."""


@dataclass(frozen=True)
class InstanceFacts:
    """Facts of an instance by its metadata service."""

    instance_id: str
    instance_type: str
    zone: str
    market: str
    """Market of the instance: spot or on-demand."""
    name: str = ""
    """Name of the instance in its project or scale set; empty on EC2, which has ids alone."""
    cloud: str = "aws"


@dataclass(frozen=True)
class InstanceNotice:
    """Notice of the service about this instance; two reads of one notice compare equal."""

    instance_id: str
    kind: Literal["interruption", "rebalance", "risk"]
    action: str
    """Action of the notice: terminate, stop or hibernate; "rebalance" for a recommendation."""
    time_unix_s: float
    """Unix time of the instance's end (interruption) or of the recommendation (rebalance)."""
    deadline: float | None = field(default=None, compare=False)
    """Time of the interruption on this process's monotonic clock.

    None for a risk, which has no deadline.
    """
    event_id: str = field(default="", compare=False)
    """Id by which the node acknowledges the event; empty where the service wants no answer."""

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds from `now` (monotonic) until the instance is gone.

        0 if overdue; None without a deadline.
        """
        return None if self.deadline is None else max(0.0, self.deadline - now)


class CloudMetadata(Protocol):
    """Metadata service of one cloud; calls block for a bounded time.

    Each call raises MetadataUnavailable if the service is not there or answers nonsense.
    """

    source: str
    """Name of the service in notices and logs."""

    def facts(self) -> InstanceFacts:
        """Return the facts of this instance."""
        ...

    def notices(self) -> tuple[InstanceNotice, ...]:
        """Return the notices that stand now."""
        ...

    def acknowledge(self, event_id: str) -> None:
        """Tell the service not to wait for the event's time; no-op without such events."""
        ...


@dataclass(frozen=True)
class MetadataAnswer:
    """Answer of the service, with the clocks of both sides.

    `asked_at`: monotonic time before the request was sent. `date_unix_s`: the service's clock at
    its answer, in full seconds. `headers`: by name in lower case.
    """

    status: int
    text: str
    asked_at: float
    date_unix_s: float
    headers: Mapping[str, str]

    def monotonic(self, moment_unix_s: float) -> float:
        """Convert a moment on the service's clock to this process's monotonic clock.

        The result is at most a second too early.
        """
        return self.asked_at + moment_unix_s - (self.date_unix_s + 1.0)

    def document(self, path: str) -> Mapping[str, Any]:
        """Return the JSON object in the answer; `path` names it in errors."""
        try:
            document = json.loads(self.text)
        except (
            ValueError,
            RecursionError,
        ) as error:  # the latter: brackets in brackets, thousands deep
            raise MetadataUnavailable(f"{path} is not JSON: {self.text[:80]!r}") from error
        if not isinstance(document, dict):
            raise MetadataUnavailable(f"{path} holds {self.text[:80]!r}, not an object")
        return document


class MetadataServer:
    """HTTP server of metadata, asked on a connection of its own for each request."""

    def __init__(self, endpoint: str | None, timeout_s: float, variable: str) -> None:
        """Set the endpoint; None: the environment's `variable`, else the link-local address.

        Raises:
            ConfigError: the endpoint is no http:// address.
        """
        address = endpoint or os.environ.get(variable) or LINK_LOCAL
        parts = urlsplit(address)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(
                f"{variable} is {address!r}, which is no http:// address; fix or unset it"
            )
        self._host = parts.hostname
        self._port = parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._timeout_s = timeout_s

    def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        timeout_s: float | None = None,
    ) -> MetadataAnswer:
        """Send a request without any proxy of the environment."""
        timeout = timeout_s or self._timeout_s
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        asked_at = time.monotonic()
        try:
            connection.request(method, self._prefix + path, body, dict(headers))
            response = connection.getresponse()
            text = response.read(MAX_ANSWER_BYTES).decode("utf-8", "replace").strip()
            found = {name.lower(): value for name, value in response.getheaders()}
            date = _service_time(found.get("date"))
            return MetadataAnswer(response.status, text, asked_at, date, found)
        except (OSError, http.client.HTTPException) as error:
            raise MetadataUnavailable(
                f"no metadata service at {self._host}:{self._port}: {type(error).__name__}: {error}"
            ) from error
        finally:
            connection.close()


def _service_time(header: str | None) -> float:
    """Return the service's clock, or this machine's if the answer has no readable date."""
    try:
        return parsedate_to_datetime(header or "").timestamp()
    except ValueError:
        return time.time() - 1.0


def unix_time(value: object, path: str) -> float:
    """Return the seconds since 1970 of a time such as 2026-03-01T08:22:00Z (UTC).

    RFC 1123's form (Sun, 01 Mar 2026 08:22:00 GMT) is read too.
    """
    text = str(value)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        try:
            moment = parsedate_to_datetime(text)
        except ValueError as error:
            raise MetadataUnavailable(
                f"{path} names the time {text[:80]!r}, which cannot be read"
            ) from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
