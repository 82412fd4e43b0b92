"""A real S3 protocol endpoint for tests: moto's server on a free port, in a thread of this
process.
"""

import functools
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import boto3

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass(frozen=True)
class S3Server:
    """A running endpoint; `environment` is what a process needs to use it (also a subprocess)."""

    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.endpoint}

    def create_bucket(self, name: str) -> str:
        """Make the bucket; returns its s3:// URI."""
        client = boto3.client("s3", endpoint_url=self.endpoint, region_name="us-east-1")
        client.create_bucket(Bucket=name)
        client.close()
        return f"s3://{name}"


@functools.cache
def serialize_writes() -> None:
    """Let moto write one object at a time: its conditional writes look first, and store after that.

    Several of those that run at once may succeed, while S3 lets one.
    """
    from moto.s3.responses import S3Response

    lock = threading.RLock()
    for name in ("put_object", "_key_response_post"):
        write = getattr(S3Response, name)

        @functools.wraps(write)
        def one_at_a_time(*args: Any, _write: Any = write, **options: Any) -> Any:
            with lock:
                return _write(*args, **options)

        setattr(S3Response, name, one_at_a_time)


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start the server and point this process's AWS environment at it until the block ends."""
    from moto.server import ThreadedMotoServer

    serialize_writes()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    running = S3Server(f"http://{host}:{port}")
    before = {key: os.environ.get(key) for key in running.environment}
    os.environ.update(running.environment)
    try:
        yield running
    finally:
        server.stop()
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})
