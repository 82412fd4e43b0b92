"""Client of EC2's instance metadata service, version 2 (IMDSv2).

The service announces a spot interruption two minutes ahead under `spot/instance-action`, and
sometimes earlier, under `events/recommendations/rebalance`, that the instance is at risk; 404 means
neither. AWS advises to poll every 5 seconds. Source: Amazon EC2 User Guide, "Spot Instance
interruption notices" and "EC2 instance rebalance recommendations".
"""

import os
import time
from collections.abc import Mapping
from contextlib import suppress

from autohet.runtime.process.metadata_server import (
    TIMEOUT_S,
    InstanceFacts,
    InstanceNotice,
    MetadataAnswer,
    MetadataServer,
    MetadataUnavailable,
    unix_time,
)

ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
DISABLED_VARIABLE = "AWS_EC2_METADATA_DISABLED"
TOKEN_TTL_S = 21600
TOKEN_RENEWAL_S = 60.0

SPOT_ACTION_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"


class InstanceMetadata:
    """Metadata service of this instance; each call sends a request, within TIMEOUT_S.

    Only an expired token is retried. Not safe for several threads at once. Raises
    MetadataUnavailable if the service is not there.
    """

    source = "EC2 instance metadata"

    def __init__(self, endpoint: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        """Set the endpoint; None: $AWS_EC2_METADATA_SERVICE_ENDPOINT, else the link-local address.

        Raises:
            ConfigError: the endpoint is no http:// address.
        """
        self._server = MetadataServer(endpoint, timeout_s, ENDPOINT_VARIABLE)
        self._token: str | None = None
        self._token_until = 0.0
        self._instance_id: str | None = None

    def facts(self) -> InstanceFacts:
        return InstanceFacts(
            self.instance_id(),
            self.instance_type(),
            self.availability_zone(),
            self.market_type(),
        )

    def notices(self) -> tuple[InstanceNotice, ...]:
        standing = [self.interruption()]
        # An answer to this question that makes no sense must hide no interruption.
        with suppress(MetadataUnavailable):
            standing.append(self.rebalance())
        return tuple(notice for notice in standing if notice is not None)

    def acknowledge(self, event_id: str) -> None:
        """EC2 waits for no answer: no-op."""

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
        moment = unix_time(document.get("time"), SPOT_ACTION_PATH)
        action = str(document.get("action", "terminate"))
        return InstanceNotice(
            self.instance_id(), "interruption", action, moment, answer.monotonic(moment)
        )

    def rebalance(self) -> InstanceNotice | None:
        """Return the current rebalance recommendation, or None."""
        found = self._document(REBALANCE_PATH)
        if found is None:
            return None
        moment = unix_time(found[0].get("noticeTime"), REBALANCE_PATH)
        return InstanceNotice(self.instance_id(), "rebalance", "rebalance", moment)

    def _require(self, path: str) -> str:
        answer = self._get(path)
        if answer is None:
            raise MetadataUnavailable(f"the metadata service knows no {path}")
        return answer.text

    def _document(self, path: str) -> tuple[Mapping[str, object], MetadataAnswer] | None:
        answer = self._get(path)
        if answer is None:
            return None
        return answer.document(path), answer

    def _get(self, path: str) -> MetadataAnswer | None:
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

    def _request(self, method: str, path: str, headers: Mapping[str, str]) -> MetadataAnswer:
        if os.environ.get(DISABLED_VARIABLE, "").lower() == "true":
            raise MetadataUnavailable(f"{DISABLED_VARIABLE} is set")
        return self._server.request(method, path, headers)
