"""Storing `.metadata`, which stock PyTorch reads, without replacing one that is not ours."""

import logging

from recovery.checkpoint.dcp import METADATA_NAME, dcp_metadata_problem, encode_dcp_metadata
from recovery.checkpoint.errors import CheckpointConflict
from recovery.checkpoint.manifest import Manifest
from recovery.checkpoint.ownership import is_own_metadata
from recovery.checkpoint.write import step_prefix
from recovery.storage.errors import ObjectExists, ObjectMissing
from recovery.storage.protocol import Storage

logger = logging.getLogger(__name__)


def offer_metadata(storage: Storage, manifest: Manifest) -> bool:
    """Put `.metadata` before the commit, if there is none; return False if there is one of ours.

    That one may be of a committed checkpoint: only `correct_metadata` replaces it.

    Raises:
        CheckpointConflict: there is one that is not ours.
    """
    name = step_prefix(manifest.step) + METADATA_NAME
    try:
        storage.put(name, encode_dcp_metadata(manifest), if_none_match=True)
    except ObjectExists:
        if is_own_metadata(storage.get(name)):
            return False
        reason = f"{name} is of another program; move that checkpoint elsewhere"
        raise CheckpointConflict(storage.uri, manifest.step, reason) from None
    return True


def correct_metadata(storage: Storage, committed: Manifest) -> None:
    """Make `.metadata` that of a committed manifest; one that is not ours stays, which is logged.

    A coordinator that died, or lost against another one, may have left another one of ours.
    """
    name = step_prefix(committed.step) + METADATA_NAME
    try:
        found = storage.get(name)
    except ObjectMissing:
        pass
    else:
        problem = dcp_metadata_problem(found, committed)
        if not problem:
            return
        if not is_own_metadata(found):
            logger.warning("%s/%s %s, and stays: it is not ours", storage.uri, name, problem)
            return
    storage.put(name, encode_dcp_metadata(committed))
