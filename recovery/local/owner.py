"""Ownership of a node's snapshot directories, and removal of those whose owner is dead.

A note in each directory names the owner: a process (a node's raylet) without which the directory is
of no use. If it is not known whether the owner lives, the directory stays.
"""

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

import msgspec

from recovery.documents import DocumentDamaged, decode_json
from recovery.local.private_files import make_private_directory, read_note, write_note
from recovery.local.snapshot_file import has_writer
from recovery.local.snapshot_format import SUFFIX
from recovery.process_identity import ProcessIdentity, boot_id, process_start

logger = logging.getLogger(__name__)

NOTE = "owner.json"


def claim_directory(directory: Path | str, process_id: int) -> None:
    """Make the directory, owned by this process from now on. Raises OSError."""
    make_private_directory(directory)
    started = process_start(process_id)
    if not started:
        raise ProcessLookupError(f"process {process_id} is not running")
    owner = ProcessIdentity(boot=boot_id(), process_id=process_id, started=started)
    write_note(Path(directory, NOTE), msgspec.json.encode(owner))


def remove_ownerless(root: Path | str) -> list[Path]:
    """Remove the directories of dead owners in which no process writes; return them.

    They are two levels below `root`, one for each run and node.
    """
    removed = []
    for note in sorted(Path(root).glob(f"*/*/{NOTE}")):
        directory = note.parent
        try:
            owner = decode_json(read_note(note), ProcessIdentity)
        except (OSError, DocumentDamaged):
            continue
        if not owner.is_dead or any(has_writer(path) for path in directory.glob(f"*{SUFFIX}")):
            continue
        shutil.rmtree(directory, ignore_errors=True)
        with suppress(OSError):  # other nodes of the run have theirs there
            directory.parent.rmdir()
        removed.append(directory)
        logger.info("Removed %s: the node that kept snapshots there is gone", directory)
    return removed


def ancestor_named(name: str, process_id: int | None = None) -> int | None:
    """Return the nearest ancestor of `process_id` (this process when None) with this name.

    None if there is none.
    """
    found = os.getppid() if process_id is None else process_id
    for _ in range(64):
        if found <= 1:
            return None
        try:
            text = Path(f"/proc/{found}/stat").read_text()
        except OSError:
            return None
        if text[text.index("(") + 1 : text.rindex(")")] == name:
            return found
        found = int(text.rpartition(")")[2].split()[1])
    return None
