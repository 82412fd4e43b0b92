"""Conformance of a storage: the whole path that checkpoints take, walked before the first step.

Each check does what training does later, through the same code: put, read, upload in parts, read
ranges, put on a condition, list, delete, abort an upload. A refusal at any of them would else show
hours later, at the first checkpoint or at the first restore.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from secrets import token_hex
from typing import Any

from recovery.storage.contents import holds
from recovery.storage.errors import ObjectExists, ObjectMissing, ObjectTruncated, StorageError
from recovery.storage.protocol import ObjectInfo, Storage

PREFIX = "check-"
PART_BYTES = 5 << 20
"""Smallest part of an S3 upload that is not its last."""
MAX_SKEW_S = 60.0
RACERS = 4
START_TIMEOUT_S = 60.0
"""Limit on the start of another process, beside the time of its request."""
OLD_VERSIONS_KEPT_DAYS = 3
WRITES = "use a store with S3's semantics, or a shared directory"
READ_ELSEWHERE = """
import pickle, sys
sys.path, pickled, name = pickle.load(sys.stdin.buffer)
sys.stdout.buffer.write(pickle.loads(pickled).get(name))
"""
"""Program of a process that reads one object, as a worker does."""


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one check; `problem` and `remedy` only where it failed or has a remark."""

    name: str
    what: str
    ok: bool
    required: bool
    """True if training is refused when the check fails."""
    seconds: float
    problem: str | None = None
    remedy: str | None = None
    error: StorageError | None = None


@dataclass(frozen=True)
class ConformanceReport:
    """Results of all checks of one storage, in the order in which they ran."""

    storage: str
    results: tuple[CheckResult, ...]
    region: str | None
    endpoint: str | None

    @property
    def ok(self) -> bool:
        return all(result.ok or not result.required for result in self.results)

    @property
    def refusal(self) -> StorageError | None:
        """The first error for which training is refused."""
        for result in self.results:
            if result.required and not result.ok and result.error is not None:
                return result.error
        return None

    @property
    def document(self) -> dict[str, Any]:
        """Report as a JSON document."""
        names = [field.name for field in fields(CheckResult) if field.name != "error"]
        checks = []
        for result in self.results:
            checks.append({name: getattr(result, name) for name in names})
        return {
            "storage": self.storage,
            "ok": self.ok,
            "region": self.region,
            "endpoint": self.endpoint,
            "checks": checks,
        }


@dataclass(frozen=True)
class _Check:
    name: str
    what: str
    run: Callable[[_Walk], str | None]
    """Returns a remark, or raises StorageError."""
    required: bool = True
    thorough: bool = False
    """Left out of the short walk at a job's start."""


