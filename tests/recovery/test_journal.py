"""One driver at a time, and one history: what a journal, its numbers and a lease promise to drivers
that know nothing of each other.
"""

import multiprocessing
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from recovery.checkpoint.commit import (
    CheckpointFacts,
    commit_checkpoint,
    find_newest,
    list_checkpoints,
    newest_checkpoint,
    open_checkpoint,
)
from recovery.checkpoint.errors import LeaseHeld, Superseded
from recovery.checkpoint.journal import (
    Journal,
    JournalUnreachable,
    encode_entry,
    entry_name,
    read_ancestry,
)
from recovery.checkpoint.lease import DriverLease, LeaseKeeper
from recovery.checkpoint.retention import apply_retention, remove_orphans
from recovery.state.ancestry import Ancestry, Descent
from recovery.storage.errors import StorageError
from recovery.storage.open import open_storage
from recovery.storage.protocol import ObjectInfo, Storage
from tests.harness.checkpoint_cases import full_state, state_specs, two_worker_layout, write_all


def entry(
    generation: int, driver: str = "a", parent: int | None = None, first_step: int = 0
) -> Descent:
    return Descent(generation=generation, parent=parent, first_step=first_step, driver=driver)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "storage"))


def commit(
    storage: Storage,
    step: int,
    generation: int,
    value: float = 0.0,
    ancestry: Ancestry | None = None,
) -> None:
    layout = two_worker_layout(state_specs())
    state = {name: tensor + value for name, tensor in full_state(layout.tensors).items()}
    receipts = write_all(storage, step, layout, state)
    known = ancestry or read_ancestry(storage)
    commit_checkpoint(
        storage,
        step,
        layout,
        receipts,
        CheckpointFacts({}, {}, generation=generation),
        ancestry=known,
    )


def test_a_number_belongs_to_one_driver(storage: Storage) -> None:
    Journal(storage, "a").claim(entry(1))
    with pytest.raises(Superseded, match="driver a has taken"):
        Journal(storage, "b").claim(entry(1, "b"))
    Journal(storage, "a").claim(entry(1))  # the answer to the first time was lost
    assert read_ancestry(storage).entries[1].driver == "a"


def test_a_driver_that_was_replaced_finds_out_whenever_it_looks(storage: Storage) -> None:
    old, new = Journal(storage, "a"), Journal(storage, "b")
    old.claim(entry(1))
    old.check()
    new.read()
    new.claim(entry(2, "b", 1, 5))
    with pytest.raises(Superseded, match="generation 2"):
        old.check()
    with pytest.raises(Superseded):
        old.claim(entry(2, "a", 1, 7))
    new.check()


def test_a_driver_whose_entries_are_forgotten_finds_out_too(storage: Storage) -> None:
    old, new = Journal(storage, "a"), Journal(storage, "b")
    old.claim(entry(1))
    new.claim(entry(2, "b", 1, 5))
    new.check()
    new.forget_before(2)
    with pytest.raises(Superseded):
        old.check()


