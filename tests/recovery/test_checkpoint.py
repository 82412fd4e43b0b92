"""A checkpoint is written once, committed last, read back checked, and is what stock PyTorch
loads.
"""

import copyreg
import io
import json
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from recovery.checkpoint.commit import (
    CheckpointFacts,
    CheckpointPart,
    checkpoint_uri,
    commit_checkpoint,
    list_checkpoints,
    newest_checkpoint,
    open_checkpoint,
    write_shards,
)
from recovery.checkpoint.errors import (
    CheckpointConflict,
    CheckpointCorrupt,
    CheckpointIncomplete,
    CheckpointMissing,
    ManifestInvalid,
)
from recovery.checkpoint.manifest import decode_manifest, encode_manifest
from recovery.checkpoint.read import plan_reads, read_shards, verify
from recovery.state.layout import ITEM_BYTES_BY_DTYPE, Layout, ShardId, TensorSpec, assign_writers
from recovery.storage.errors import StorageFull, StorageUnreachable
from recovery.storage.open import open_storage
from recovery.storage.protocol import Storage, StorageOptions
from tests.harness.checkpoint_cases import (
    commit,
    full_state,
    local_state,
    make_checkpoint,
    state_specs,
    two_worker_layout,
    write_all,
)
from tests.harness.faulty_storage import FaultyStorage, flips_a_byte, raises

STOCK_LOAD = """
import sys
sys.path[:] = [path for path in sys.path if path not in ("", {root!r})]
for name in ("recovery", "autohet", "planner"):
    sys.modules[name] = None  # importing it raises
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
torch.set_num_threads(1)
shapes = {shapes!r}
state = {{name: torch.full(shape, float("nan")) for name, shape in shapes.items()}}
dcp.load(state, storage_reader=dcp.FileSystemReader({path!r}), no_dist=True)
torch.save(state, {out!r})
dcp_to_torch_save({path!r}, {out!r} + ".converted")
"""


def test_stock_pytorch_loads_the_directory_without_this_package(
    directory: Storage, tmp_path: Path
) -> None:
    manifest, full = make_checkpoint(directory, 12)
    shapes = {name: spec.shape for name, spec in manifest.specs.items()}
    out, root = str(tmp_path / "loaded.pt"), str(Path(__file__).parents[2])
    code = STOCK_LOAD.format(root=root, shapes=shapes, path=checkpoint_uri(directory, 12), out=out)
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], check=True, timeout=100, cwd=tmp_path
    )
    for loaded in (torch.load(out), torch.load(out + ".converted")):
        assert loaded.keys() == full.keys()
        assert all(torch.equal(loaded[name], full[name]) for name in full)


@pytest.mark.parametrize("dtype", sorted(set(ITEM_BYTES_BY_DTYPE) - {"float32"}))
def test_every_dtype_comes_back_and_verifies_as_torch_load_sees_it(
    directory: Storage, dtype: str
) -> None:
    spec = TensorSpec("param/w", (6, 5), dtype, 1, (0, 2, 5))
    layout = Layout({spec.name: spec}, {"a/0": frozenset(spec.shards)})
    full = {spec.name: (torch.randn(6, 5) * 9).to(getattr(torch, dtype))}
    manifest = commit(directory, 1, layout, write_all(directory, 1, layout, full))
    for shard, unit in read_shards(directory, manifest):
        assert torch.equal(unit, full[spec.name][spec.unit_slices(shard.unit)])
    assert verify(directory, 1).problems == ()


def test_shards_come_back_equal_in_any_selection(storage: Storage) -> None:
    manifest, full = make_checkpoint(storage, 3)
    everything = dict(read_shards(storage, manifest))
    assert everything.keys() == manifest.shards
    for shard, unit in everything.items():
        assert torch.equal(
            unit, full[shard.tensor][manifest.specs[shard.tensor].unit_slices(shard.unit)]
        )
    some = [ShardId("param/layers.0.o_proj.weight", 1), ShardId("exp_avg/embed.weight", 2)]
    assert {shard for shard, _ in read_shards(storage, manifest, some)} == set(some)
    assert verify(storage, 3).ok
    with pytest.raises(KeyError):
        list(read_shards(storage, manifest, [ShardId("param/none", 0)]))