class _Walk:
    """Shared state of the checks: the storage, the names of their objects and the begin."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.begun = time.monotonic()
        self.prefix = f"{PREFIX}{token_hex(8)}/"
        self.small = self.prefix + "small"
        self.large = self.prefix + "large"
        self.claimed = self.prefix + "claimed"
        self.listed: list[ObjectInfo] = []
        """Objects that the check `list` saw: a start of a job lists once."""
        self.content = (token_hex(32).encode() * (PART_BYTES // 64 + 2))[: PART_BYTES + 1000]

    def wrong(self, name: str, reason: str) -> StorageError:
        return StorageError(f"{self.storage.uri}/{name}", reason, WRITES)

    def require(self, holds: bool, name: str, reason: str) -> None:
        if not holds:
            raise self.wrong(name, reason)


class _Broken:
    """A payload of several parts whose first read fails: its upload is begun and aborted."""

    size = PART_BYTES + 1000

    def read(self, offset: int, length: int) -> bytes:
        raise _ReadFailed


class _ReadFailed(Exception):
    pass


def check_conformance(storage: Storage, *, thorough: bool = False) -> ConformanceReport:
    """Run the checks on a storage.

    Blocks for some requests and two parts of 5 MiB. Raises no StorageError. `thorough` adds what a
    job's start has no time for: names with special characters, overwriting, a race of conditional
    puts, a read in another process.
    """
    from recovery.storage.open import open_storage

    small = replace(storage.options, part_bytes=PART_BYTES)
    bound = open_storage(storage.uri, small)
    walk = _Walk(bound)
    checks = [check for check in _CHECKS if thorough or not check.thorough]
    results: list[CheckResult] = []
    try:
        for check in checks:
            result = _run(check, walk)
            results.append(result)
            # Without these two no other check can say anything.
            if check.name in ("reach", "put") and not result.ok:
                break
        region, endpoint = _facts(bound) if results[0].ok else (None, None)
    finally:
        # The checks have reported what such a storage raises.
        with contextlib.suppress(Exception):
            bound.delete([info.name for info in bound.list(walk.prefix)])
        bound.close()

    last = results[-1].name
    for check in checks[len(results) :]:
        reason = f"not tried, since '{last}' failed"
        results.append(CheckResult(check.name, check.what, False, check.required, 0.0, reason))
    return ConformanceReport(storage.uri, tuple(results), region, endpoint)


def _run(check: _Check, walk: _Walk) -> CheckResult:
    begun = time.monotonic()
    error: StorageError | None = None
    problem: str | None = None
    remedy: str | None = None
    required = check.required
    try:
        problem = check.run(walk)
    except StorageError as failed:
        error = failed
    except Exception as failed:  # noqa: BLE001 - any error is the result of the check
        error = _must_raise_storage_error(walk.storage, failed)
        # Retries and fallbacks catch StorageError only, so anything else ends the run.
        required = True
    if error is not None:
        problem = error.reason
        remedy = error.remedy or None

    return CheckResult(
        name=check.name,
        what=check.what,
        ok=error is None,
        required=required,
        seconds=round(time.monotonic() - begun, 3),
        problem=problem,
        remedy=remedy,
        error=error,
    )


def _must_raise_storage_error(storage: Storage, failed: Exception) -> StorageError:
    reason = f"raised {type(failed).__name__} ({failed}), but a storage must raise StorageError"
    error = StorageError(storage.uri, reason, "convert the error in the storage's class")
    error.__cause__ = failed
    return error


def _old_versions(walk: _Walk) -> str | None:
    client = getattr(walk.storage, "client", None)
    return None if client is None else _old_versions_of(client, walk.storage.uri)


def _old_versions_of(client: Any, uri: str) -> str | None:
    """Return a sentence on a bucket that keeps every removed object for ever, with the rule to add.

    client: boto3's. uri: `s3://bucket/prefix`. None also where the store does not say: the requests
    need rights that no other request does.
    """
    # Here and not above, since only a storage with a client needs it.
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    try:
        if client.get_bucket_versioning(Bucket=bucket).get("Status") != "Enabled":
            return None
        rules = _lifecycle_rules(client, bucket)
    except (ClientError, BotoCoreError):
        return None
    prefix = f"{prefix}/" if prefix else ""
    if any(_removes_old_versions(rule, prefix) for rule in rules):
        return None

    rule = {
        "ID": "autohet-old-versions",
        "Status": "Enabled",
        "Filter": {"Prefix": prefix},
        "NoncurrentVersionExpiration": {"NoncurrentDays": OLD_VERSIONS_KEPT_DAYS},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": OLD_VERSIONS_KEPT_DAYS},
    }
    return (
        f"bucket {bucket} is versioned and keeps each removed checkpoint for ever, which is paid"
        f" for: add this lifecycle rule to the bucket's (`scripts/aws/prepare --bucket {bucket}`"
        f" does): {json.dumps(rule)}"
    )


def _lifecycle_rules(client: Any, bucket: str) -> Sequence[Mapping[str, Any]]:
    from botocore.exceptions import ClientError

    try:
        answer = client.get_bucket_lifecycle_configuration(Bucket=bucket)
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchLifecycleConfiguration":
            raise
        return ()
    rules: Sequence[Mapping[str, Any]] = answer.get("Rules", ())
    return rules


def _removes_old_versions(rule: Mapping[str, Any], prefix: str) -> bool:
    """Return True if the rule holds for every object below `prefix`."""
    filtered = rule.get("Filter") or {"Prefix": rule.get("Prefix", "")}
    covered = filtered.keys() <= {"Prefix"} and prefix.startswith(filtered.get("Prefix") or "")
    is_enabled = rule.get("Status") == "Enabled"
    return is_enabled and covered and "NoncurrentVersionExpiration" in rule


def _facts(storage: Storage) -> tuple[str | None, str | None]:
    facts = getattr(storage, "facts", None)
    if facts is None:
        return None, None
    found = facts()
    return found.region or found.signing_region, found.endpoint


def _reach(walk: _Walk) -> str | None:
    for _ in walk.storage.list(walk.prefix):
        raise walk.wrong(walk.prefix, "lists objects under a prefix that was never used")
    return None


def _clock(walk: _Walk) -> str | None:
    storage = walk.storage
    ahead_s = round(time.time() - storage.now())
    if abs(ahead_s) > MAX_SKEW_S:
        side = "ahead of" if ahead_s > 0 else "behind"
        reason = f"this machine's clock is {abs(ahead_s)} s {side} the storage's"
        raise StorageError(storage.uri, reason, "set it by NTP (timedatectl set-ntp true)")
    return None


def _put(walk: _Walk) -> str | None:
    walk.storage.put(walk.small, b"0123456789")
    return None


def _get(walk: _Walk) -> str | None:
    storage = walk.storage
    got = storage.get(walk.small)
    walk.require(got == b"0123456789", walk.small, "what was put does not come back")
    walk.require(storage.size(walk.small) == 10, walk.small, "states a wrong size")
    same = holds(storage, walk.small, b"0123456789")
    walk.require(same, walk.small, "an upload that is repeated would not find it")
    other = holds(storage, walk.small, b"012345678?")
    walk.require(not other, walk.small, "states the checksum of other bytes")
    return None


def _parts(walk: _Walk) -> str | None:
    storage = walk.storage
    storage.put(walk.large, walk.content)
    size = storage.size(walk.large)
    walk.require(size == len(walk.content), walk.large, f"an upload in two parts has {size} bytes")
    return None


def _ranges(walk: _Walk) -> str | None:
    storage = walk.storage
    # At the start, across the border of the two parts, and at the end.
    ranges = [(0, 10), (PART_BYTES - 7, 20), (len(walk.content) - 5, 5)]
    for start, length in ranges:
        memory = bytearray(length)
        storage.get_into(walk.large, start, memoryview(memory))
        right = memory == walk.content[start : start + length]
        walk.require(right, walk.large, "a ranged read brings other bytes")

    with contextlib.suppress(ObjectTruncated):
        storage.get_into(walk.small, 5, memoryview(bytearray(10)))
        raise walk.wrong(walk.small, "a ranged read past the end brings bytes")
    return None


def _conditional_put(walk: _Walk) -> str | None:
    storage = walk.storage
    storage.put(walk.claimed, b"first", if_none_match=True)
    with contextlib.suppress(ObjectExists):
        storage.put(walk.claimed, b"second", if_none_match=True)
        raise walk.wrong(walk.claimed, "a conditional put overwrites: two drivers could own a run")

    kept = storage.get(walk.claimed) == b"first"
    walk.require(kept, walk.claimed, "a refused conditional put changed the object")
    # Only some storages have conditions that a server may not know.
    honours = getattr(storage, "honours_conditions", None)
    if honours is not None and not honours():
        return "the store does not honour If-None-Match; claims under 'claims/' take its place"
    return None


def _race(walk: _Walk) -> str | None:
    storage = walk.storage
    name = walk.prefix + "raced"

    def put(number: int) -> bool:
        try:
            storage.put(name, bytes([number]), if_none_match=True)
        except ObjectExists:
            return False
        return True

    with ThreadPoolExecutor(RACERS) as pool:
        outcomes = list(pool.map(put, range(RACERS)))
    won = [number for number, first in enumerate(outcomes) if first]
    walk.require(len(won) == 1, name, f"{len(won)} of {RACERS} concurrent conditional puts won")
    walk.require(storage.get(name) == bytes(won), name, "a loser's bytes stayed")
    return None


def _list(walk: _Walk) -> str | None:
    # By the beginning of a name, as a job lists its steps: directory buckets refuse that.
    walk.listed = list(walk.storage.list(walk.prefix.rstrip("/")))
    found = {info.name: info.size for info in walk.listed}
    expected = {walk.small: 10, walk.large: len(walk.content)}
    walk.require(expected.items() <= found.items(), walk.prefix, "a list lacks what was just put")

    names = [info.name for info in walk.listed]
    walk.require(names == sorted(set(names)), walk.prefix, "a list is not sorted by name")
    return None


def _modified(walk: _Walk) -> str | None:
    """Check `modified_s`, by which leases expire and old checkpoints are removed."""
    listed = {info.name: info.modified_s for info in walk.listed}
    walk.require(walk.small in listed, walk.prefix, "a list lacks what was just put")
    age_s = walk.storage.now() - listed[walk.small]
    most_s = time.monotonic() - walk.begun + MAX_SKEW_S
    reason = (
        f"a list says that an object was put {age_s:.0f} s ago by the storage's clock; it was put"
        f" within the last {most_s:.0f} s"
    )
    walk.require(-MAX_SKEW_S <= age_s <= most_s, walk.small, reason)
    return None


def _process(walk: _Walk) -> str | None:
    """Read in another process: workers get the storage as a pickle."""
    storage = walk.storage
    try:
        pickled = pickle.dumps(storage)
    except Exception as error:
        reason = f"cannot be pickled for a worker ({error})"
        remedy = "give its class a __reduce__ that opens it anew"
        raise StorageError(storage.uri, reason, remedy) from error

    command = [sys.executable, "-c", READ_ELSEWHERE]
    message = pickle.dumps((sys.path, pickled, walk.small))
    timeout_s = storage.options.request_timeout_s + START_TIMEOUT_S
    try:
        done = subprocess.run(
            command, input=message, capture_output=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        reason = f"another process has not read it within {timeout_s:.0f} s"
        raise walk.wrong(walk.small, reason) from None

    errors = done.stderr.decode(errors="replace").strip().splitlines()
    why = errors[-1] if errors else f"exit code {done.returncode}"
    walk.require(done.returncode == 0, walk.small, f"another process cannot read it ({why})")
    # Libraries may print to the same stream before.
    is_same = done.stdout.endswith(b"0123456789")
    walk.require(is_same, walk.small, "another process reads other bytes")
    return None


def _missing(walk: _Walk) -> str | None:
    storage = walk.storage
    name = walk.prefix + "missing"
    walk.require(storage.size(name) is None, name, "an object that was never put has a size")
    with contextlib.suppress(ObjectMissing):
        storage.get(name)
        raise walk.wrong(name, "an object that was never put can be read")
    return None


def _abort(walk: _Walk) -> str | None:
    storage = walk.storage
    name = walk.prefix + "aborted"
    with contextlib.suppress(_ReadFailed):
        storage.put(name, _Broken())
    beginning = walk.prefix.rstrip("/")
    storage.abort_uploads(beginning, older_than_s=-86400.0)
    left = storage.abort_uploads(beginning, older_than_s=-86400.0)
    walk.require(left == 0, name, "aborted uploads stay and cost money")
    walk.require(storage.size(name) is None, name, "an aborted upload shows")
    return None


def _names(walk: _Walk) -> str | None:
    storage = walk.storage
    special = ("a b", "a+b", "a%20b", "a#b?c&d=e", "ä", "a~!'()b")
    names = [walk.prefix + name for name in special]
    for name in names:
        storage.put(name, name.encode())
    for name in names:
        is_own = storage.get(name) == name.encode()
        walk.require(is_own, name, "is another object's name too")

    listed = {info.name for info in storage.list(walk.prefix)}
    walk.require(listed.issuperset(names), walk.prefix, "a list spells names otherwise")
    storage.delete(names)
    return None


def _overwrite(walk: _Walk) -> str | None:
    storage = walk.storage
    name = walk.prefix + "overwritten"
    for number in range(5):
        content = str(number).encode()
        storage.put(name, content)
        got = storage.get(name)
        walk.require(got == content, name, "a read after a put brings older bytes")
    return None


def _delete(walk: _Walk) -> str | None:
    storage = walk.storage
    names = [walk.small, walk.large, walk.claimed]
    storage.delete([*names, walk.prefix + "missing"])
    for name in names:
        walk.require(storage.size(name) is None, name, "a deleted object is still there")
    left = [info.name for info in storage.list(walk.prefix) if info.name in names]
    walk.require(not left, walk.prefix, "a list shows what was deleted")
    return None


_CHECKS = (
    _Check("reach", "credentials, region, certificate and bucket; list", _reach),
    _Check("put", "put an object", _put),
    _Check("get", "read it back", _get),
    _Check("parts", "upload an object in two parts", _parts),
    _Check("ranges", "read ranges of it", _ranges),
    _Check("conditional-put", "put only if the name is free", _conditional_put),
    _Check("list", "list what was put", _list),
    _Check("modified", "list times by the storage's own clock", _modified),
    _Check("missing", "tell a missing object from a refused one", _missing),
    _Check("abort", "abort an upload and list unfinished ones", _abort, required=False),
    _Check("clock", "compare this machine's clock", _clock, required=False),
    _Check("versions", "old versions of removed objects", _old_versions, required=False),
    _Check("overwrite", "read after overwriting", _overwrite, thorough=True),
    _Check("names", "names with special characters", _names, required=False, thorough=True),
    _Check("race", "one of several concurrent conditional puts wins", _race, thorough=True),
    _Check("process", "read in another process", _process, thorough=True),
    _Check("delete", "delete several objects at once", _delete),
)