def test_an_entry_that_could_not_be_put_is_put_later(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(storage, "a")
    with monkeypatch.context() as patch:
        patch.setattr(
            storage,
            "put",
            lambda *_, **__: (_ for _ in ()).throw(StorageError("here", "says nothing")),
        )
        with pytest.raises(StorageError):
            journal.claim(entry(1))
    assert 1 not in read_ancestry(storage).entries
    assert 1 in journal.check().entries


def test_a_damaged_entry_is_unknown_and_nobodys_history(storage: Storage) -> None:
    storage.put(entry_name(1), b"{")
    storage.put(entry_name(2), msgspec.json.encode(entry(3)))
    found = read_ancestry(storage)
    assert found.unknown == {1, 2}
    assert not found.contains(2, 1, 1)


def test_what_is_older_than_all_checkpoints_is_forgotten(storage: Storage) -> None:
    journal = Journal(storage, "a")
    for generation in (1, 2, 3):
        journal.claim(entry(generation, parent=generation - 1 or None))
    journal.forget_before(2)
    assert sorted(read_ancestry(storage).entries) == [2, 3]
    assert sorted(journal.check().entries) == [2, 3]


def test_where_all_checkpoints_are_kept_those_of_a_history_that_was_left_are_not(
    storage: Storage,
) -> None:
    Journal(storage, "a").claim(entry(1))
    for step in (1, 2, 3, 4, 12):
        commit(storage, step, 1)
    Journal(storage, "b").claim(entry(2, "b", 1, 5))
    commit(storage, 8, 2)
    assert apply_retention(storage, keep=None).removed_steps == (12,)
    assert [info.step for info in list_checkpoints(storage)] == [1, 2, 3, 4, 8]


def test_a_checkpoint_of_a_history_that_was_left_is_not_the_newest_and_makes_way(
    storage: Storage,
) -> None:
    """A driver that had been replaced committed step 12 of generation 1, after generation 2 had
    gone back to step 5.
    """
    Journal(storage, "a").claim(entry(1))
    commit(storage, 4, 1)
    commit(storage, 12, 1)
    Journal(storage, "b").claim(entry(2, "b", 1, 5))
    newest = newest_checkpoint(storage)
    assert newest is not None
    assert newest.step == 4
    commit(storage, 8, 2)
    apply_retention(storage, keep=1)
    assert [info.step for info in list_checkpoints(storage)] == [8], (
        "the one that was left is not kept instead"
    )
    commit(storage, 12, 1)
    commit(storage, 12, 2, value=1.0)
    assert open_checkpoint(storage, 12).generation == 2


def test_a_driver_that_stood_still_since_it_read_the_journal_leaves_a_newer_one_s_checkpoint(
    storage: Storage,
) -> None:
    Journal(storage, "a").claim(entry(1))
    known = read_ancestry(storage)
    Journal(storage, "b").claim(entry(2, "b", parent=1, first_step=5))
    commit(storage, 8, 2, value=1.0)
    with pytest.raises(Superseded, match="generation 2"):
        commit(storage, 8, 1, ancestry=known)
    assert open_checkpoint(storage, 8).generation == 2


def test_a_lease_that_is_renewed_refuses_another_driver_and_one_that_is_not_runs_out(
    storage: Storage,
) -> None:
    first, second = DriverLease(storage, 1.0), DriverLease(storage, 1.0)
    first.take()
    keeper = LeaseKeeper(first, lambda: None)
    try:
        with pytest.raises(LeaseHeld, match=first.driver):
            second.take()
        assert [info.name for info in storage.list("driver/")] == [first.name], (
            "who was refused leaves nothing"
        )
    finally:
        keeper.close()
    second.take()  # the first stands still: its lease is not written any more
    assert [info.name for info in storage.list("driver/")] == [second.name]
    second.release()
    assert not list(storage.list("driver/"))


def test_who_waits_for_anothers_lease_keeps_its_own(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    DriverLease(storage, 1.0).take()
    waiting, events, renew = DriverLease(storage, 1.0), list[str](), DriverLease.renew

    def pause(seconds: float) -> None:
        events.append("paused")
        time.sleep(seconds)

    def renewed(lease: DriverLease) -> None:
        events.append("renewed")
        renew(lease)

    monkeypatch.setattr(DriverLease, "renew", renewed)
    waiting.take(pause)
    assert len(events) > 2
    assert all(later == "renewed" for event, later in pairwise(events) if event == "paused")


def test_another_that_gives_up_while_it_is_looked_at_holds_nobody_up(storage: Storage) -> None:
    """It renewed its lease, and has released it between the list of leases and the look into this
    one.
    """
    mine, other = sorted(
        (DriverLease(storage, 2.0), DriverLease(storage, 2.0)), key=lambda lease: lease.name
    )
    other.renew()
    listed = mine.others

    def others() -> list[ObjectInfo]:
        found = [replace(info, modified_s=info.modified_s + 1) for info in listed()]
        other.release()
        return found

    def pause(seconds: float) -> None:
        mine.others = others  # type: ignore[method-assign]

    mine.take(pause)
    assert [info.name for info in storage.list("driver/")] == [mine.name]


class _AtOnce(DriverLease):
    """Looks for others only once both have put their lease."""

    def __init__(self, storage: Storage, both: threading.Barrier) -> None:
        super().__init__(storage, 2.0)
        self._both: threading.Barrier | None = both

    def renew(self) -> None:
        super().renew()
        both, self._both = self._both, None
        if both is not None:
            both.wait(20)


def test_of_two_drivers_that_start_at_once_one_gets_the_lease(storage: Storage) -> None:
    both = threading.Barrier(2)
    leases = sorted((_AtOnce(storage, both) for _ in range(2)), key=lambda lease: lease.name)
    with ThreadPoolExecutor(2) as pool:
        outcomes = [pool.submit(lease.take).exception for lease in leases]
        assert outcomes[0](20) is None
        assert isinstance(outcomes[1](20), LeaseHeld)
    assert [info.name for info in storage.list("driver/")] == [leases[0].name]
    keeper, late = LeaseKeeper(leases[0], lambda: None), DriverLease(storage, 2.0)
    late.driver = "0"
    try:
        with pytest.raises(LeaseHeld):  # whatever its name: that one has it
            late.take()
    finally:
        keeper.close()


def _take_and_die(uri: str) -> None:
    DriverLease(open_storage(uri), 60.0).take()
    os._exit(9)


def test_a_driver_that_died_on_this_machine_is_not_waited_for(storage: Storage) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=_take_and_die, args=(storage.uri,)
    )
    process.start()
    process.join(60)
    assert len(list(storage.list("driver/"))) == 1
    waits: list[float] = []
    DriverLease(storage, 60.0).take(pause=waits.append)
    assert waits == []


def test_a_process_id_that_was_given_again_is_another_process(storage: Storage) -> None:
    mine = DriverLease(storage, 60.0).holder
    assert not mine.is_dead
    assert msgspec.structs.replace(mine, started="1").is_dead
    assert not msgspec.structs.replace(mine, started="1", boot="another machine").is_dead


def test_the_owner_is_told_after_each_renewal(storage: Storage) -> None:
    lease, told = DriverLease(storage, 0.2), threading.Event()
    keeper = LeaseKeeper(lease, told.set)
    deadline = time.monotonic() + 20
    assert told.wait(deadline - time.monotonic())
    keeper.close()


def test_whatever_fails_in_the_thread_that_renews_it_goes_on(storage: Storage) -> None:
    lease, watched = DriverLease(storage, 0.2), threading.Event()
    failures = [AttributeError("an answer that nobody has thought of")]

    def watch() -> None:
        if failures:
            raise failures.pop()
        watched.set()

    lease.take()
    keeper = LeaseKeeper(lease, watch)
    try:
        assert watched.wait(20)
    finally:
        keeper.close()


def test_a_lease_is_as_old_as_it_was_when_it_was_seen(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage answers the one question, and stands at the other for longer than a lease: the
    first driver renews meanwhile.
    """
    first, second, now = DriverLease(storage, 15.0), DriverLease(storage, 15.0), storage.now
    first.take()

    def standing() -> float:
        first.renew()
        os.utime(Path(storage.uri, first.name), (now() + 20, now() + 20))
        return now() + 20

    monkeypatch.setattr(storage, "now", standing)
    second.renew()
    assert [info.name for info in second.others()] == [first.name]
    assert Path(storage.uri, first.name).exists()


def damage_entry(storage: Storage, generation: int, how: str) -> None:
    path = Path(storage.uri, entry_name(generation))
    if how == "lost":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    else:
        data = bytearray(path.read_bytes())
        at = data.index(b"first_step") + len(b"first_step") + 2
        data[at] ^= 1  # another number, and valid JSON
        path.write_bytes(data)


def three_generations(storage: Storage) -> None:
    """Generation 2 went back to step 5: what generation 1 committed at step 12 was left."""
    parents = ((1, None, 0), (2, 1, 5), (3, 2, 10))
    steps = {1: (4, 12), 2: (8,), 3: (16,)}
    journal = Journal(storage, "a")
    for generation, parent, first_step in parents:
        journal.claim(entry(generation, parent=parent, first_step=first_step))
        for step in steps[generation]:
            commit(storage, step, generation, value=generation)


@pytest.mark.parametrize("how", ["lost", "empty", "flipped"])
@pytest.mark.parametrize("generation", [1, 2, 3])
def test_while_an_entry_is_unknown_the_newest_is_right_and_nothing_is_removed(
    storage: Storage, generation: int, how: str
) -> None:
    three_generations(storage)
    damage_entry(storage, generation, how)
    before = sorted(info.name for info in storage.list("step-"))
    found = find_newest(storage)
    assert found.info is not None
    assert found.info.step == 16
    removal = apply_retention(storage, keep=1)
    assert removal.removed_steps == ()
    assert str(generation) in removal.unknown
    assert remove_orphans(storage, min_age_s=-60).unknown == removal.unknown
    assert sorted(info.name for info in storage.list("step-")) == before


def test_without_the_newest_checkpoint_that_of_the_highest_known_generation_is_the_newest(
    storage: Storage,
) -> None:
    """Step 12 is later, and of a history that generation 2 left; its entry is lost."""
    three_generations(storage)
    apply_retention(storage, keep=4)  # the left one goes while all is known
    commit(storage, 12, 1, ancestry=Ancestry())
    storage.delete(["step-00000016/manifest.json"])
    damage_entry(storage, 2, "lost")
    assert find_newest(storage).info is not None
    assert newest_checkpoint(storage).step == 8  # type: ignore[union-attr]


@pytest.mark.parametrize("how", ["lost", "empty", "flipped"])
def test_a_living_driver_puts_its_own_entries_again(
    storage: Storage, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, put = Journal(storage, "a"), storage.put
    journal.claim(entry(1))

    def put_and_damage(*arguments: Any, **named: Any) -> None:
        monkeypatch.setattr(storage, "put", put)
        put(*arguments, **named)
        damage_entry(storage, 2, how)

    monkeypatch.setattr(storage, "put", put_and_damage)
    journal.claim(entry(2, parent=1, first_step=4))
    assert journal.check().unknown == frozenset()
    assert read_ancestry(storage).entries[2].first_step == 4


def test_an_empty_mount_point_is_no_empty_storage(storage: Storage, tmp_path: Path) -> None:
    """The file system is away for a while, and an empty directory lies at its place: a generation
    begins meanwhile. Once it is back, what was claimed is in the journal, and its checkpoints are
    of the present history.
    """
    root, away = Path(storage.uri), tmp_path / "away"
    journal = Journal(storage, "a")
    journal.mark()
    journal.claim(entry(1))
    root.rename(away)
    root.mkdir()
    with pytest.raises(JournalUnreachable, match="mounted"):
        journal.claim(entry(2, parent=1, first_step=4))
    with pytest.raises(JournalUnreachable):
        journal.check()
    shutil.rmtree(root)
    away.rename(root)
    found = journal.check()
    assert found.unknown == frozenset()
    assert found.contains(2, 2, 8)
    assert read_ancestry(storage).entries.keys() == {1, 2}
    journal.unmark()
    assert not list(storage.list("driver/"))


def test_a_first_generation_that_was_claimed_on_an_empty_mount_point_is_claimed_again(
    storage: Storage, tmp_path: Path
) -> None:
    root, away = Path(storage.uri), tmp_path / "away"
    journal = Journal(storage, "a")
    journal.mark()
    root.rename(away)
    root.mkdir()
    with pytest.raises(JournalUnreachable):
        journal.claim(entry(1))
    shutil.rmtree(root)
    away.rename(root)
    assert journal.check().entries.keys() == {1}
    assert read_ancestry(storage).entries.keys() == {1}


def test_entries_without_a_checksum_are_read(storage: Storage) -> None:
    """Versions before this one wrote none."""
    storage.put(entry_name(1), msgspec.json.encode(entry(1)))
    assert read_ancestry(storage) == Ancestry({1: entry(1)})


def test_an_entry_that_does_not_say_whether_it_was_named_ahead_is_read(storage: Storage) -> None:
    document = msgspec.json.decode(encode_entry(entry(1)))
    assert document.pop("ahead") is False
    storage.put(entry_name(1), msgspec.json.encode(document))
    ahead = msgspec.structs.replace(entry(2, parent=1, first_step=7), ahead=True)
    Journal(storage, "a").claim(ahead)
    entries = read_ancestry(storage).entries
    assert [entries[number].ahead for number in (1, 2)] == [False, True]
    forged = encode_entry(ahead).replace(b'"ahead":true', b'"ahead":false')
    storage.put(entry_name(2), forged)
    assert 2 in read_ancestry(storage).unknown, "the checksum holds the mark"