def test_manifest_carries_what_a_resume_needs(storage: Storage) -> None:
    make_checkpoint(storage, 5)
    manifest = open_checkpoint(storage)
    assert (manifest.step, manifest.generation, manifest.job) == (5, 2, "job")
    assert manifest.scalars == {"seed": 7, "next_row": 80, "learning_rate": 1e-3}
    assert manifest.model_config == {"model_type": "llama", "hidden_size": 8, "rope_scaling": None}
    assert manifest.num_bytes == sum(spec.num_bytes for spec in state_specs().values())
    assert manifest.specs == state_specs()


def test_without_its_manifest_a_checkpoint_does_not_exist(storage: Storage) -> None:
    make_checkpoint(storage, 1)
    layout = two_worker_layout(state_specs())
    write_all(storage, 2, layout, full_state(layout.tensors))
    assert [info.step for info in list_checkpoints(storage)] == [1]
    newest = newest_checkpoint(storage)
    assert newest is not None
    assert newest.step == 1
    with pytest.raises(CheckpointMissing, match=r"committed steps: 1$"):
        open_checkpoint(storage, 2)


def test_crash_between_data_and_manifest_then_retry_sends_no_data_again(directory: Storage) -> None:
    faulty = FaultyStorage(directory)
    faulty.fault("put", raises(StorageUnreachable("x", "crashed")), suffix="manifest.json")
    layout = two_worker_layout(state_specs())
    full = full_state(layout.tensors)
    with pytest.raises(StorageUnreachable):
        commit(faulty, 4, layout, write_all(faulty, 4, layout, full))
    assert newest_checkpoint(directory) is None
    sent = faulty.count("put", ".distcp")
    receipts = write_all(faulty, 4, layout, full)
    assert faulty.count("put", ".distcp") == sent == 2
    assert [(receipt.bytes_sent, receipt.bytes_present > 0) for receipt in receipts] == [
        (0, True),
        (0, True),
    ]
    commit(faulty, 4, layout, receipts)
    assert verify(directory, 4).ok


def test_crash_between_two_files_of_a_worker_resumes_at_the_second(directory: Storage) -> None:
    faulty = FaultyStorage(directory)
    faulty.fault("put", raises(StorageFull("x", "no space")), at=2, suffix=".distcp")
    layout = two_worker_layout(state_specs())
    state = local_state(layout, "a/0", full_state(layout.tensors))
    ids = assign_writers(layout)["a/0"]
    with pytest.raises(StorageFull):
        write_shards(CheckpointPart(faulty, 1, "a/0", 600), state, layout, ids)
    receipt = write_shards(CheckpointPart(faulty, 1, "a/0", 600), state, layout, ids)
    assert len(receipt.files) > 2
    assert receipt.bytes_present == receipt.files[0].num_bytes
    assert receipt.bytes_sent == sum(file.num_bytes for file in receipt.files[1:])


def test_changed_content_is_sent_under_another_name_and_never_over_the_old(
    directory: Storage,
) -> None:
    manifest, full = make_checkpoint(directory, 4)
    layout = two_worker_layout(state_specs())
    other = {name: tensor + 1 for name, tensor in full.items()}
    receipts = write_all(directory, 4, layout, other)
    assert all(receipt.bytes_sent > 0 for receipt in receipts)
    assert commit(directory, 4, layout, receipts) == manifest  # the first commit stands
    for shard, unit in read_shards(directory, manifest):
        assert torch.equal(
            unit, full[shard.tensor][manifest.specs[shard.tensor].unit_slices(shard.unit)]
        )
    assert verify(directory, 4).ok


def test_commit_names_what_is_missing_and_commits_nothing(directory: Storage) -> None:
    layout = two_worker_layout(state_specs())
    receipts = write_all(directory, 1, layout, full_state(layout.tensors))
    with pytest.raises(CheckpointIncomplete, match=r"param/.*\[1\]|exp_avg/.*\[1\]"):
        commit(directory, 1, layout, receipts[:1])
    directory.delete([f"step-00000001/{receipts[0].files[0].name}"])
    with pytest.raises(CheckpointIncomplete, match="distcp"):
        commit(directory, 1, layout, receipts)
    assert list_checkpoints(directory) == []


