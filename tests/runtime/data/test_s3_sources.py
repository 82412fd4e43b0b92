"""Data under an s3:// prefix, through a real S3 protocol endpoint."""

import gzip
import json
import time
from collections.abc import Callable, Iterator

import boto3
import numpy as np
import pytest

from autohet.runtime.data import prepare_dataset, s3_requests
from autohet.runtime.job import DataSection
from planner.errors import ConfigError
from tests.harness.refusing_proxy import RESET, Refusal, Request, refusing_proxy
from tests.harness.s3_server import S3Server, s3_server

MakeData = Callable[..., DataSection]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        running.create_bucket("corpus")
        client = boto3.client("s3")
        line = json.dumps({"text": "bbbbbbbb"}).encode()
        client.put_object(Bucket="corpus", Key="text/b.json.gz", Body=gzip.compress(line))
        client.put_object(
            Bucket="corpus", Key="text/a.jsonl", Body=json.dumps({"text": "aaaaaaaa"}).encode()
        )
        client.put_object(Bucket="corpus", Key="text/README.md", Body=b"# What this is " * 9)
        client.put_object(Bucket="corpus", Key="text/notes.txt", Body=b"not for training")
        client.put_object(Bucket="corpus", Key="text/", Body=b"")
        client.put_object(Bucket="corpus", Key="text-old/z.txt", Body=b"zzzzzzzz")
        yield running


@pytest.mark.parametrize("source", ["s3://corpus/text/", "s3://corpus/text"])
def test_prefix_is_read_in_the_order_of_keys(
    server: S3Server, make_data: MakeData, source: str
) -> None:
    dataset = prepare_dataset(make_data(source), 8)
    assert bytes(dataset.rows([0, 1]).astype(np.uint8).ravel()) == b"aaaaaaaa\0bbbbbbbb\0"
    assert len(dataset) == 2


def test_changed_object_is_read_again(server: S3Server, make_data: MakeData) -> None:
    client = boto3.client("s3")
    client.put_object(Bucket="corpus", Key="changing.txt", Body=b"11111111")
    first = prepare_dataset(make_data("s3://corpus/changing.txt"), 8)
    client.put_object(Bucket="corpus", Key="changing.txt", Body=b"22222222")
    second = prepare_dataset(make_data("s3://corpus/changing.txt"), 8)
    assert (first.row(0)[0], second.row(0)[0]) == (ord("1"), ord("2"))


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("s3://no-such-bucket/x", "bucket does not exist"),
        ("s3://corpus/nothing/", "no object"),
        ("s3://", "names no bucket"),
    ],
)
def test_errors_say_what_to_do(
    server: S3Server, make_data: MakeData, source: str, word: str
) -> None:
    with pytest.raises(ConfigError, match=word):
        prepare_dataset(make_data(source), 8)


def test_no_permission(
    server: S3Server, make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    from botocore.exceptions import ClientError
    from botocore.paginate import Paginator

    def refuse(self: Paginator, **keys: object) -> Iterator[object]:
        raise ClientError({"Error": {"Code": "AccessDenied", "Message": "no"}}, "ListObjectsV2")

    monkeypatch.setattr(Paginator, "paginate", refuse)
    with pytest.raises(ConfigError, match=r"permission denied.*allow s3:ListBucket"):
        prepare_dataset(make_data("s3://corpus/text"), 8)


class Clock:
    """A clock that sleeping moves on."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(s3_requests, "time", made)
    monkeypatch.setattr("botocore.endpoint.time", made)
    return made


@pytest.mark.parametrize(
    "refusal",
    [Refusal(503, "SlowDown", "Reduce your rate"), Refusal(500, "InternalError", "Try again")],
    ids=["SlowDown", "500"],
)
def test_minutes_of_slow_down_are_waited_out(
    server: S3Server,
    make_data: MakeData,
    monkeypatch: pytest.MonkeyPatch,
    clock: Clock,
    refusal: Refusal,
) -> None:
    def rule(request: Request) -> Refusal | None:
        return refusal if clock.now < 180.0 else None

    with refusing_proxy(server.endpoint, rule) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        assert len(prepare_dataset(make_data("s3://corpus/text/"), 8)) == 2
    assert 180.0 <= clock.now < 260.0


def test_a_storage_that_never_answers_is_no_matter_of_patience(
    server: S3Server, make_data: MakeData, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """A wrong endpoint, say: the user hears of it soon."""
    with refusing_proxy(server.endpoint, lambda _: Refusal(0, RESET, "")) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        with pytest.raises(ConfigError, match="no answer"):
            prepare_dataset(make_data("s3://corpus/text/"), 8)
    assert clock.now < 30.0
