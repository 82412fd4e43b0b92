"""Data under an s3:// prefix, through a real S3 protocol endpoint."""

import gzip
import json
from collections.abc import Callable, Iterator

import boto3
import numpy as np
import pytest

from autohet.runtime.data import prepare_dataset
from autohet.runtime.job import DataSection
from planner.errors import ConfigError
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
