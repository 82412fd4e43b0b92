"""`autohet checkpoint list|verify|export`: look into durable checkpoints, check them, export Hugging Face models."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from planner.errors import ConfigError
from recovery.checkpoint_errors import CheckpointMissing
from recovery.errors import RecoveryError
from recovery.storage_errors import BucketMissing, StoragePermissionDenied, StorageUriError

_USER_ERRORS = (ConfigError, StorageUriError, BucketMissing, StoragePermissionDenied, CheckpointMissing)
"""What the user can put right: exit code 2; everything else that fails is 1."""


def add_parser(subparsers: Any) -> None:
    """Add `checkpoint` and its actions."""
    parser = subparsers.add_parser("checkpoint", help="list, verify or export checkpoints", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, summary in (
        ("list", "committed checkpoints, oldest first"),
        ("verify", "read every shard and compare checksums (all checkpoints, or one)"),
        ("export", "write a Hugging Face checkpoint that AutoModelForCausalLM.from_pretrained loads"),
    ):
        action = actions.add_parser(name, help=summary, description=summary)
        action.add_argument(
            "--storage", required=True, metavar="URI", help="s3://bucket/prefix, file:// or a directory"
        )
        action.add_argument("--json", action="store_true", help="one JSON document on standard output")
        if name != "list":
            action.add_argument("--step", type=int, metavar="N", help="default: newest (export), all (verify)")
        if name == "export":
            action.add_argument("--out", required=True, metavar="DIR", help="a new or empty directory")
            action.add_argument("--dtype", default="float32", metavar="DTYPE", help="float32, bfloat16 or float16")


def run(args: argparse.Namespace) -> int:
    """Run the action; returns the exit code. One line on standard error says what went wrong."""
    action = {"list": _list, "verify": _verify, "export": _export}[args.action]
    try:
        result = action(args)
    except _USER_ERRORS as error:
        return _fail(args, error, 2)
    except (RecoveryError, OSError) as error:
        return _fail(args, error, 1)
    if args.json:
        print(json.dumps(result.document))
    else:
        result.show(Console())
    return 0 if result.ok else 1


def _fail(args: argparse.Namespace, error: Exception, code: int) -> int:
    print(f"autohet checkpoint {args.action}: {error}", file=sys.stderr)
    return code


@dataclass(frozen=True)
class _Result:
    """What an action found: as a document, for a person, and whether all is well."""

    document: dict[str, Any]
    show: Callable[[Console], None]
    ok: bool = True


def _open(args: argparse.Namespace) -> Any:
    from recovery.storage import open_storage  # torch takes a second to import: not for --help

    return open_storage(args.storage)


def _list(args: argparse.Namespace) -> _Result:
    from recovery.checkpoint import list_checkpoints, open_checkpoint

    storage = _open(args)
    found = [(info, open_checkpoint(storage, info.step)) for info in list_checkpoints(storage)]
    rows = [
        {
            "step": info.step,
            "uri": info.uri,
            "job": manifest.job,
            "generation": manifest.generation,
            "committed_unix_s": info.committed_unix_s,
            "num_bytes": manifest.num_bytes,
            "num_shards": len(manifest.locations),
            "num_files": len(manifest.files),
            "model_type": manifest.model_config.get("model_type"),
            "created_by": manifest.created_by,
            "scalars": manifest.scalars,
        }
        for info, manifest in found
    ]
    return _Result(
        {"storage": storage.uri, "checkpoints": rows}, lambda console: _show_list(console, storage.uri, rows)
    )


def _show_list(console: Console, uri: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        console.print(f"No committed checkpoint in {uri}", soft_wrap=True)
        return
    table = Table(title=f"Committed checkpoints in {uri}", title_justify="left")
    for heading in ("step", "committed", "job", "generation", "model", "size", "shards", "files"):
        table.add_column(heading, justify="left" if heading in ("committed", "job", "model") else "right")
    for row in rows:
        committed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["committed_unix_s"]))
        facts = (row["step"], committed, row["job"], row["generation"], row["model_type"] or "-")
        table.add_row(*map(str, facts), _size(row["num_bytes"]), str(row["num_shards"]), str(row["num_files"]))
    console.print(table)


def _verify(args: argparse.Namespace) -> _Result:
    from recovery.checkpoint import list_checkpoints
    from recovery.checkpoint_read import verify

    storage = _open(args)
    steps = [args.step] if args.step is not None else [info.step for info in list_checkpoints(storage)]
    if not steps:
        raise CheckpointMissing(storage.uri, None)
    reports = []
    for step in steps:
        with _progress(args, f"Verifying step {step}") as progress:
            reports.append(verify(storage, step, progress=progress))
    ok = all(report.ok for report in reports)
    document = {"ok": ok, "checkpoints": [{**asdict(report), "ok": report.ok} for report in reports]}
    return _Result(document, lambda console: _show_reports(console, reports), ok)


def _show_reports(console: Console, reports: list[Any]) -> None:
    for report in reports:
        what = f"step {report.step}: {report.num_shards} shards, {_size(report.num_bytes)}"
        if report.ok:
            console.print(f"{what}: all good", soft_wrap=True)
            continue
        console.print(f"{what}: DAMAGED, {len(report.problems)} problems", soft_wrap=True)
        for problem in report.problems:
            console.print(f"  {problem}", soft_wrap=True)


def _export(args: argparse.Namespace) -> _Result:
    from autohet.runtime.export import export_checkpoint
    from recovery.retention import reading_checkpoint

    storage = _open(args)
    with reading_checkpoint(storage, args.step) as manifest, _progress(args, "Exporting") as progress:
        summary = export_checkpoint(storage, manifest, args.out, dtype=args.dtype, progress=progress)
    line = (
        f"Step {summary.step} exported to {summary.directory}: {summary.num_tensors} tensors, "
        f"{_size(summary.num_bytes)} of {summary.dtype} in {len(summary.files)} file(s)"
    )
    return _Result(asdict(summary), lambda console: console.print(line, soft_wrap=True))


@contextmanager
def _progress(args: argparse.Namespace, what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal's standard error; nothing elsewhere, where the result's own line is enough."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
