"""Storage URIs, parsed: each names exactly one place, or is refused."""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from recovery.storage.errors import StorageUriError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/*)(.*)", re.DOTALL)
_LOGIN = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*:/+)[^/]*@")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_FORMS = "use s3://bucket/prefix, file:///directory or a directory path"


@dataclass(frozen=True)
class S3Address:
    """A bucket and a key prefix; the prefix has no slash at either end and is kept as written."""

    bucket: str
    prefix: str

    @property
    def local_path(self) -> str | None:
        """None: every machine sees the bucket."""
        return None


@dataclass(frozen=True)
class DirectoryAddress:
    """A directory path, decoded where it came from a file URI."""

    path: str

    @property
    def local_path(self) -> str:
        """Path on this machine; others see it only if its file system is shared."""
        return self.path


def parse_address(uri: str) -> S3Address | DirectoryAddress:
    """Parse `s3://bucket[/prefix]`, `file:///directory` or a plain directory path.

    Every character of an S3 prefix counts: `?`, `#` and `%` are part of the key, as S3 has them.
    Only one slash at the end is without effect.

    Raises:
        StorageUriError: names no storage, or would name another place than it says.
    """
    without_login = _LOGIN.sub(r"\1", uri)
    if without_login != uri:  # it may be a password, so it is not shown
        remedy = "leave it out; credentials come from a role, a profile or the environment"
        raise StorageUriError(
            without_login, "had a user or password before '@', which is no bucket name", remedy
        )
    if any("\ud800" <= character <= "\udfff" for character in uri):
        raise StorageUriError(repr(uri), "has bytes that are no UTF-8", "give another name")
    if _CONTROL.search(uri):
        raise StorageUriError(repr(uri), "has control characters", "remove them")
    found = _SCHEME.fullmatch(uri)
    if found is None:
        return _directory(uri, uri)
    scheme, slashes, rest = found.groups()
    if scheme.lower() not in ("s3", "file"):
        if slashes.startswith("//"):
            raise StorageUriError(uri, f"storage scheme {scheme!r} is not known", _FORMS)
        if slashes or scheme.lower() == "arn":
            raise StorageUriError(uri, "looks like a URI but is none", _FORMS)
        if len(scheme) == 1 and rest.startswith("\\"):
            raise StorageUriError(uri, "is a path of Windows", _FORMS)
        return _directory(uri, uri)
    if scheme not in ("s3", "file"):
        raise StorageUriError(uri, f"has the scheme {scheme!r}", "write it in lower case")
    if scheme == "file":
        return _file(uri, slashes, rest)
    return _s3(uri, slashes, rest)


def _s3(uri: str, slashes: str, rest: str) -> S3Address:
    if slashes == "///" or (slashes == "//" and not rest):
        raise StorageUriError(uri, "names no bucket", "write s3://bucket/prefix")
    if slashes != "//":
        raise StorageUriError(uri, "is no S3 URI", "write s3://bucket/prefix with two slashes")
    bucket, _, prefix = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        remedy = "write s3://bucket/prefix; for an access point give its alias, not its ARN"
        raise StorageUriError(uri, f"{bucket!r} is no bucket name", remedy)
    parts = prefix.split("/")
    if not parts[-1]:
        parts.pop()
    if not all(parts):
        raise StorageUriError(uri, "has an empty part between two slashes", "write one slash")
    if {".", ".."} & set(parts):
        raise StorageUriError(uri, "has '.' or '..' as part of a key", "write the key itself")
    prefix = "/".join(parts)
    if prefix != prefix.strip():
        raise StorageUriError(repr(uri), "begins or ends with a blank", "remove it")
    return S3Address(bucket, prefix)


def _file(uri: str, slashes: str, rest: str) -> DirectoryAddress:
    if slashes == "//" and not rest:
        raise StorageUriError(uri, "names no directory", "write file:///directory")
    if slashes == "//" and rest.startswith("localhost/"):
        slashes = "///"
        rest = rest.removeprefix("localhost/")
    if slashes != "///":
        remedy = "mount it and write file:///directory, or give a directory path"
        raise StorageUriError(uri, "names a host or a relative path", remedy)
    if "?" in rest or "#" in rest:
        remedy = "give the directory as a plain path, or write %3F and %23"
        raise StorageUriError(uri, "has a query or a fragment, which no directory has", remedy)
    if re.search("%(2f|00)", rest, re.IGNORECASE):
        raise StorageUriError(uri, "has an encoded slash or NUL", "give a plain path")
    try:
        path = unquote(rest, errors="strict")
    except UnicodeDecodeError:  # replacements would make one place of two
        remedy = "give the directory as a plain path"
        raise StorageUriError(uri, "has encoded bytes that are no UTF-8", remedy) from None
    return _directory(uri, "/" + path)


def _directory(uri: str, path: str) -> DirectoryAddress:
    if not path:
        raise StorageUriError(
            uri, "names no directory", "give a directory path or file:///directory"
        )
    if path != path.strip():
        raise StorageUriError(repr(uri), "begins or ends with a blank", "remove it")
    if path.startswith("$"):
        raise StorageUriError(uri, "begins with a variable, which nobody expands", "write the path")
    try:
        Path(path).expanduser()
    except RuntimeError:
        raise StorageUriError(uri, "names the home of an unknown user", "write ./~...") from None
    return DirectoryAddress(path)
