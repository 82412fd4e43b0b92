"""The conformance check fails each storage that would fail in a run."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from recovery.storage.conformance import ConformanceReport, check_conformance
from recovery.storage.directory import DirectoryStorage
from recovery.storage.errors import ObjectMissing
from recovery.storage.open import open_storage
from recovery.storage.protocol import ObjectInfo, Storage


class Unsorted(DirectoryStorage):
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return reversed([*super().list(prefix)])


class Timeless(DirectoryStorage):
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return (replace(info, modified_s=0.0) for info in super().list(prefix))


class Raw(DirectoryStorage):
    """Raises Python's own error for an object that does not exist."""

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        try:
            return super().get(name, start, length)
        except ObjectMissing:
            raise KeyError(name) from None


class Undeletable(DirectoryStorage):
    def delete(self, names: Iterable[str]) -> None:
        raise NotImplementedError("delete")


class RawAbort(DirectoryStorage):
    """Raises another error in a check that is not required."""

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        raise NotImplementedError("abort")


class Locked(DirectoryStorage):
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        return Locked, (threading.Lock(),)


class Private(DirectoryStorage):
    """Opens at another place in each process, as a storage in memory does."""

    def __reduce__(self) -> Any:
        return DirectoryStorage, (f"{self.uri}-of-another-process", self.options)


def check(monkeypatch: pytest.MonkeyPatch, kind: type[DirectoryStorage], path: str) -> Any:
    monkeypatch.setattr("recovery.storage.open.open_storage", kind)
    return check_conformance(open_storage(path), thorough=True)


def failures(report: ConformanceReport) -> dict[str, str | None]:
    return {each.name: each.problem for each in report.results if not each.ok and each.required}


def test_a_directory_passes_every_check(storage: Storage) -> None:
    with closing(storage):
        report = check_conformance(storage, thorough=True)
    assert failures(report) == {}
    assert {"modified", "process"} <= {each.name for each in report.results}


@pytest.mark.parametrize(
    ("kind", "name", "problem"),
    [
        (Unsorted, "list", "a list is not sorted by name"),
        (Timeless, "modified", "a list says that an object was put"),
        (Raw, "missing", "raised KeyError"),
        (Undeletable, "delete", "must raise StorageError"),
        (RawAbort, "abort", "raised NotImplementedError (abort)"),
        (Locked, "process", "cannot be pickled for a worker"),
        (Private, "process", "another process cannot read it"),
    ],
)
def test_a_storage_that_would_fail_in_a_run_fails_a_check(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    kind: type[DirectoryStorage],
    name: str,
    problem: str,
) -> None:
    report = check(monkeypatch, kind, str(tmp_path))
    failed = failures(report)
    assert name in failed, report.results
    assert problem in str(failed[name])
    assert not report.ok
    assert report.refusal is not None
