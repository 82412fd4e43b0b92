"""JSON documents from storage, whose bytes may be anything: one error for all that can be wrong."""

from typing import TypeVar

import msgspec

from recovery.errors import RecoveryError

T = TypeVar("T")


class DocumentDamaged(RecoveryError, ValueError):
    """The bytes are no document of the expected kind."""


def decode_json(data: bytes, kind: type[T]) -> T:
    """Decode `data` as a `kind` (a msgspec struct).

    Raises:
        DocumentDamaged: it is no JSON, no UTF-8, nested too deeply, or of another kind.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DocumentDamaged(str(error)) from error
