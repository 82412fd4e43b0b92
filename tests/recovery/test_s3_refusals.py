"""What AWS and other stores document to refuse, in front of a server: training's whole path passes,
or one true sentence says at the start what to do.
"""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recovery.checkpoint.journal import Journal
from recovery.checkpoint.lease import DriverLease
from recovery.checkpoint.read import read_shards, verify
from recovery.checkpoint.retention import apply_retention, reading_checkpoint, remove_orphans
from recovery.state.ancestry import Descent
from recovery.storage.conformance import ConformanceReport, check_conformance
from recovery.storage.errors import (
    ObjectExists,
    StorageError,
    StoragePermissionDenied,
)
from recovery.storage.open import open_storage
from recovery.storage.protocol import Storage, StorageOptions
from tests.harness import refusing_proxy as refuse
from tests.harness.checkpoint_cases import make_checkpoint
from tests.harness.refusing_proxy import Refusal, RefusingProxy, Request, Rule, refusing_proxy
from tests.harness.s3_server import S3Server

OPTIONS = StorageOptions(attempts=3, backoff_s=0.001, request_timeout_s=20)


@pytest.fixture
def before(
    s3: S3Server, s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., RefusingProxy]:
    """Start a proxy with these rules and point the environment at it, no region set."""

    @contextmanager
    def start(*rules: Rule, **given: Any) -> Iterator[RefusingProxy]:
        with refusing_proxy(s3.endpoint, *rules, **given) as proxy:
            monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
            monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
            yield proxy

    return start  # type: ignore[return-value]


def _check(uri: str) -> ConformanceReport:
    with closing(open_storage(uri, OPTIONS)) as storage:
        return check_conformance(storage)


@pytest.mark.parametrize(
    "rules",
    [
        (refuse.signature_v2, refuse.presigned),
        (refuse.region("us-west-2"), refuse.signature_v2),
        (refuse.no_conditions,),
        (refuse.ignored_conditions,),
        (refuse.no_checksums, refuse.content_md5),
        (refuse.no_multi_delete,),
        (refuse.directory_bucket,),
    ],
    ids=["v2", "region-v2", "501", "ignored", "checksums", "multi", "directory"],
)
def test_path_is_green(before: Any, s3_uri: str, rules: tuple[Rule, ...]) -> None:
    with before(*rules):
        report = _check(s3_uri)
    assert {result.name: result.problem for result in report.results if not result.ok} == {}


@pytest.mark.parametrize("configured", [None, "us-east-1", "us-west-2", "eu-west-1"])
def test_bucket_in_another_region_is_found(
    before: Any, s3_uri: str, monkeypatch: pytest.MonkeyPatch, configured: str | None
) -> None:
    """Every later request is signed for the bucket's region at once: one is refused, no more."""
    with before(refuse.region("ap-south-2"), refuse.presigned) as proxy:
        if configured is not None:
            monkeypatch.setenv("AWS_REGION", configured)
            monkeypatch.setenv("AWS_DEFAULT_REGION", configured)
        with closing(open_storage(s3_uri, OPTIONS)) as storage:
            storage.put("a", bytes(20 << 20))
            storage.get_into("a", 7, memoryview(bytearray(1000)))
        assert proxy.refused == 1
        assert proxy.requests[0].method == "HEAD"


@pytest.mark.parametrize(
    ("rule", "reason", "remedy"),
    [
        (refuse.redirected("eu-west-1"), "lies in region eu-west-1", "unset AWS_ENDPOINT_URL"),
        (refuse.kms_denied, "kms:GenerateDataKey on the bucket's KMS key", "allow kms:Generate"),
        (refuse.expired_keys(lambda: "none"), "credentials have expired", "renew them"),
        (refuse.skewed, r"clock is 3\d\d\d s behind", "NTP"),
        (refuse.virtual_hosts("s3.test"), "bucket in the host name", "addressing_style = virtual"),
        (refuse.ignored_range, "ignores the Range", "another store"),
    ],
    ids=["301", "kms", "expired", "skew", "hosts", "range"],
)
def test_refusal_is_one_true_sentence(
    before: Any, s3_uri: str, rule: Rule, reason: str, remedy: str
) -> None:
    with before(rule):
        report = _check(s3_uri)
    assert not report.ok
    assert report.refusal is not None
    with pytest.raises(StorageError, match=reason) as said:
        raise report.refusal
    assert remedy in said.value.remedy


