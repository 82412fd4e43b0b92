"""One conformance suite for every storage, then what is special to each."""

import errno
import os
import pickle
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from botocore.awsrequest import AWSResponse
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from recovery.checkpoint.errors import (
    CheckpointCorrupt,
    CheckpointIncomplete,
    CheckpointMissing,
    ManifestInvalid,
)
from recovery.state.layout import ShardId
from recovery.storage import errors as storage_errors
from recovery.storage.directory import temporary_name
from recovery.storage.errors import (
    BucketMissing,
    ObjectExists,
    ObjectMissing,
    ObjectTruncated,
    StorageError,
    StorageFull,
    StoragePermissionDenied,
    StorageThrottled,
    StorageUnreachable,
    UploadGone,
)
from recovery.storage.open import open_storage
from recovery.storage.payload import BytesPayload, ConcatPayload
from recovery.storage.protocol import BandwidthLimit, Storage, StorageOptions
from recovery.storage.tensor_payload import TensorPayload
from tests.recovery.conftest import SMALL


def test_what_is_put_comes_back_whole_and_in_ranges(storage: Storage) -> None:
    storage.put("a/one", b"0123456789")
    assert storage.get("a/one") == b"0123456789"
    assert storage.get("a/one", 3, 4) == b"3456"
    assert storage.get("a/one", 7) == b"789"
    assert storage.get("a/one", 2, 0) == b""
    buffer = bytearray(5)
    storage.get_into("a/one", 5, memoryview(buffer))
    assert bytes(buffer) == b"56789"
    assert storage.size("a/one") == 10
    storage.put("a/one", b"new")
    assert storage.get("a/one") == b"new"
    storage.put("a/empty", b"")
    assert storage.get("a/empty") == b""
    assert storage.size("a/empty") == 0


def test_large_object_travels_in_parts_and_is_byte_equal(storage: Storage) -> None:
    data = os.urandom(12 << 20)  # three parts of at most 5 MiB
    storage.put("large", ConcatPayload([BytesPayload(data[:7]), BytesPayload(data[7:])]))
    assert storage.get("large") == data
    assert [(info.name, info.size) for info in storage.list()] == [("large", len(data))]


def test_list_is_sorted_by_name_under_the_prefix_alone(storage: Storage) -> None:
    assert list(storage.list()) == []
    for name in ("step-2/b", "step-10/a", "step-2/a", "other"):
        storage.put(name, name.encode())
    assert [info.name for info in storage.list()] == ["other", "step-10/a", "step-2/a", "step-2/b"]
    assert [info.name for info in storage.list("step-2/")] == ["step-2/a", "step-2/b"]
    assert [info.name for info in storage.list("step-")] == ["step-10/a", "step-2/a", "step-2/b"]
    assert all(abs(info.modified_s - storage.now()) < 30 for info in storage.list())


def test_delete_removes_and_passes_over_what_is_not_there(storage: Storage) -> None:
    storage.put("x/a", b"1")
    storage.put("x/b", b"2")
    storage.delete(["x/a", "x/none"])
    assert [info.name for info in storage.list()] == ["x/b"]
    assert storage.size("x/a") is None


def test_missing_and_short_objects_are_named_errors(storage: Storage) -> None:
    with pytest.raises(ObjectMissing, match="nothing"):
        storage.get("nothing")
    with pytest.raises(ObjectMissing):
        storage.get_into("nothing", 0, memoryview(bytearray(1)))
    storage.put("short", b"abc")
    with pytest.raises(ObjectTruncated):
        storage.get_into("short", 1, memoryview(bytearray(5)))
    with pytest.raises(ObjectTruncated):
        storage.get_into("short", 100, memoryview(bytearray(5)))


def test_of_many_conditional_puts_exactly_one_wins_and_its_content_stays(storage: Storage) -> None:
    barrier = threading.Barrier(4)

    def put(number: int) -> int | None:
        barrier.wait(10)
        try:
            storage.put("claim", bytes([number]) * 1000, if_none_match=True)
        except ObjectExists:
            return None
        return number

    with ThreadPoolExecutor(4) as pool:
        winners = [number for number in pool.map(put, range(4)) if number is not None]
    assert len(winners) == 1
    assert storage.get("claim") == bytes(winners) * 1000


