"""Client of EC2's instance metadata service, version 2 (IMDSv2).

The service announces a spot interruption two minutes ahead under `spot/instance-action`, and
sometimes earlier, under `events/recommendations/rebalance`, that the instance is at risk; 404 means
neither. AWS advises to poll every 5 seconds.

A deadline is a date, and this machine's clock may be wrong. So the time left is the deadline less
the date that the service itself puts on its answer (RFC 9110, section 6.6.1); the monotonic clock
counts it down. Source: Amazon EC2 User Guide, "Spot Instance interruption notices" and "EC2
instance rebalance recommendations".
"""

import http.client
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Literal
from urllib.parse import urlsplit

from planner.errors import ConfigError

DEFAULT_ENDPOINT = "http://169.254.169.254"
ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
DISABLED_VARIABLE = "AWS_EC2_METADATA_DISABLED"
TIMEOUT_S = 2.0
TOKEN_TTL_S = 21600
TOKEN_RENEWAL_S = 60.0
MAX_ANSWER_BYTES = 1 << 16

SPOT_ACTION_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"


class MetadataUnavailable(Exception):
    """No metadata service answered, or its answer was invalid; normal outside EC2."""


@dataclass(frozen=True)
class InstanceNotice:
    """Notice of the service about this instance; two reads of one notice compare equal."""

    instance_id: str
    kind: Literal["interruption", "rebalance"]
    action: str
    """Action of the notice: terminate, stop or hibernate; "rebalance" for a recommendation."""
    time_unix_s: float
    """Unix time of the instance's end (interruption) or of the recommendation (rebalance)."""
    deadline: float | None = field(default=None, compare=False)
    """Time of the interruption on this process's monotonic clock.

    None for a recommendation, which has no deadline.
    """

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds from `now` (monotonic) until the instance is gone.

        0 if overdue; None without a deadline.
        """
        return None if self.deadline is None else max(0.0, self.deadline - now)


@dataclass(frozen=True)
class _Answer:
    """Answer of the service, with the clocks of both sides.

    `asked_at`: monotonic time before the request was sent. `date_unix_s`: the service's clock at
    its answer, in full seconds.
    """

    status: int
    text: str
    asked_at: float
    date_unix_s: float

    def monotonic(self, moment_unix_s: float) -> float:
        """Convert a moment on the service's clock to this process's monotonic clock.

        The result is at most a second too early.
        """
        return self.asked_at + moment_unix_s - (self.date_unix_s + 1.0)


class InstanceMetadata:
    """Metadata service of this instance; each call sends a request, within TIMEOUT_S.

    Only an expired token is retried. Not safe for several threads at once. Raises
    MetadataUnavailable if the service is not there.
    """

    def __init__(self, endpoint: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        """Set the endpoint; None: $AWS_EC2_METADATA_SERVICE_ENDPOINT, else the link-local address.

        Raises:
            ConfigError: the endpoint is no http:// address.
        """
        text = endpoint or os.environ.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT
        parts = urlsplit(text)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(
                f"{ENDPOINT_VARIABLE} is {text!r}, which is no http:// address; fix or unset it"
            )
        self._host = parts.hostname
        self._port = parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._timeout_s = timeout_s
        self._token: str | None = None
        self._token_until = 0.0
        self._instance_id: str | None = None

    def instance_id(self) -> str:
        if self._instance_id is None:
            self._instance_id = self._require("/latest/meta-data/instance-id")
        return self._instance_id

    def instance_type(self) -> str:
        """Return the instance type, for example g5.xlarge."""
        return self._require("/latest/meta-data/instance-type")

    def availability_zone(self) -> str:
        return self._require("/latest/meta-data/placement/availability-zone")

    def market_type(self) -> str:
        """Return `spot` or `on-demand` (or another life cycle that EC2 adds)."""
        return self._require("/latest/meta-data/instance-life-cycle")

    def interruption(self) -> InstanceNotice | None:
        """Return the current interruption notice, or None."""
        found = self._document(SPOT_ACTION_PATH)
        if found is None:
            return None
        document, answer = found
        moment = _unix_time(document.get("time"), SPOT_ACTION_PATH)
        action = str(document.get("action", "terminate"))
        return InstanceNotice(
            self.instance_id(), "interruption", action, moment, answer.monotonic(moment)
        )

    def rebalance(self) -> InstanceNotice | None:
        """Return the current rebalance recommendation, or None."""
        found = self._document(REBALANCE_PATH)
        if found is None:
            return None
        moment = _unix_time(found[0].get("noticeTime"), REBALANCE_PATH)
        return InstanceNotice(self.instance_id(), "rebalance", "rebalance", moment)

    def _require(self, path: str) -> str:
        answer = self._get(path)
        if answer is None:
            raise MetadataUnavailable(f"the metadata service knows no {path}")
        return answer.text

    def _document(self, path: str) -> tuple[Mapping[str, object], _Answer] | None:
        answer = self._get(path)
        if answer is None:
            return None
        try:
            document = json.loads(answer.text)
        except (
            ValueError,
            RecursionError,
        ) as error:  # the latter: brackets in brackets, thousands deep
            raise MetadataUnavailable(f"{path} is not JSON: {answer.text[:80]!r}") from error
        if not isinstance(document, dict):
            raise MetadataUnavailable(f"{path} holds {answer.text[:80]!r}, not an object")
        return document, answer

    def _get(self, path: str) -> _Answer | None:
        """Return the answer for `path`; None for 404. A refused token is renewed once."""
        answer = self._request("GET", path, {"X-aws-ec2-metadata-token": self._fresh_token()})
        if answer.status == 401:
            self._token = None
            answer = self._request("GET", path, {"X-aws-ec2-metadata-token": self._fresh_token()})
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise MetadataUnavailable(f"the metadata service answered {answer.status} for {path}")
        return answer

    def _fresh_token(self) -> str:
        if self._token is None or time.monotonic() >= self._token_until:
            answer = self._request(
                "PUT",
                "/latest/api/token",
                {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)},
            )
            if answer.status != 200:
                raise MetadataUnavailable(
                    f"the metadata service answered {answer.status} when asked for a token"
                )
            self._token = answer.text
            self._token_until = time.monotonic() + TOKEN_TTL_S - TOKEN_RENEWAL_S
        return self._token

    def _request(self, method: str, path: str, headers: Mapping[str, str]) -> _Answer:
        """Send a request on a connection of its own, without any proxy of the environment."""
        if os.environ.get(DISABLED_VARIABLE, "").lower() == "true":
            raise MetadataUnavailable(f"{DISABLED_VARIABLE} is set")
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        asked_at = time.monotonic()
        try:
            connection.request(method, self._prefix + path, headers=dict(headers))
            response = connection.getresponse()
            text = response.read(MAX_ANSWER_BYTES).decode("utf-8", "replace").strip()
            return _Answer(
                response.status, text, asked_at, _service_time(response.getheader("Date"))
            )
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


def _unix_time(value: object, path: str) -> float:
    """Return the seconds since 1970 of a time such as 2026-03-01T08:22:00Z (UTC)."""
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError as error:
        raise MetadataUnavailable(
            f"{path} names the time {value!r}, which cannot be read"
        ) from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
