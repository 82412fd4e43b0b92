"""Each URI names exactly one place, or is refused with a remedy."""

from contextlib import closing
from itertools import combinations
from pathlib import Path

import pytest

from recovery.storage.address import DirectoryAddress, S3Address, parse_address
from recovery.storage.errors import StorageUriError
from recovery.storage.open import open_storage

KEPT = [
    "exp#1",
    "exp#2",
    "exp",
    "exp?x=1",
    "exp?x=2",
    "a%20b",
    "a b",
    "a+b",
    "EXP",
    "ä",
    "a:b",
    "a/b",
    "..a",
]


@pytest.mark.parametrize("prefix", KEPT)
def test_s3_prefix_is_kept_as_written(prefix: str) -> None:
    assert parse_address(f"s3://bucket/{prefix}") == S3Address("bucket", prefix)
    assert parse_address(f"s3://bucket/{prefix}/") == S3Address("bucket", prefix)
    with closing(open_storage(f"s3://bucket/{prefix}")) as storage:
        assert storage.uri == f"s3://bucket/{prefix}"


def test_two_prefixes_are_two_places(s3_uri: str) -> None:
    """On a real server: what is put under one is not under another."""
    stores = [open_storage(f"{s3_uri}/{prefix}") for prefix in KEPT]
    for number, store in enumerate(stores):
        store.put("name", str(number).encode())
    assert [store.get("name") for store in stores] == [str(n).encode() for n in range(len(KEPT))]
    for store in stores:
        store.close()


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file:///a/b", "/a/b"),
        ("file:///a%20b", "/a b"),
        ("file:///a%23b", "/a#b"),
        ("file://localhost/a", "/a"),
        ("/a#b?c", "/a#b?c"),
        ("./s3:/x", "./s3:/x"),
        ("runs:1", "runs:1"),
    ],
)
def test_directory_is_kept_as_written(uri: str, path: str) -> None:
    assert parse_address(uri) == DirectoryAddress(path)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("gs://bucket/x", "scheme 'gs' is not known"),
        ("S3://bucket/x", "lower case"),
        ("FILE:///x", "lower case"),
        ("s3:///x", "no bucket"),
        ("s3://", "no bucket"),
        ("s3:/x", "two slashes"),
        ("s3:x", "two slashes"),
        ("s3:////x", "two slashes"),
        ("s3://bucket//x", "empty part"),
        ("s3://bucket/a//b", "empty part"),
        ("s3://bucket/a//", "empty part"),
        ("s3://bucket//", "empty part"),
        ("s3://bucket/a/../b", r"'\.\.'"),
        ("s3://bucket/./b", r"'\.'"),
        ("s3://bucket/a\nb", "control characters"),
        ("s3://bucket/a ", "blank"),
        ("s3://bucket?x/a", "no bucket name"),
        ("s3://bucket#1", "no bucket name"),
        ("s3://user@bucket/a", "no bucket name"),
        ("s3://arn:aws:s3:eu-west-1:1:accesspoint/x", "alias"),
        ("file://", "no directory"),
        ("file://host/x", "host"),
        ("file://relative", "host or a relative"),
        ("file:/x", "host or a relative"),
        ("file:x", "host or a relative"),
        ("file:///x?a", "query"),
        ("file:///x#a", "fragment"),
        ("file:///a%2Fb", "encoded slash"),
        ("file:///a%ff", "no UTF-8"),
        ("s3://bucket/a\udcff", "no UTF-8"),
        ("/a\udcff", "no UTF-8"),
        ("~no-such-user-1/x", "unknown user"),
        ("https:/x", "looks like a URI"),
        ("arn:aws:s3:us-east-1:1:accesspoint/x", "looks like a URI"),
        ("C:\\runs", "Windows"),
        (" /runs", "blank"),
        ("$HOME/runs", "variable"),
        ("", "no directory"),
    ],
)
def test_other_uris_are_refused_with_a_remedy(uri: str, message: str) -> None:
    with pytest.raises(StorageUriError, match=message) as refused:
        open_storage(uri)
    assert refused.value.remedy


@pytest.mark.parametrize(
    "uri",
    ["s3://AKIA:hunter2@bucket/a", "s3:/u:hunter2@b", "https://u:hunter2@host/b", "s3://hunter2@b"],
)
def test_a_password_is_not_shown(uri: str) -> None:
    with pytest.raises(StorageUriError) as refused:
        open_storage(uri)
    assert "hunter2" not in str(refused.value)


def test_no_two_accepted_uris_share_a_place_unseen() -> None:
    uris = [f"s3://bucket/{prefix}" for prefix in KEPT] + ["s3://bucket", "s3://bucket2"]
    assert all(parse_address(one) != parse_address(two) for one, two in combinations(uris, 2))


def test_file_uri_and_plain_path_are_the_same_place(tmp_path: Path) -> None:
    open_storage(f"file://{tmp_path}/with%20space").put("a", b"1")
    assert (tmp_path / "with space" / "a").read_bytes() == b"1"