def test_commit_refuses_another_job_and_diverged_replicas(directory: Storage) -> None:
    layout = two_worker_layout(state_specs())
    full = full_state(layout.tensors)
    receipts = write_all(directory, 1, layout, full)
    norm = ShardId("param/layers.1.norm.weight", 0)
    diverged = {**full, norm.tensor: full[norm.tensor] + 1}
    twins = [
        write_shards(
            CheckpointPart(directory, 1, worker), local_state(layout, worker, state), layout, [norm]
        )
        for worker, state in (("a/0", full), ("b/0", diverged))
    ]
    with pytest.raises(CheckpointConflict, match="diverged"):
        commit(directory, 1, layout, receipts + twins)
    same = write_shards(
        CheckpointPart(directory, 1, "b/0"), local_state(layout, "b/0", full), layout, [norm]
    )
    commit(directory, 1, layout, [*receipts, same])  # equal copies are no conflict
    with pytest.raises(CheckpointConflict, match="'job', not 'other'"):
        commit(directory, 1, layout, receipts, job="other")
    other = TensorSpec("param/w", (2,), "float32")
    with pytest.raises(CheckpointConflict, match="has its model changed"):
        commit(directory, 1, Layout({other.name: other}, {}), [])


def test_of_two_coordinators_one_commits_and_both_agree(storage: Storage) -> None:
    layout = two_worker_layout(state_specs())
    states = [full_state(layout.tensors, seed) for seed in (1, 2)]
    receipts = [write_all(storage, 8, layout, state) for state in states]
    barrier = threading.Barrier(2)

    def race(number: int) -> Any:
        barrier.wait(10)
        return commit(storage, 8, layout, receipts[number])

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(race, range(2))
    assert first == second == open_checkpoint(storage, 8)
    assert verify(storage, 8).ok  # .metadata is the winner's too


def test_a_commit_overtaken_by_another_repairs_the_dcp_metadata(directory: Storage) -> None:
    layout = two_worker_layout(state_specs())
    ours, theirs = (
        write_all(directory, 8, layout, full_state(layout.tensors, seed)) for seed in (1, 2)
    )
    faulty = FaultyStorage(directory)

    def overtaken(name: str, call: Any) -> None:
        call()  # our .metadata lies over theirs, then their manifest comes first
        (Path(directory.uri) / "step-00000008" / "manifest.json").exists() or commit(
            directory, 8, layout, theirs
        )
        call()

    faulty.fault("put", overtaken, suffix=".metadata")
    stored = [stored for receipt in theirs for file in receipt.files for stored in file.shards]
    assert commit(faulty, 8, layout, ours).checksums == {
        item.shard: item.checksum for item in stored
    }
    assert verify(directory, 8).problems == ()


def test_a_byte_flipped_on_the_way_is_read_again(directory: Storage) -> None:
    manifest, full = make_checkpoint(directory, 3)
    faulty = FaultyStorage(directory)
    faulty.fault("get_into", flips_a_byte)
    for shard, unit in read_shards(faulty, manifest):
        assert torch.equal(
            unit, full[shard.tensor][manifest.specs[shard.tensor].unit_slices(shard.unit)]
        )
    assert faulty.count("get_into") == len(plan_reads(manifest, manifest.shards, 5 << 20)) + 1


