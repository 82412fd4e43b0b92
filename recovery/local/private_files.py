"""Private files of this user in directories with well-known names (/dev/shm, /tmp).

Another user of the machine may make such a directory first, or put links, pipes and forged files
into it. So directories are made with mode 0700, files with mode 0600. A foreign owner, a link and
anything that is no regular file are refused, and opening never follows a link or waits for a pipe.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

MAX_NOTE_BYTES = 64 << 20
"""Largest note that is read whole."""


def make_private_directory(path: Path | str) -> None:
    """Make `path` and its missing parents for this user alone.

    Raises:
        OSError: it cannot be made, or it is a link, another user's, or below another user's.
    """
    path = Path(os.path.abspath(path))
    for parent in [*reversed(path.parents), path]:
        if not os.path.lexists(parent):
            with suppress(FileExistsError):
                os.mkdir(parent, 0o700)
        is_last = parent == path
        status = os.lstat(parent)
        owners = {os.geteuid()} if is_last else {os.geteuid(), 0}
        if status.st_uid not in owners:
            raise PermissionError(
                f"{parent} belongs to user {status.st_uid}, not to this one ({os.geteuid()});"
                " remove it, or name another directory in the job's checkpoint section"
            )
        if is_last and not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(f"{parent} is a link or a file, not a directory of its own")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        os.chmod(path, 0o700)


def open_private(path: Path | str) -> int:
    """Open a file for reading and return its descriptor.

    Raises:
        OSError: it is absent, a link, no regular file, or another user's.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = "it is no regular file"
    elif status.st_uid != os.geteuid():
        problem = f"it belongs to user {status.st_uid}, not to this one ({os.geteuid()})"
    if problem is not None:
        os.close(descriptor)
        raise PermissionError(f"{path}: {problem}")
    return descriptor


def create_private(path: Path | str) -> int:
    """Create a new file for reading and writing and return its descriptor.

    What had this name (a link itself, not its target) is removed. Raises OSError.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


def read_note(path: Path | str) -> bytes:
    """Read a small file whole. Raises OSError as `open_private`, or where it is too long."""
    with open(open_private(path), "rb") as file:
        data = file.read(MAX_NOTE_BYTES + 1)
    if len(data) > MAX_NOTE_BYTES:
        raise OSError(f"{path} is longer than {MAX_NOTE_BYTES} bytes")
    return data


def write_note(path: Path, data: bytes) -> None:
    """Write a small file whole, in the place of an older one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(create_private(temporary), "wb") as file:
        file.write(data)
    os.replace(temporary, path)
