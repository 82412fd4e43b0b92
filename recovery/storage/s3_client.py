"""The S3 client of one bucket: one configuration, from boto3's standard chain, for every request.

Profile, credentials, endpoint, CA bundle, addressing style, proxies and signature come from where
boto3 finds them (environment, `~/.aws/config`, instance role). The region is the bucket's own: the
first request is a HeadBucket, whose answer names it, and botocore's region redirector signs all
later requests for that region. Data and checkpoints both read through this module.
"""

import contextlib
import functools
import hashlib
import os
import threading
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, InvalidConfigError
from botocore.loaders import create_loader

from recovery.storage.protocol import StorageOptions

DEFAULT_REGION = "us-east-1"
"""Region of the first request where the chain names none: S3's global endpoint answers for all."""
USER_AGENT = f"autohet boto3/{boto3.__version__}"
"""Given whole: botocore would put its own together twice for each request, a fifth of its CPU."""
_TRANSIENT = frozenset({429, 500, 502, 503, 504})


@dataclass(frozen=True)
class ClientFacts:
    """Human-readable configuration of the client."""

    region: str | None
    """The bucket's region as its server states it; None where the server does not."""
    signing_region: str
    """The region of the chain."""
    endpoint: str


class S3Client:
    """Owner of boto3's client for one bucket. Threads share it.

    It makes the client on first use, and again when credentials were rotated.
    """

    def __init__(
        self, bucket: str, options: StorageOptions, prepare: Callable[[Any, Any], None]
    ) -> None:
        """Prepare the owner; no client is made yet.

        `prepare(client, verify)` is called with each new client before its first request; `verify`
        is the path of the CA bundle, or True for the default one.
        """
        self._bucket = bucket
        self._options = options
        self._prepare = prepare
        self._lock = threading.Lock()
        self._client: Any = None
        self._located = False
        self.region: str | None = None
        """The bucket's region, once its server has stated it."""
        self.generation = 0
        """Number of clients made before this one."""
        self.sends_checksums = True
        """True if requests carry CRC headers; False if the store refuses them."""
        self.lists_folders_alone = False
        """True if the store takes no list prefix that does not end in a slash."""
        self.conditional: bool | None = None
        """True if the store honours conditional puts; None until probed."""

    def get(self) -> Any:
        """Return the client; the first call makes it and finds the bucket's region.

        Raises:
            BotoCoreError, ClientError, OSError: no usable configuration, or no answer.
        """
        with self._lock:
            if self._client is None:
                self._client = self._make()
            if not self._located:
                self.region = _find_region(self._client, self._bucket)
                self._located = True
            return self._client

    def renew(self, generation: int) -> None:
        """Make a new client from freshly read credentials.

        No-op if another thread has done it since `generation`.
        """
        with self._lock:
            if generation == self.generation:
                self._drop()

    def stop_checksums(self) -> None:
        """Send no CRC headers from now on: the store refuses them."""
        with self._lock:
            if self.sends_checksums:
                self.sends_checksums = False
                self._drop()

    def facts(self) -> ClientFacts:
        client = self.get()
        return ClientFacts(self.region, client.meta.region_name, client.meta.endpoint_url)

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None
        self._located = False
        self.generation += 1

    def _protect_deletion(self, request: Any, **_: Any) -> None:
        """Give DeleteObjects the Content-MD5 that many stores demand: botocore sends a CRC only."""
        if not self.sends_checksums:
            for name in list(request.headers.keys()):
                if name.lower().startswith(("x-amz-checksum-", "x-amz-sdk-checksum-")):
                    del request.headers[name]
        with contextlib.suppress(ValueError):  # FIPS builds have no MD5
            digest = hashlib.md5(request.body or b"", usedforsecurity=False).digest()
            request.headers["Content-MD5"] = b64encode(digest).decode()

    def _make(self) -> Any:
        core = make_session()
        timeout_s = self._options.request_timeout_s
        config = Config(
            max_pool_connections=2 * self._options.concurrency,
            connect_timeout=min(10.0, timeout_s),
            read_timeout=min(30.0, timeout_s),
            retries={"total_max_attempts": 1},
            user_agent=USER_AGENT,
            # Bodies carry a CRC-32C that the server checks. Hashing them again with SHA-256 is what
            # boto3 does on plain http alone, and what most of an upload's time went to
            # (scripts/benchmarks/results/LOG.md).
            s3={"payload_signing_enabled": False},
        )
        if not self.sends_checksums:
            config = config.merge(Config(request_checksum_calculation="when_required"))
        client = make_client(core, config)
        if client.meta.config.request_checksum_calculation == "when_required":
            self.sends_checksums = False
        verify = core.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE", True)
        client.meta.events.register("before-sign.s3.DeleteObjects", self._protect_deletion)
        self._prepare(client, verify)
        return client


@functools.cache
def _descriptions(data_path: str | None) -> dict[Any, Any]:
    """Return the parsed service descriptions on this path, which all sessions of a process share.

    botocore parses them anew for each session, which is most of what a client's start costs.
    """
    return {}


def make_session() -> botocore.session.Session:
    """Make a session, which reads configuration and credentials anew."""
    core = botocore.session.Session()
    data_path = core.get_config_variable("data_path")
    loader = create_loader(data_path)
    # botocore's own argument for a cache is without effect.
    loader._cache = _descriptions(data_path)  # type: ignore[attr-defined]
    core.register_component("data_loader", loader)
    return core


def make_client(core: botocore.session.Session | None = None, config: Config | None = None) -> Any:
    """Make boto3's S3 client from the standard chain, `config` on top of it.

    Raises:
        BotoCoreError: the configuration cannot be used.
    """
    session = boto3.session.Session(botocore_session=core or make_session())
    region = session.region_name or DEFAULT_REGION
    try:
        return session.client("s3", config=config, region_name=region)
    except ValueError as error:  # of an endpoint that is no URL
        if isinstance(error, BotoCoreError):
            raise
        raise InvalidConfigError(error_msg=str(error)) from error


def _find_region(client: Any, bucket: str) -> str | None:
    """Ask for the bucket's region.

    If the request was signed for another one, botocore's region redirector learns it from the same
    answer.
    """
    try:
        answer = client.head_bucket(Bucket=bucket)
    except ClientError as error:
        # Refused or unknown to this server: what was asked for will say it better. But without an
        # answer from the store itself the region would stay unknown.
        facts: Any = error.response.get("ResponseMetadata", {})
        if facts.get("HTTPStatusCode") in _TRANSIENT:
            raise
    else:
        facts = answer["ResponseMetadata"]
    region = facts.get("HTTPHeaders", {}).get("x-amz-bucket-region")
    return None if region is None else str(region)