@pytest.mark.parametrize("part_bytes", [100_000, 1 << 17, 200_001, 1 << 20])
def test_parts_and_pieces_of_any_size_are_put_together_and_checked(
    tmp_path: Path, part_bytes: int
) -> None:
    """Wrong: a part that ends within a block of the checksum has the digest of half a block; a
    shard whose first part is damaged passes by the digests of the others.
    """
    storage = open_storage(str(tmp_path), StorageOptions(part_bytes=part_bytes, concurrency=2))
    cuts = (0, 1, 301, 302, 332, 340)
    spec = TensorSpec("param/w", (340, 1000), "float32", 0, cuts)
    layout = Layout({spec.name: spec}, {"a/0": frozenset(spec.shards)})
    full = {spec.name: torch.randn(spec.shape)}
    manifest = commit(storage, 3, layout, write_all(storage, 3, layout, full))
    for into in (False, True):
        memory = {}
        if into:
            memory = {
                shard: memoryview(bytearray(spec.unit_bytes(shard.unit))) for shard in spec.shards
            }
        for shard, unit in read_shards(storage, manifest, into=memory):
            expected = full[spec.name][spec.unit_slices(shard.unit)]
            assert torch.equal(unit, expected)
            if into:
                assert bytes(memory[shard]) == expected.numpy().tobytes()
    assert verify(storage, 3).ok

    file, stored = manifest.locations[ShardId("param/w", 1)]
    for position in (stored.offset, stored.end - 1, stored.offset + 150_000):
        _damage(storage, file, position)
        with pytest.raises(CheckpointCorrupt, match=r"param/w\[1\]"):
            list(read_shards(storage, manifest))
        assert "param/w[1]" in verify(storage, 3).problems[0]
        _damage(storage, file, position)

    # Around the elements: only stock PyTorch would meet it.
    _damage(storage, file, stored.item_offset)
    assert len(list(read_shards(storage, manifest))) == len(spec.shards)
    assert "torch.load cannot read it" in verify(storage, 3).problems[0]


def _damage(directory: Storage, file: str, position: int) -> None:
    path = Path(directory.uri, "step-00000003", file)
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(data)


def test_a_byte_flipped_in_storage_is_never_used_and_named(directory: Storage) -> None:
    manifest, _ = make_checkpoint(directory, 3)
    shard = ShardId("param/embed.weight", 1)
    file, stored = manifest.locations[shard]
    _damage(directory, file, stored.offset + 5)
    with pytest.raises(CheckpointCorrupt, match=r"param/embed.weight\[1\]") as caught:
        list(read_shards(directory, manifest))
    assert caught.value.shard == shard
    others = manifest.shards - {shard}
    assert {found for found, _ in read_shards(directory, manifest, others)} == others
    report = verify(directory, 3)
    assert (
        [problem for problem in report.problems if "embed.weight[1]" in problem]
        == list(report.problems)
        != []
    )


def test_verify_sees_damage_that_only_stock_pytorch_would_meet(directory: Storage) -> None:
    manifest, _ = make_checkpoint(directory, 3)
    file, stored = manifest.locations[ShardId("param/embed.weight", 0)]
    _damage(
        directory, file, stored.item_offset + 1
    )  # the zip's magic number, before the raw elements
    assert len(list(read_shards(directory, manifest))) == len(manifest.shards)
    assert any("torch.load" in problem for problem in verify(directory, 3).problems)
    path = Path(directory.uri, "step-00000003", ".metadata")
    path.write_bytes(pickle.dumps(print))
    assert any("does not belong" in problem for problem in verify(directory, 3).problems)
    path.unlink()
    assert any("is missing" in problem for problem in verify(directory, 3).problems)


def test_metadata_that_early_python_3_11_wrote_is_good_and_its_getattr_gives_nothing_else(
    directory: Storage,
) -> None:
    """Python 3.11.0 to 3.11.3, Debian 12's among them, pickle members of an enum by `getattr`."""
    make_checkpoint(directory, 3)
    path = Path(directory.uri, "step-00000003", ".metadata")
    metadata, buffer = pickle.loads(path.read_bytes()), io.BytesIO()
    pickler = pickle.Pickler(buffer)
    by_name = {_MEM_FORMAT_ENCODING: lambda member: (getattr, (_MEM_FORMAT_ENCODING, member.name))}
    pickler.dispatch_table = copyreg.dispatch_table | by_name
    pickler.dump(metadata)
    assert b"getattr" in buffer.getvalue()
    path.write_bytes(buffer.getvalue())
    assert verify(directory, 3).problems == ()
    path.write_bytes(
        buffer.getvalue().replace(b"TORCH_CONTIGUOUS_FORMAT", b"__init_subclass_______x")
    )
    assert any(".metadata is damaged" in problem for problem in verify(directory, 3).problems)