@pytest.mark.parametrize(
    ("method", "query", "action"),
    [
        ("PUT", "", "s3:PutObject"),
        ("GET", "list-type", "s3:ListBucket"),
        ("POST", "uploads", "s3:PutObject"),
        ("GET", "uploads", "s3:ListBucketMultipartUploads"),
        ("DELETE", "uploadId", "s3:AbortMultipartUpload"),
        ("POST", "delete", "s3:DeleteObject"),
        ("HEAD", "", "s3:GetObject"),
    ],
)
def test_missing_permission_is_named(
    before: Any, s3_uri: str, method: str, query: str, action: str
) -> None:
    def rule(request: Request) -> Refusal | None:
        in_bucket = request.key.count("/") > 1 or method != "HEAD"
        asked = not query or query in request.query
        if request.method == method and asked and in_bucket:
            return Refusal(403, "AccessDenied", "Access Denied")
        return None

    with before(rule):
        report = _check(s3_uri)
    remedies = [result.remedy or "" for result in report.results if result.error is not None]
    assert any(f"allow {action}" in remedy for remedy in remedies)
    uploads_alone = action in ("s3:ListBucketMultipartUploads", "s3:AbortMultipartUpload")
    assert report.ok == uploads_alone


REQUESTS: dict[str, Callable[[Storage], Any]] = {
    "size": lambda storage: storage.size("a"),
    "size of nothing": lambda storage: storage.size("nothing"),
    "get": lambda storage: storage.get("a", 3, 5),
    "list": lambda storage: list(storage.list()),
    "now": lambda storage: storage.now(),
    "delete": lambda storage: storage.delete(["nothing"]),
    "abort": lambda storage: storage.abort_uploads("a", 1e6),
    "conditional put": lambda storage: storage.put("once", b"1", if_none_match=True),
}


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId"])
def test_a_head_whose_keys_are_refused_has_the_reason_of_a_get(
    before: Any, s3_uri: str, code: str
) -> None:
    """Wrong: "allow s3:GetObject". The answer to a HEAD has a status and no code."""
    status = 400 if code == "ExpiredToken" else 403
    with (
        before(lambda _: Refusal(status, code, "As said.")),
        closing(open_storage(s3_uri, OPTIONS)) as storage,
        pytest.raises(StoragePermissionDenied, match=code),
    ):
        storage.size("a")


