"""Single-byte flips, truncations and extensions of a small checkpoint, its manifest, metadata and
journal, and the judgement of what the package makes of each.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from recovery.checkpoint.commit import find_newest, list_checkpoints, open_checkpoint
from recovery.checkpoint.dcp import METADATA_NAME
from recovery.checkpoint.errors import LaterRelease
from recovery.checkpoint.journal import PREFIX, Journal, read_ancestry
from recovery.checkpoint.manifest import MANIFEST_NAME
from recovery.checkpoint.read import read_shards, verify
from recovery.checkpoint.retention import apply_retention
from recovery.checkpoint.write import step_prefix
from recovery.errors import RecoveryError
from recovery.state.ancestry import Descent
from recovery.state.layout import Layout, TensorSpec
from tests.harness.checkpoint_cases import commit as commit_case
from tests.harness.checkpoint_cases import full_state, write_all
from tests.harness.memory_storage import MemoryStorage

OLDER = 8
NEWEST = 12
GENERATION = 2
"""That `checkpoint_cases.commit` commits in."""
FLIPPED_BITS = (0x01, 0x20, 0x80)
"""Another digit or letter, another case, and no ASCII any more."""
EXTENSIONS = (b"\0", b" ", b"}", b"\xff", b"{}", bytes(64))


@dataclass(frozen=True)
class Damage:
    """One change of one object: `kind` (flip, truncation, extension) and where."""

    name: str
    kind: str
    at: int
    data: bytes


def small_storage() -> MemoryStorage:
    """Two checkpoints of two generations, and their journal."""
    specs = {
        "param/weight": TensorSpec("param/weight", (4, 3), "float32", 0, (0, 2, 4)),
        "param/scale": TensorSpec("param/scale", (), "float32", None, (0, 1)),
    }
    shards = frozenset(shard for spec in specs.values() for shard in spec.shards)
    layout = Layout(specs, {"a/0": shards})
    storage = MemoryStorage()
    journal = Journal(storage, "driver")
    journal.claim(Descent(generation=1, parent=None, first_step=0, driver="driver"))
    journal.claim(Descent(generation=GENERATION, parent=1, first_step=4, driver="driver"))
    for step in (OLDER, NEWEST):
        receipts = write_all(storage, step, layout, full_state(specs, step))
        commit_case(storage, step, layout, receipts)
    return storage


def damages(storage: MemoryStorage) -> Iterator[Damage]:
    """All of the newest checkpoint's objects and of the journal's."""
    for name, data in storage.objects.items():
        if not name.startswith((step_prefix(NEWEST), PREFIX)):
            continue
        for at in range(len(data)):
            for bit in FLIPPED_BITS:
                flipped = bytearray(data)
                flipped[at] ^= bit
                yield Damage(name, "flip", at, bytes(flipped))
            yield Damage(name, "truncation", at, data[:at])
        for number, more in enumerate(EXTENSIONS):
            yield Damage(name, "extension", number, data + more)


def sample(storage: MemoryStorage, count: int, seed: int = 0) -> list[Damage]:
    """`count` of all damages, each object and kind among them."""
    by_kind: dict[tuple[str, str], list[Damage]] = {}
    for damage in damages(storage):
        by_kind.setdefault((damage.name, damage.kind), []).append(damage)
    chosen = random.Random(seed)
    each = max(1, count // len(by_kind))
    return [
        damage
        for found in by_kind.values()
        for damage in chosen.sample(found, min(each, len(found)))
    ]


def require_named(error: RecoveryError, name: str = str(NEWEST)) -> None:
    """An error names the checkpoint, or the document, that is damaged."""
    assert name in str(error), error


class Judge:
    """Tries one damage after the other on copies of one storage, and counts the outcomes."""

    def __init__(self, storage: MemoryStorage) -> None:
        self._intact = dict(storage.objects)
        self._ancestry = read_ancestry(storage)
        self._manifest = open_checkpoint(storage, NEWEST)
        self._state = dict(read_shards(storage, self._manifest))
        self.outcomes: Counter[str] = Counter()

    def judge(self, damage: Damage) -> str:
        """`found` or `harmless`. Raises AssertionError where it is neither, and whatever else the
        package lets through.
        """
        storage = MemoryStorage()
        storage.objects = {**self._intact, damage.name: damage.data}
        try:
            found = self._is_found(storage, damage)
        except LaterRelease as error:  # a flipped digit of the version: loud, and nothing replaced
            require_named(error, damage.name)
            assert storage.objects == {**self._intact, damage.name: damage.data}
            found = True
        outcome = "found" if found else "harmless"
        self.outcomes[f"{self.part_of(damage)}: {damage.kind} {outcome}"] += 1
        return outcome

    def _is_found(self, storage: MemoryStorage, damage: Damage) -> bool:
        in_journal = damage.name.startswith(PREFIX)
        found = self._journal_found(storage) if in_journal else self._checkpoint_found(storage)
        self._check_newest(storage, damage)
        self._check_retention(storage, damage, found)
        return found

    @staticmethod
    def part_of(damage: Damage) -> str:
        if damage.name.startswith(PREFIX):
            return "journal"
        base = damage.name.rsplit("/", 1)[1]
        return base if base in (MANIFEST_NAME, METADATA_NAME) else "data"

    def _journal_found(self, storage: MemoryStorage) -> bool:
        ancestry = read_ancestry(storage)
        if ancestry.unknown:
            return True
        assert ancestry == self._ancestry, "a damaged entry says something else"
        return False

    def _checkpoint_found(self, storage: MemoryStorage) -> bool:
        assert [info.step for info in list_checkpoints(storage)] == [OLDER, NEWEST]
        open_checkpoint(storage, OLDER)  # what is wrong with one hides no other
        try:
            if not verify(storage, NEWEST).ok:
                return True
            manifest = open_checkpoint(storage, NEWEST)
        except RecoveryError as error:
            require_named(error)
            return True
        assert manifest == self._manifest, "a damaged manifest says something else"
        state = dict(read_shards(storage, manifest))
        assert state.keys() == self._state.keys()
        assert all(torch.equal(state[shard], self._state[shard]) for shard in state)
        return False

    def _check_newest(self, storage: MemoryStorage, damage: Damage) -> None:
        """An older step is never called the newest without a word."""
        newest = find_newest(storage, whole=True)
        assert newest.info is not None
        if newest.info.step != NEWEST:
            assert newest.damaged, "an older step is called the newest"
            assert str(NEWEST) in str(newest.damaged[0])
            assert not damage.name.startswith(PREFIX)
        try:
            assert open_checkpoint(storage).step == NEWEST
        except RecoveryError as error:
            require_named(error)

    def _check_retention(self, storage: MemoryStorage, damage: Damage, found: bool) -> None:
        """Nothing is removed while a manifest or an entry is unknown; the newest never is."""
        removal = apply_retention(storage, keep=1)
        assert NEWEST not in removal.removed_steps
        if found and self.part_of(damage) in ("journal", MANIFEST_NAME):
            assert removal.removed_steps == ()
            assert removal.unknown
            assert storage.objects == {**self._intact, damage.name: damage.data}