def test_a_truncated_data_file_is_corrupt_not_endless(storage: Storage) -> None:
    manifest, _ = make_checkpoint(storage, 3)
    file = manifest.files[0]
    name = f"step-00000003/{file.name}"
    storage.put(name, storage.get(name)[: file.num_bytes // 2])
    with pytest.raises(CheckpointCorrupt):
        list(read_shards(storage, manifest))
    storage.delete([name])
    assert len(verify(storage, 3).problems) == 1 + len(file.shards), "the file, and each shard"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda document: {**document, "extra": 1}, "extra"),
        (lambda document: {**document, "version": 9}, "version 9"),
        (lambda document: {**document, "format": "other"}, "format 'other'"),
        (lambda document: {**document, "step": 4}, "checksum"),
        (lambda document: {key: value for key, value in document.items() if key != "job"}, "job"),
    ],
)
def test_a_damaged_or_foreign_manifest_is_refused_by_name(
    directory: Storage, change: Any, message: str
) -> None:
    manifest, _ = make_checkpoint(directory, 3)
    path = Path(directory.uri, "step-00000003", "manifest.json")
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ManifestInvalid, match=message):
        open_checkpoint(directory, 3)
    with pytest.raises(ManifestInvalid):
        decode_manifest(encode_manifest(manifest)[:-50], "truncated")
    lost = msgspec.structs.replace(manifest, files=manifest.files[:1])
    with pytest.raises(ManifestInvalid, match="have no place"):
        decode_manifest(encode_manifest(lost), "lost")


@pytest.mark.parametrize(
    "item", [{"item_bytes": 1 << 40}, {"item_bytes": 1}, {"item_bytes": -1}, {"num_bytes": -4}]
)
def test_an_item_reaches_around_its_elements_and_not_beyond_its_file(
    directory: Storage, item: dict[str, int]
) -> None:
    """A reader reserves memory for what a manifest says."""
    manifest, _ = make_checkpoint(directory, 3)
    file = manifest.files[0]
    wrong = msgspec.structs.replace(
        file, shards=(msgspec.structs.replace(file.shards[0], **item), *file.shards[1:])
    )
    data = encode_manifest(msgspec.structs.replace(manifest, files=(wrong, *manifest.files[1:])))
    with pytest.raises(ManifestInvalid, match=r"outside of|wrong size"):
        decode_manifest(data, "here")


def test_an_item_is_hardly_larger_than_its_elements_however_large_its_file_is_said_to_be(
    directory: Storage,
) -> None:
    manifest, _ = make_checkpoint(directory, 3)
    *others, last = manifest.files[0].shards
    shards = (*others, msgspec.structs.replace(last, item_bytes=1 << 40))
    wrong = msgspec.structs.replace(manifest.files[0], num_bytes=1 << 42, shards=shards)
    data = encode_manifest(msgspec.structs.replace(manifest, files=(wrong, *manifest.files[1:])))
    with pytest.raises(ManifestInvalid, match=f"has {1 << 40} bytes"):
        decode_manifest(data, "here")


def test_neighbours_are_read_with_one_request_and_large_shards_alone(directory: Storage) -> None:
    manifest, _ = make_checkpoint(directory, 3)
    assert len(plan_reads(manifest, manifest.shards, span_bytes=1 << 20)) == len(manifest.files)
    alone = plan_reads(manifest, manifest.shards, span_bytes=1)
    assert [span.shards[0].shard for span in alone] == sorted(manifest.shards), (
        "in their order, not file by file"
    )
    assert len(manifest.files) > 1
    assert sum(span.end - span.start for span in alone) == manifest.num_bytes
    assert len(plan_reads(manifest, manifest.shards, span_bytes=1 << 20, gap_bytes=0)) > len(
        manifest.files
    )


def test_read_ahead_is_bounded(directory: Storage) -> None:
    spec = TensorSpec(
        "param/w", (64, 1 << 14), "float32", 0, tuple(range(65))
    )  # 64 units of 64 KiB
    layout = Layout({spec.name: spec}, {"a/0": frozenset(spec.shards)})
    manifest = commit(
        directory, 1, layout, write_all(directory, 1, layout, {spec.name: torch.zeros(spec.shape)})
    )
    faulty = FaultyStorage(directory)
    faulty_options = type(directory.options)(part_bytes=64 << 10, concurrency=2)
    faulty.__class__ = type(
        "Small", (FaultyStorage,), {"options": property(lambda self: faulty_options)}
    )
    reader = read_shards(faulty, manifest, max_memory_bytes=256 << 10)
    next(reader)
    reader.close()
    assert faulty.count("get_into") <= 5  # four units of read-ahead, and the one that was taken