def test_a_put_that_fails_leaves_nothing_behind(storage: Storage) -> None:
    class Breaks:
        size = 12 << 20

        def read(self, offset: int, length: int) -> bytes:
            if offset:
                raise RuntimeError("source is gone")
            return bytes(length)

    with pytest.raises(RuntimeError, match="source is gone"):
        storage.put("big", Breaks())
    assert list(storage.list()) == []
    assert storage.abort_uploads("", older_than_s=-60) == 0  # not even an unfinished upload


def test_storage_pickles_as_its_address_and_options(storage: Storage) -> None:
    storage.put("a", b"1")
    other = pickle.loads(pickle.dumps(storage))
    assert other.get("a") == b"1"
    assert (other.uri, other.options) == (storage.uri, storage.options)


@pytest.mark.parametrize("name", ["../outside", "/etc/x", "", "a/../../b"])
def test_names_cannot_leave_the_directory(directory: Storage, name: str) -> None:
    with pytest.raises(StorageError, match="leaves the storage"):
        directory.put(name, b"x")


def test_a_full_disk_is_named_and_leaves_no_half_file(directory: Storage) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (1 << 20, before[1])
    )  # the kernel refuses to write beyond
    try:
        with pytest.raises(StorageFull, match="free space"):
            directory.put("big", bytes(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(directory.list()) == []
    assert [path for path in Path(directory.uri).rglob("*") if path.is_file()] == []


def test_unfinished_writes_of_a_dead_process_are_hidden_and_cleaned_by_age(
    directory: Storage,
) -> None:
    directory.put("step-1/a", b"1")
    left = Path(directory.uri, "step-1", temporary_name())
    left.write_bytes(b"half")
    assert [info.name for info in directory.list()] == ["step-1/a"]
    assert directory.abort_uploads("step-", older_than_s=3600) == 0
    os.utime(left, (1, 1))
    assert directory.abort_uploads("step-", older_than_s=3600) == 1
    assert not left.exists()


@pytest.mark.parametrize("exclusive", [False, True])
def test_an_object_is_on_the_device_before_it_has_its_name_and_its_name_before_the_put_returns(
    directory: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exclusive: bool
) -> None:
    """A manifest is the last thing of a checkpoint: after a loss of power it may not be there over
    data that is not.
    """
    done: list[str] = []
    sync, replace, link = os.fsync, os.replace, os.link

    def synced(descriptor: int) -> None:
        done.append(
            "directory" if Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_dir() else "bytes"
        )
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("name"), replace(*paths)))
    monkeypatch.setattr(os, "link", lambda *paths: (done.append("name"), link(*paths)))
    directory.put("a/b", b"manifest", if_none_match=exclusive)
    assert done == ["bytes", "name", "directory"]


def test_a_missing_bucket_is_named(s3: Any) -> None:
    gone = open_storage("s3://no-such-bucket-here/x", SMALL)
    for action in (lambda: gone.put("a", b"1"), lambda: list(gone.list()), lambda: gone.get("a")):
        with pytest.raises(BucketMissing, match="no-such-bucket-here"):
            action()


