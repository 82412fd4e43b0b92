"""Processor seconds of a checkpoint in a directory, in pairs over the same bytes.

    python -m scripts.benchmarks.recovery.checkpoint_costs [--mib 400] [--pairs 9] [--out FILE.json]
    python -m scripts.benchmarks.recovery.checkpoint_costs --s3 rclone --mib 64 [--out FILE.json]

Saving (`write_shards`, durable) stands beside `cp` and `sync` of the files that it wrote; reading
(`read_shards`, every shard checked) and `verify` beside plain reads of these files: into memory
that there is, new memory, or one buffer of 16 MiB, which is cheapest since it stays in the
processor's cache. The state is that of a Llama trained by AdamW, cut in two by rows. Both sides of
a pair run one after the other, in turns first; a ratio is the median of the pairs. User and system
time count, of the process and all its threads, or of the child. With `--s3`, saving to that server
in a process of its own stands beside boto3's `upload_fileobj` of the same files in memory, with
the same parts and requests at once; rows are added to FILE.json. SeaweedFS is set up for 640 MB in
all, which every save takes a part of.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from recovery.checkpoint.commit import CheckpointFacts, commit_checkpoint
from recovery.checkpoint.read import read_shards, verify
from recovery.checkpoint.write import CheckpointPart, step_prefix, write_shards
from recovery.state.layout import Layout, TensorSpec
from recovery.storage.open import open_storage
from scripts.benchmarks.provenance import provenance
from tests.harness.s3_stores import BUCKET, S3Store, rclone_store, seaweedfs_store

STORES = {"rclone": rclone_store, "seaweedfs": seaweedfs_store}
Rows = dict[str, dict[str, Any]]
READ_BYTES = 16 << 20


def llama_state(num_bytes: int, hidden: int = 1024) -> tuple[Layout, dict[str, torch.Tensor]]:
    """Return a layout of one worker and its state of at least `num_bytes` bytes, fp32."""
    shapes = {
        "attention": ((4 * hidden, hidden), 0),
        "output": ((hidden, hidden), 0),
        "up": ((5 * hidden, hidden), 0),
        "down": ((5 * hidden // 2, hidden), 0),
        "norm": ((hidden,), None),
    }
    specs: dict[str, TensorSpec] = {}
    state: dict[str, torch.Tensor] = {}
    total = 0
    layer = 0
    while total < num_bytes:
        for part, (shape, dim) in shapes.items():
            cuts = (0, 1) if dim is None else (0, shape[dim] // 2, shape[dim])
            for kind in ("param", "exp_avg", "exp_avg_sq"):
                name = f"{kind}/layers.{layer}.{part}"
                specs[name] = TensorSpec(name, shape, "float32", dim, cuts)
                state[name] = torch.randn(shape)
                total += state[name].nbytes
        layer += 1
    shards = frozenset(shard for spec in specs.values() for shard in spec.shards)
    return Layout(specs, {"n0/0": shards}), state


def own_seconds(action: Callable[[], object]) -> float:
    """Processor seconds of this process while `action` runs."""
    gc.collect()
    started = time.process_time()
    kept = action()
    took = time.process_time() - started
    del kept
    return took


def child_seconds(*commands: Sequence[str]) -> float:
    """Processor seconds of these commands, one after the other."""
    total = 0.0
    for command in commands:
        process = os.posix_spawnp(command[0], list(command), os.environ)
        _, status, usage = os.wait4(process, 0)
        if status:
            raise RuntimeError(f"{' '.join(command)} ended with status {status}")
        total += usage.ru_utime + usage.ru_stime
    return total


def _copy(source: Path, target: Path) -> float:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    files = sorted(source.glob("*.distcp"))
    copies = [str(target / file.name) for file in files]
    return child_seconds(["cp", *map(str, files), str(target)], ["sync", *copies])


def _read_reusing(folder: Path) -> None:
    buffer = bytearray(READ_BYTES)
    for path in sorted(folder.glob("*.distcp")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _read_into(folder: Path, memory: Sequence[memoryview]) -> None:
    """Read the files into this memory, of their size in all."""
    for path, target in zip(sorted(folder.glob("*.distcp")), memory, strict=True):
        with path.open("rb", buffering=0) as file:
            for start in range(0, len(target), READ_BYTES):
                file.readinto(target[start : start + READ_BYTES])


def _read_keeping(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("*.distcp"))]


def measure(directory: Path, num_bytes: int, num_pairs: int) -> dict[str, object]:
    storage = open_storage(str(directory / "job"))
    layout, state = llama_state(num_bytes)
    ids = layout.shards_by_worker["n0/0"]
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    receipt = write_shards(CheckpointPart(storage, 1, "n0/0"), state, layout, ids)
    facts = CheckpointFacts({}, {"model_type": "none"}, job="costs", generation=1)
    manifest = commit_checkpoint(storage, 1, layout, [receipt], facts)
    source = directory / "job" / step_prefix(1)

    def save() -> float:
        shutil.rmtree(directory / "job" / step_prefix(2), ignore_errors=True)
        part = CheckpointPart(storage, 2, "n0/0")
        return own_seconds(lambda: write_shards(part, state, layout, ids))

    def take_each() -> None:
        for _ in read_shards(storage, manifest):
            pass

    memory = {
        shard: memoryview(bytearray(layout.tensors[shard.tensor].unit_bytes(shard.unit)))
        for shard in ids
    }

    whole = [memoryview(bytearray(path.stat().st_size)) for path in sorted(source.glob("*.distcp"))]
    sides = {
        "save": (save, lambda: _copy(source, directory / "copy")),
        "read, each shard dropped": (
            lambda: own_seconds(take_each),
            lambda: own_seconds(lambda: _read_reusing(source)),
        ),
        "read, all kept": (
            lambda: own_seconds(lambda: list(read_shards(storage, manifest))),
            lambda: own_seconds(lambda: _read_keeping(source)),
        ),
        "read into given memory": (
            lambda: own_seconds(lambda: list(read_shards(storage, manifest, into=memory))),
            lambda: own_seconds(lambda: _read_into(source, whole)),
        ),
        "verify": (
            lambda: own_seconds(lambda: verify(storage, 1)),
            lambda: own_seconds(lambda: _read_reusing(source)),
        ),
    }
    return {"num_bytes": num_bytes, "rows": compare(sides, num_bytes, num_pairs)}


def compare(
    sides: Mapping[str, tuple[Callable[[], float], Callable[[], float]]],
    num_bytes: int,
    num_pairs: int,
) -> Rows:
    """Return a row of ratios for each name of a pair of actions that give their seconds."""
    rows: Rows = {}
    for name, (ours, bare) in sides.items():
        pairs = []
        for number in range(num_pairs):
            first = ours() if number % 2 else None
            beside = bare()
            pairs.append((ours() if first is None else first, beside))
        giga = num_bytes / 1e9
        rows[name] = {
            "ratio": round(statistics.median(a / b for a, b in pairs), 2),
            "ours_s_per_gb": round(statistics.median(a for a, _ in pairs) / giga, 3),
            "bare_s_per_gb": round(statistics.median(b for _, b in pairs) / giga, 3),
            "ratio_of_least": round(min(a for a, _ in pairs) / min(b for _, b in pairs), 2),
            "ratios": [round(a / b, 2) for a, b in pairs],
        }
        print(name, json.dumps(rows[name]), flush=True)
    return rows


def measure_s3(store: S3Store, directory: Path, num_bytes: int, num_pairs: int) -> Rows:
    import boto3
    from boto3.s3.transfer import TransferConfig

    os.environ.update(store.environment)
    storage = open_storage(store.uri)
    layout, state = llama_state(num_bytes, hidden=512)
    ids = layout.shards_by_worker["n0/0"]
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    write_shards(CheckpointPart(open_storage(str(directory)), 1, "n0/0"), state, layout, ids)
    files = {path.name: path.read_bytes() for path in (directory / step_prefix(1)).iterdir()}
    client = boto3.client("s3")
    part_bytes = storage.options.part_bytes
    options = TransferConfig(
        multipart_threshold=part_bytes,
        multipart_chunksize=part_bytes,
        max_concurrency=storage.options.concurrency,
    )

    def save() -> float:
        storage.delete([info.name for info in storage.list(step_prefix(1))])
        part = CheckpointPart(storage, 1, "n0/0")
        return own_seconds(lambda: write_shards(part, state, layout, ids))

    def transfer() -> None:
        for name, content in files.items():
            client.upload_fileobj(io.BytesIO(content), BUCKET, f"boto3/{name}", Config=options)

    return compare({"save": (save, lambda: own_seconds(transfer))}, num_bytes, num_pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=400)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--directory")
    parser.add_argument("--s3", choices=STORES)
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any]
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        if args.s3:
            folders = [Path(directory, name) for name in ("store", "files")]
            folders[0].mkdir()
            with STORES[args.s3](folders[0]) as store:
                rows = measure_s3(store, folders[1], args.mib << 20, args.pairs)
            found = json.loads(Path(args.out).read_text()) if args.out else {}
            found.setdefault("s3", {})[args.s3] = provenance() | {"mib": args.mib, "rows": rows}
        else:
            found = provenance() | measure(Path(directory), args.mib << 20, args.pairs)
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