def test_rotated_keys_are_read_anew_once(
    before: Any, s3_uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process holds the keys of its start; the file has new ones when the old have expired.

    Wrong: a HEAD fails, since its answer has no code, and no later upload of the worker works.
    """
    file = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    valid = "first"

    def write(key: str) -> None:
        lines = ["[default]", f"aws_access_key_id={key}", "aws_secret_access_key=s"]
        file.write_text("\n".join(lines))

    write("first")
    with (
        before(refuse.expired_keys(lambda: valid)) as proxy,
        closing(open_storage(s3_uri, OPTIONS)) as storage,
    ):
        content = bytes(20 << 20)
        storage.put("a", content)
        valid = "second"
        write("second")
        memory = bytearray(100)
        storage.get_into("a", 5, memoryview(memory))
        storage.put("b", content)
        for request in REQUESTS.values():
            valid += "'"
            write(valid)
            request(storage)
        valid = "third"
        write("third")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: storage.put(f"c{n}", b"1"), range(4)))
        valid = "fourth"  # and the file keeps the old ones
        asked = len(proxy.requests)
        with pytest.raises(StoragePermissionDenied, match="expired"):
            storage.put("d", b"1")
        # One try, the HeadBucket of the new client, and one more try.
        assert len(proxy.requests) - asked == 3


@pytest.mark.parametrize("rule", [refuse.no_conditions, refuse.ignored_conditions])
def test_without_conditional_puts_one_of_many_writers_wins(
    before: Any, s3_uri: str, rule: Rule
) -> None:
    """Each writer is a process of its own as far as the store can tell: it probes for itself."""
    with before(rule):

        def claim(number: int) -> int | None:
            with closing(open_storage(s3_uri, OPTIONS)) as storage:
                try:
                    storage.put("generations/1", bytes([number]), if_none_match=True)
                except ObjectExists:
                    return None
                return number

        with ThreadPoolExecutor(5) as pool:
            won = [number for number in pool.map(claim, range(5)) if number is not None]
        assert len(won) == 1
        with closing(open_storage(s3_uri, OPTIONS)) as storage:
            assert storage.get("generations/1") == bytes(won)
            assert [info.name for info in storage.list("claims/generations/")] == []


@pytest.mark.parametrize(
    ("method", "refusal", "reason", "remedy"),
    [
        ("PUT", Refusal(403, "QuotaExceeded", "Quota exceeded."), "no space left", "quota"),
        (
            "POST",
            Refusal(403, "AccessDenied", "Access Denied because object protected by object lock."),
            "the object is locked",
            "without Object Lock",
        ),
    ],
    ids=["quota", "lock"],
)
def test_a_403_that_is_no_missing_permission(
    before: Any,
    s3_uri: str,
    method: str,
    refusal: Refusal,
    reason: str,
    remedy: str,
) -> None:
    """Wrong: "allow s3:PutObject" to a role that has it."""

    def rule(request: Request) -> Refusal | None:
        return refusal if request.method == method else None

    with before(rule), closing(open_storage(s3_uri, OPTIONS)) as storage:
        ask = {"PUT": lambda: storage.put("a", b"1"), "POST": lambda: storage.delete(["a"])}[method]
        with pytest.raises(StorageError, match=reason) as said:
            ask()
    assert remedy in said.value.remedy


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_certificate_for_another_host_is_named(
    before: Any, s3_uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host: str
) -> None:
    """Wrong: "check the network"."""
    context, pem = refuse.private_authority(tmp_path, "other.test")
    with before(tls=context) as proxy:
        monkeypatch.setenv("AWS_CA_BUNDLE", str(pem))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://{host}:{proxy.port}")
        with (
            closing(open_storage(s3_uri, OPTIONS)) as storage,
            pytest.raises(StorageError, match="for another host name") as said,
        ):
            storage.size("a")
    assert "AWS_ENDPOINT_URL" in said.value.remedy


def test_a_list_is_sorted_whatever_the_stores_order(before: Any, s3_uri: str) -> None:
    with before(refuse.unsorted_list), closing(open_storage(s3_uri, OPTIONS)) as storage:
        assert [info.name for info in storage.list("x/")] == ["x/a", "x/b", "x/c"]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolve every host under s3.test to this machine."""
    resolve = socket.getaddrinfo

    def resolved(host: Any, *rest: Any, **given: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        here = isinstance(name, str) and (name == "s3.test" or name.endswith(".s3.test"))
        return resolve("127.0.0.1" if here else host, *rest, **given)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)


def test_addressing_style_of_the_profile_is_followed(
    before: Any, s3_uri: str, names: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.write_text("[default]\ns3 =\n  addressing_style = virtual\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    with before(refuse.virtual_hosts("s3.test")) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://s3.test:{proxy.port}")
        report = _check(s3_uri)
    assert {result.name: result.problem for result in report.results if not result.ok} == {}


def test_endpoint_of_the_profile_is_followed(
    before: Any, s3_uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with before() as proxy:
        config = tmp_path / "config"
        config.write_text(f"[profile lab]\nendpoint_url = http://127.0.0.1:{proxy.port}\n")
        monkeypatch.delenv("AWS_ENDPOINT_URL")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
        monkeypatch.setenv("AWS_PROFILE", "lab")
        report = _check(s3_uri)
    assert report.ok, report.refusal
    assert proxy.requests


def test_private_authority_is_trusted_by_its_bundle(
    before: Any, s3_uri: str, names: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tls, bundle = refuse.private_authority(tmp_path, "s3.test")
    with before(tls=tls) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://s3.test:{proxy.port}")
        refused = _check(s3_uri).refusal
        assert refused is not None
        assert "certificate of the endpoint is not trusted" in refused.reason
        assert "AWS_CA_BUNDLE" in refused.remedy
        monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
        report = _check(s3_uri)
        assert {result.name: result.problem for result in report.results if not result.ok} == {}
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "none.pem"))
        missing = _check(s3_uri).refusal
    assert missing is not None
    assert "none.pem cannot be read" in missing.reason


def test_unknown_profile_and_sso_login_have_their_sentences(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    sso = ["sso_start_url = https://x.awsapps.com/start", "sso_region = us-east-1"]
    sso += ["sso_account_id = 123456789012", "sso_role_name = r"]
    config.write_text("\n".join(["[profile lab]", *sso]))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_PROFILE", "lb")
    with pytest.raises(StoragePermissionDenied, match=r"no AWS profile 'lb'; .*one of lab"):
        open_storage(s3_uri, OPTIONS).put("a", b"1")
    monkeypatch.setenv("AWS_PROFILE", "lab")
    with pytest.raises(StoragePermissionDenied, match=r"SSO login .*'lab'.*aws sso login"):
        open_storage(s3_uri, OPTIONS).put("a", b"1")


def test_checkpoints_live_in_a_directory_bucket(before: Any, s3_uri: str) -> None:
    """Wrong: the check passes, and the job's first list is refused."""
    with before(refuse.directory_bucket), closing(open_storage(s3_uri, OPTIONS)) as storage:
        storage.put("stepping/other", b"1")
        walk_a_run(storage)
        assert [info.name for info in storage.list("steppi")] == ["stepping/other"]


def walk_a_run(storage: Storage) -> None:
    """Make every request that a run, its workers, its successor and `autohet checkpoint` make."""
    lease = DriverLease(storage)
    lease.take()
    journal = Journal(storage, lease.driver)
    journal.mark()
    journal.claim(Descent(generation=2, parent=None, first_step=0, driver=lease.driver))
    for step in (1, 2):
        make_checkpoint(storage, step)
        # A worker that is started again finds its files.
        make_checkpoint(storage, step)
    storage.put("large", bytes(6 << 20))
    with reading_checkpoint(storage, 2) as manifest:
        assert dict(read_shards(storage, manifest)).keys() == manifest.shards
    assert verify(storage).ok
    with pytest.raises(ZeroDivisionError):
        storage.put("broken", BrokenPayload())
    apply_retention(storage, keep=1)
    remove_orphans(storage)
    journal.unmark()
    lease.release()


class BrokenPayload:
    """A payload of two parts that ends early."""

    size = 6 << 20

    def read(self, offset: int, length: int) -> bytes:
        raise ZeroDivisionError


def shape_of(request: Request) -> tuple[object, ...]:
    """What a store may refuse: the operation, its prefix, its conditions and headers."""
    query = request.query
    words = {"list-type", "uploads", "uploadId", "partNumber", "delete", "max-keys"} & query.keys()
    prefix = query.get("prefix", [""])[0]
    headers = {"range", "if-none-match", "x-amz-checksum-mode"} & request.headers.keys()
    in_bucket = request.key.strip("/").count("/") > 0
    ends = prefix != "" and not prefix.endswith("/")
    return request.method, in_bucket, tuple(sorted(words)), ends, tuple(sorted(headers))


def test_the_check_walks_every_request_that_a_run_makes(before: Any, s3_uri: str) -> None:
    small = replace(OPTIONS, part_bytes=5 << 20)
    with before() as proxy:
        with closing(open_storage(s3_uri, small)) as storage:
            walk_a_run(storage)
        product = {shape_of(request) for request in proxy.requests}
        proxy.requests.clear()
        assert _check(s3_uri).ok
        walked = {shape_of(request) for request in proxy.requests}
    assert len(product) > 12
    assert product - walked == set()