def test_no_answer_is_unreachable_after_bounded_tries(
    monkeypatch: pytest.MonkeyPatch, s3: Any
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # discard: nobody listens
    with pytest.raises(StorageUnreachable, match="AWS_ENDPOINT_URL"):
        open_storage("s3://bucket/x", SMALL).get("a")


def test_no_credentials_is_a_permission_error(
    monkeypatch: pytest.MonkeyPatch, s3: Any, tmp_path: Path
) -> None:
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(key)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(StoragePermissionDenied, match="instance role"):
        open_storage("s3://bucket/x", SMALL).get("a")


class Answers:
    """Answers the next `times` requests of a client in the server's place."""

    def __init__(self, storage: Any, status: int, code: str, times: int) -> None:
        self.status, self.code, self.times, self.asked = status, code, times, 0
        storage.client.meta.events.register("before-send.s3", self)

    def __call__(self, request: Any, **_: Any) -> AWSResponse | None:
        self.asked += 1
        if self.asked > self.times:
            return None
        body = f"<Error><Code>{self.code}</Code><Message>injected</Message></Error>".encode()

        class Raw:
            def stream(self, *_: Any, **__: Any) -> Any:
                yield body

        return AWSResponse(request.url, self.status, {"content-type": "application/xml"}, Raw())


@pytest.mark.parametrize(
    ("status", "code"), [(500, "InternalError"), (503, "SlowDown"), (429, "TooManyRequests")]
)
def test_server_errors_and_throttling_are_tried_again(s3_uri: str, status: int, code: str) -> None:
    storage = open_storage(s3_uri, SMALL)
    fault = Answers(storage, status, code, times=2)
    storage.put("a", b"1")
    assert fault.asked == 3
    assert storage.get("a") == b"1"


@pytest.mark.parametrize(
    ("status", "code", "error", "tries"),
    [
        (500, "InternalError", StorageUnreachable, 3),
        (503, "SlowDown", StorageThrottled, 3),
        (403, "AccessDenied", StoragePermissionDenied, 1),
        (507, "XMinioStorageFull", StorageFull, 1),
        (400, "InvalidRequest", StorageError, 1),
    ],
)
def test_tries_are_bounded_and_useless_ones_not_made(
    s3_uri: str, status: int, code: str, error: type[StorageError], tries: int
) -> None:
    storage = open_storage(s3_uri, SMALL)
    fault = Answers(storage, status, code, times=1000)
    with pytest.raises(error, match=code):
        storage.put("a", b"1")
    assert fault.asked == tries


def test_bandwidth_is_shared_by_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = {"now": 100.0}
    waits: list[float] = []
    monkeypatch.setattr("recovery.storage.protocol.time.monotonic", lambda: clock["now"])
    monkeypatch.setattr("recovery.storage.protocol.time.sleep", waits.append)
    limit = BandwidthLimit(1000.0)
    for _ in range(3):
        limit.take(500)
    assert waits == pytest.approx([0.0, 0.5, 1.0])
    clock["now"] = 200.0  # idle time is not saved up
    limit.take(500)
    limit.take(500)
    assert waits[3:] == pytest.approx([0.0, 0.5])


def test_payloads_give_any_range_of_any_view() -> None:
    tensor = torch.arange(7 * 6 * 5, dtype=torch.float32).reshape(7, 6, 5)
    view = tensor[:, 2:5, 1:]
    expected = view.contiguous().numpy().tobytes()
    payload = ConcatPayload(
        [BytesPayload(b"head"), TensorPayload(view), BytesPayload(b""), BytesPayload(b"tail")]
    )
    whole = b"head" + expected + b"tail"
    assert payload.size == len(whole)
    for offset in range(0, len(whole), 13):
        for length in (0, 1, 17, len(whole) - offset):
            assert bytes(payload.read(offset, length)) == whole[offset : offset + length]
    assert (
        bytes(TensorPayload(torch.tensor(2.5)).read(1, 2))
        == torch.tensor(2.5).numpy().tobytes()[1:3]
    )
    assert TensorPayload(torch.empty(0, 4)).size == 0


def test_every_error_survives_a_pickle() -> None:
    kinds = [
        kind
        for kind in vars(storage_errors).values()
        if isinstance(kind, type) and issubclass(kind, StorageError)
    ]
    errors: list[Exception] = [kind("s3://b/x", "why", "do this") for kind in kinds]
    errors += [
        CheckpointMissing("u", 3, (1, 2)),
        CheckpointIncomplete(3, ("a", "b")),
        ManifestInvalid("u", "bad"),
    ]
    errors += [CheckpointCorrupt("u", ShardId("param/w", 1), "bad")]
    for error in errors:
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert vars(copy) == vars(error)
    assert len(errors) > 12


def test_options_refuse_what_cannot_work() -> None:
    with pytest.raises(ValueError, match="max_bytes_per_s"):
        StorageOptions(max_bytes_per_s=0)
    with pytest.raises(ValueError, match="at least 1"):
        StorageOptions(concurrency=0)


def test_an_answer_that_cannot_be_read_is_asked_for_again(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, broken = open_storage(s3_uri, SMALL), ["half a page"]
    storage.put("a", b"1")
    listed = storage.client.list_objects_v2  # type: ignore[attr-defined]

    def cut_off(**request: Any) -> Any:
        if broken:
            raise ResponseParserError(broken.pop())
        return listed(**request)

    monkeypatch.setattr(storage.client, "list_objects_v2", cut_off)  # type: ignore[attr-defined]
    assert [info.name for info in storage.list()] == ["a"]


class LostReply:
    """The server does this with an upload's completion (it completes it), and nobody hears of it:
    the next try is told that there is no such upload.
    """

    def __init__(
        self,
        storage: Any,
        monkeypatch: pytest.MonkeyPatch,
        instead: Callable[[], object] | None = None,
    ) -> None:
        self._complete, self._instead, self.tries = (
            storage.client.complete_multipart_upload,
            instead,
            0,
        )
        monkeypatch.setattr(storage.client, "complete_multipart_upload", self)

    def __call__(self, **request: Any) -> Any:
        self.tries += 1
        if self.tries > 1:
            detail = {
                "Error": {"Code": "NoSuchUpload"},
                "ResponseMetadata": {"HTTPStatusCode": 404},
            }
            raise ClientError(detail, "CompleteMultipartUpload")  # type: ignore[arg-type]
        if self._instead is None:
            self._complete(**request)
        else:
            self._instead()
        raise ConnectionResetError("the reply is lost")


def test_an_upload_whose_last_reply_was_lost_is_there(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, content = open_storage(s3_uri, SMALL), os.urandom(6 << 20)
    lost = LostReply(storage, monkeypatch)
    storage.put("a", content)
    assert lost.tries == 2
    assert storage.get("a") == content


def test_a_large_conditional_put_is_one_request(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores that honour the condition may ignore it where an upload in parts is completed."""
    storage, content = open_storage(s3_uri, SMALL), os.urandom(6 << 20)
    lost = LostReply(storage, monkeypatch)
    storage.put("b", content, if_none_match=True)
    assert lost.tries == 0
    assert storage.get("b") == content
    with pytest.raises(ObjectExists):
        storage.put("b", content, if_none_match=True)


def test_an_upload_that_was_aborted_is_not_there(
    s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the object is: of an older upload of as many bytes, or of one of others."""
    storage, content = open_storage(s3_uri, SMALL), os.urandom(6 << 20)
    storage.put("a", content[::-1])
    time.sleep(1.1)  # objects' times are in whole seconds
    for instead in (lambda: None, lambda: storage.put("a", b"another")):
        with monkeypatch.context() as patch:
            LostReply(storage, patch, instead)
            with pytest.raises(UploadGone):
                storage.put("a", content)


def test_what_cannot_be_listed_is_not_empty(
    directory: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a checkpoint that is there would look as if it were not, and be removed as a
    left-over.
    """
    directory.put("step-1/a", b"1")
    directory.put("step-2/a", b"1")
    scan, failed = os.scandir, list[str]()

    def too_many(path: Any) -> Any:
        if str(path).endswith("step-2") and not failed:
            failed.append(str(path))
            raise OSError(errno.EMFILE, "too many open files")
        return scan(path)

    monkeypatch.setattr(os, "scandir", too_many)
    with pytest.raises(StorageError, match="too many"):
        list(directory.list("step-"))
    assert [info.name for info in directory.list("step-")] == ["step-1/a", "step-2/a"]
    assert list(directory.list("nothing/")) == []


def test_what_is_not_the_storages_own_is_not_looked_into(
    directory: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system's `lost+found`, say, which root alone may read."""
    for name in ("step-1/a", "lost+found/b", "top"):
        directory.put(name, b"1")
    scan = os.scandir

    def refused(path: Any) -> Any:
        if str(path).endswith("lost+found"):
            raise OSError(errno.EACCES, "permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert [info.name for info in directory.list("step-")] == ["step-1/a"]
    assert [info.name for info in directory.list("step-1/")] == ["step-1/a"]


def test_without_hard_links_a_put_that_fails_leaves_the_name_free(
    directory: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refused)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refused)
        with pytest.raises(StoragePermissionDenied):
            directory.put("a", b"1", if_none_match=True)
    directory.put("a", b"2", if_none_match=True)
    assert directory.get("a") == b"2"
    with pytest.raises(ObjectExists):
        directory.put("a", b"3", if_none_match=True)
