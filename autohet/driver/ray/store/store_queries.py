"""Queries of torch's TCPStore, carried out on the keys of one generation.

One function for each query: it reads the query's fields, whole, before it changes anything, and
returns the answer's bytes.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from autohet.driver.ray.store import store_messages as messages
from autohet.driver.ray.store.store_messages import INTEGER, WORD, BadMessage, Reader, pack_data

MAX_STORED_BYTES = 128 << 20
"""Maximum bytes of keys and values of one generation."""


class Client(Protocol):
    """Client whose query may have to wait for keys."""

    def send(self, data: bytes) -> None: ...


@dataclass
class Keys:
    """Keys of one generation, their size, and the clients that wait for keys."""

    values: dict[bytes, bytes] = field(default_factory=dict)
    num_bytes: int = 0
    waiting: dict[Client, set[bytes]] = field(default_factory=dict)

    def set(self, key: bytes, value: bytes) -> None:
        """Set a key and answer the clients for which it was the last one missing."""
        change = len(value)
        if key in self.values:
            change -= len(self.values[key])
        else:
            change += len(key)
        if self.num_bytes + change > MAX_STORED_BYTES:
            raise BadMessage(f"a generation's keys would pass {MAX_STORED_BYTES} bytes")
        self.values[key] = value
        self.num_bytes += change

        for client, missing in list(self.waiting.items()):
            missing.discard(key)
            if not missing:
                del self.waiting[client]
                client.send(messages.STOP_WAITING)

    def get(self, key: bytes) -> bytes:
        if key not in self.values:
            raise BadMessage(f"no key {key[:80]!r}")
        return self.values[key]

    def delete(self, key: bytes) -> bool:
        value = self.values.pop(key, None)
        if value is None:
            return False
        self.num_bytes -= len(key) + len(value)
        return True


def answer_query(client: Client, keys: Keys, reader: Reader) -> bytes:
    """Read one whole message, carry it out and return its answer; empty: no answer yet, or none.

    Raises:
        Incomplete: the message is not whole yet, nothing was changed. BadMessage.
    """
    query = reader.byte()
    carry_out = QUERIES.get(query)
    if carry_out is None:
        raise BadMessage(f"query {query} is not served")
    return carry_out(client, keys, reader)


def _validate(_: Client, __: Keys, reader: Reader) -> bytes:
    if reader.word() != messages.MAGIC:
        raise BadMessage("not a client of torch's TCPStore")
    return b""


def _ping(_: Client, __: Keys, reader: Reader) -> bytes:
    return WORD.pack(reader.word())


def _set(_: Client, keys: Keys, reader: Reader) -> bytes:
    key = reader.data()
    value = reader.data()
    keys.set(key, value)
    return b""


def _append(_: Client, keys: Keys, reader: Reader) -> bytes:
    key = reader.data()
    value = reader.data()
    keys.set(key, keys.values.get(key, b"") + value)
    return b""


def _compare_set(_: Client, keys: Keys, reader: Reader) -> bytes:
    key = reader.data()
    expected = reader.data()
    desired = reader.data()
    # As in torch: an empty expected value stands for a key that is not there, and the answer for
    # one that is neither there nor set is the expected value.
    present = keys.values.get(key)
    if present == expected or (present is None and not expected):
        keys.set(key, desired)
        return pack_data(desired)
    return pack_data(expected if present is None else present)


def _get(_: Client, keys: Keys, reader: Reader) -> bytes:
    key = reader.data()
    return pack_data(keys.get(key))


def _multi_get(_: Client, keys: Keys, reader: Reader) -> bytes:
    values = [keys.get(key) for key in reader.key_list()]
    return b"".join(pack_data(value) for value in values)


def _multi_set(_: Client, keys: Keys, reader: Reader) -> bytes:
    pairs: list[tuple[bytes, bytes]] = []
    num_pairs = reader.count()
    while len(pairs) < num_pairs:
        key = reader.data()
        value = reader.data()
        pairs.append((key, value))
    # Only now, since a message that is not whole yet may change nothing.
    for key, value in pairs:
        keys.set(key, value)
    return b""


def _add(_: Client, keys: Keys, reader: Reader) -> bytes:
    key = reader.data()
    amount = reader.integer()
    present = keys.values.get(key, b"0")
    try:
        total = int(present) + amount
        answer = INTEGER.pack(total)
    except (ValueError, struct.error):
        raise BadMessage("a sum of what is no number of 64 bits") from None
    keys.set(key, str(total).encode())
    return answer


def _check(_: Client, keys: Keys, reader: Reader) -> bytes:
    if all(key in keys.values for key in reader.key_list()):
        return messages.READY
    return messages.NOT_READY


def _wait(client: Client, keys: Keys, reader: Reader) -> bytes:
    missing = {key for key in reader.key_list() if key not in keys.values}
    if not missing:
        return messages.STOP_WAITING
    keys.waiting[client] = missing
    return b""


def _cancel_wait(client: Client, keys: Keys, _: Reader) -> bytes:
    keys.waiting.pop(client, None)
    return messages.WAIT_CANCELED


def _num_keys(_: Client, keys: Keys, __: Reader) -> bytes:
    return INTEGER.pack(len(keys.values))


def _delete(_: Client, keys: Keys, reader: Reader) -> bytes:
    key = reader.data()
    was_there = keys.delete(key)
    return INTEGER.pack(int(was_there))


QUERIES: dict[int, Callable[[Client, Keys, Reader], bytes]] = {
    messages.VALIDATE: _validate,
    messages.SET: _set,
    messages.COMPARE_SET: _compare_set,
    messages.GET: _get,
    messages.ADD: _add,
    messages.CHECK: _check,
    messages.WAIT: _wait,
    messages.NUM_KEYS: _num_keys,
    messages.DELETE_KEY: _delete,
    messages.APPEND: _append,
    messages.MULTI_GET: _multi_get,
    messages.MULTI_SET: _multi_set,
    messages.CANCEL_WAIT: _cancel_wait,
    messages.PING: _ping,
}
