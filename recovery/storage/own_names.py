"""Names of objects that carry a checksum of themselves.

An object of such a name was put by this package, although none of its content may be there yet.
"""

import re
import zlib

_OWN = re.compile(r"^(.+)-([0-9a-f]{8})-([0-9a-f]{16})(\.[a-z]+)$")


def own_name(stem: str, digest: str, suffix: str) -> str:
    """Return `<stem>-<checksum>-<digest><suffix>`; `digest` has 16 hexadecimal digits."""
    return f"{stem}-{_checksum(stem, digest)}-{digest}{suffix}"


def is_own_name(name: str) -> bool:
    """Return True if the last part of an object's name was made by `own_name`."""
    last = name.rsplit("/", 1)[-1]
    match = _OWN.match(last)
    if match is None:
        return False
    stem, checksum, digest, _ = match.groups()
    return checksum == _checksum(stem, digest)


def _checksum(stem: str, digest: str) -> str:
    text = f"autohet {stem} {digest}"
    return f"{zlib.crc32(text.encode()):08x}"