def test_memory_of_shards_that_are_dropped_serves_later_ones_and_kept_ones_stay(
    directory: Storage,
) -> None:
    spec = TensorSpec("param/w", (64, 1 << 10), "float32", 0, tuple(range(65)))
    layout = Layout({spec.name: spec}, {"a/0": frozenset(spec.shards)})
    full = {spec.name: torch.randn(spec.shape)}
    manifest = commit(directory, 1, layout, write_all(directory, 1, layout, full))
    kept: dict[ShardId, torch.Tensor] = {}
    places: set[int] = set()
    one_by_one = open_storage(directory.uri, StorageOptions(part_bytes=4096, concurrency=1))
    for number, (shard, unit) in enumerate(read_shards(one_by_one, manifest)):
        places.add(unit.data_ptr())
        if number % 4 == 0:
            kept[shard] = unit
        del unit
    assert len(kept) <= len(places) <= len(kept) + 4, "each shard had new memory"
    for shard, unit in kept.items():
        assert torch.equal(unit, full[spec.name][spec.unit_slices(shard.unit)])


@settings(max_examples=30)
@given(st.data())
def test_every_held_shard_has_one_writer_that_holds_it_and_bytes_are_balanced(
    data: st.DataObject,
) -> None:
    num_workers = data.draw(st.integers(1, 6))
    workers = [f"n{index // 2}/{index % 2}" for index in range(num_workers)]
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=12))
    specs = {
        f"param/{i}": TensorSpec(f"param/{i}", (size,), "float32") for i, size in enumerate(sizes)
    }
    shards = [shard for spec in specs.values() for shard in spec.shards]
    held = {worker: frozenset(data.draw(st.sets(st.sampled_from(shards)))) for worker in workers}
    layout = Layout(specs, held)
    written = assign_writers(layout, {worker: worker.split("/")[0] for worker in workers})
    flat = [shard for ids in written.values() for shard in ids]
    assert sorted(flat) == sorted(set().union(*held.values()))
    assert all(ids <= held[worker] for worker, ids in written.items())
    everywhere = assign_writers(Layout(specs, dict.fromkeys(workers, frozenset(shards))))
    loads = [sum(specs[shard.tensor].num_bytes for shard in ids) for ids in everywhere.values()]
    assert max(loads) <= sum(loads) / num_workers + 4 * max(
        sizes
    )  # Graham's bound for list scheduling


def test_a_nodes_link_counts_before_its_workers() -> None:
    specs = {f"param/{i}": TensorSpec(f"param/{i}", (8,), "float32") for i in range(8)}
    everything = frozenset(shard for spec in specs.values() for shard in spec.shards)
    nodes = {"big/0": "big", "big/1": "big", "big/2": "big", "small/0": "small"}
    written = assign_writers(Layout(specs, dict.fromkeys(nodes, everything)), nodes)
    assert len(written["small/0"]) == 4


def test_commit_is_refused_for_state_that_nobody_holds(directory: Storage) -> None:
    specs = state_specs()
    with pytest.raises(CheckpointIncomplete):
        commit_checkpoint(directory, 1, Layout(specs, {}), [], CheckpointFacts({}, {}))


def test_whoever_keeps_the_error_of_a_read_keeps_no_threads(directory: Storage) -> None:
    manifest, _ = make_checkpoint(directory, 4)
    file = manifest.files[0]
    path = Path(checkpoint_uri(directory, 4), file.name)
    data = bytearray(path.read_bytes())
    data[file.shards[0].offset] ^= 1
    path.write_bytes(data)
    threads = set(threading.enumerate())
    with pytest.raises(CheckpointCorrupt) as caught:
        list(read_shards(directory, manifest))
    assert caught.value.__traceback__ is not None
    assert set(threading.enumerate()) <= threads
