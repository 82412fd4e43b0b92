"""List, verify and copy durable checkpoints, export Hugging Face models, and check a storage."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from autohet.runtime.process.terminal import PlainConsole, visible
from planner.errors import ConfigError
from planner.inputs.documents import Document, Json
from recovery.checkpoint.errors import CheckpointMissing, LaterRelease, ManifestInvalid
from recovery.errors import RecoveryError
from recovery.storage.errors import BucketMissing, StoragePermissionDenied, StorageUriError

_USER_ERRORS = (
    ConfigError,
    StorageUriError,
    BucketMissing,
    StoragePermissionDenied,
    CheckpointMissing,
    LaterRelease,
)
"""Errors that the user can fix: exit code 2; all other failures are 1."""


PATIENCE_S = 300.0
"""Seconds of retries of a storage that throttles or fails: verifying takes hours."""
_COLUMNS: dict[str, tuple[Literal["left", "right"], int]] = {
    "step": ("right", 0),
    "committed": ("left", 0),
    "job": ("left", 0),
    "generation": ("right", 110),
    "model": ("left", 0),
    "eval loss": ("right", 0),
    "size": ("right", 0),
    "shards": ("right", 0),
    "files": ("right", 110),
}
"""Columns of a list, and the width of the terminal from which each is shown."""


DESCRIPTION = __doc__


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_action(actions, "list", "committed checkpoints, oldest first")
    verify = _add_action(
        actions, "verify", "read every shard and compare checksums (all checkpoints, or one)"
    )
    export = _add_action(
        actions,
        "export",
        "write a Hugging Face checkpoint that AutoModelForCausalLM.from_pretrained loads; of an"
        " adapter, a directory that peft loads",
    )
    copy = _add_action(
        actions,
        "copy",
        "copy one checkpoint and the job's history to another storage, checking each shard; run it"
        " while no driver uses either",
    )
    _add_action(
        actions,
        "check",
        "walk the whole path that checkpoints take in a storage; leaves nothing there",
    )
    _add_step(verify, default="all")
    step = _add_step(export.add_mutually_exclusive_group(), default="the newest")
    step.add_argument(
        "--best",
        action="store_true",
        help="the checkpoint with the lowest evaluation loss, which `list` marks",
    )
    _add_step(copy, default="the newest")
    copy.add_argument("--to", required=True, metavar="URI", help="the storage that gets the copy")
    _add_export_options(export)


def _add_action(actions: Any, name: str, summary: str) -> argparse.ArgumentParser:
    """Add an action with the options that all of them have."""
    action: argparse.ArgumentParser = actions.add_parser(name, help=summary, description=summary)
    action.add_argument(
        "--storage",
        required=True,
        metavar="URI",
        help="s3://bucket/prefix, file:// or a directory",
    )
    action.add_argument("--json", action="store_true", help="one JSON document on standard output")
    return action


def _add_step(action: Any, default: str) -> Any:
    """Add `--step` to an action or a group of its options, and return that."""
    action.add_argument(
        "--step",
        type=int,
        metavar="N",
        help=f"the step of one checkpoint (default: {default})",
    )
    return action


def _add_export_options(export: argparse.ArgumentParser) -> None:
    export.add_argument("--out", required=True, metavar="DIR", help="a new or empty directory")
    export.add_argument(
        "--dtype",
        default="float32",
        metavar="DTYPE",
        help="float32 (default), bfloat16 or float16",
    )
    export.add_argument(
        "--merge",
        action="store_true",
        help="of an adapter: write the whole model, its updates added to the base",
    )
    export.add_argument(
        "--base",
        metavar="DIR",
        help="with --merge: where the base lies (default: where the run read it)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the action; return the exit code. One line on standard error says what went wrong."""
    action = {
        "list": _list,
        "verify": _verify,
        "export": _export,
        "copy": _copy,
        "check": _check,
    }[args.action]
    try:
        result = action(args)
    except _USER_ERRORS as error:
        return _fail(args, error, 2)
    except (RecoveryError, OSError) as error:
        return _fail(args, error, 1)
    if args.json:
        print(json.dumps(result.document))
    else:
        result.show(PlainConsole())
    return 0 if result.ok else 1


def _fail(args: argparse.Namespace, error: Exception, code: int) -> int:
    print(visible(f"autohet checkpoint {args.action}: {error}"), file=sys.stderr)
    return code


@dataclass(frozen=True)
class _Result:
    """Result of an action: as a document, for a person, and true if all is well."""

    document: Document
    show: Callable[[Console], None]
    ok: bool = True


def _open(uri: str, option: str = "--storage") -> Any:
    # Here and not above, since torch takes a second to import: not for --help.
    from recovery.storage.address import DirectoryAddress, parse_address
    from recovery.storage.open import open_storage

    address = parse_address(uri)
    if isinstance(address, DirectoryAddress) and Path(address.path).is_file():
        raise ConfigError(
            f"{option} is {uri}, a file; name the directory that holds the checkpoints"
        )
    return open_storage(uri).patient(PATIENCE_S)


def _list(args: argparse.Namespace) -> _Result:
    """List the checkpoints.

    A checkpoint with a damaged manifest hides no other: it is listed apart, and the exit code is 1.
    """
    from autohet.control.values.evaluation_log import best_steps
    from recovery.checkpoint.commit import list_checkpoints, open_checkpoint

    storage = _open(args.storage)
    rows: list[Document] = []
    damaged = []
    for info in list_checkpoints(storage):
        try:
            rows.append(_row(info, open_checkpoint(storage, info.step)))
        except CheckpointMissing:
            # Retention removed it since it was listed.
            continue
        except ManifestInvalid as error:
            damaged.append({"step": info.step, "uri": info.uri, "problem": str(error)})
    losses = _losses(storage, {row["step"] for row in rows})
    best = best_steps(losses)[:1]
    for row in rows:
        row["evaluation_loss"] = losses.get(row["step"])
        row["is_best"] = row["step"] in best
    document = {"storage": storage.uri, "checkpoints": rows, "damaged": damaged}
    for item in damaged:
        print(visible(f"autohet checkpoint list: {item['problem']}"), file=sys.stderr)
    return _Result(document, lambda console: _show_list(console, storage.uri, rows), not damaged)


def _losses(storage: Any, steps: Collection[int]) -> dict[int, float]:
    """Return the evaluation losses of the committed checkpoints of these steps."""
    from autohet.driver.checkpoints.evaluation_losses import read_evaluations
    from recovery.checkpoint.commit import open_checkpoint

    if not steps:
        return {}
    newest = open_checkpoint(storage, max(steps))
    known = read_evaluations(storage, newest).losses
    return {step: loss for step, loss in known.items() if step in steps}


def _best_step(storage: Any) -> int:
    """Return the step of the checkpoint with the lowest evaluation loss."""
    from autohet.control.values.evaluation_log import best_steps
    from recovery.checkpoint.commit import list_checkpoints

    steps = {info.step for info in list_checkpoints(storage)}
    if not steps:
        raise CheckpointMissing(storage.uri, None)
    best = best_steps(_losses(storage, steps))
    if not best:
        raise ConfigError(
            f"--best: no checkpoint in {storage.uri} has an evaluation loss; leave --best out, or"
            " name one with --step"
        )
    return best[0]


def _row(info: Any, manifest: Any) -> Document:
    return {
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


def _show_list(console: Console, uri: str, rows: list[Document]) -> None:
    if not rows:
        console.print(f"No committed checkpoint in {uri}", soft_wrap=True)
        return
    console.print(
        f"Committed checkpoints in {uri}", soft_wrap=True, highlight=False, style="italic"
    )
    shown = [name for name, (_, least) in _COLUMNS.items() if least <= console.width]
    if all(row["evaluation_loss"] is None for row in rows):
        shown.remove("eval loss")
    table = Table(box=SIMPLE_HEAD)
    for name in shown:
        justify, _ = _COLUMNS[name]
        table.add_column(
            name,
            justify=justify,
            no_wrap=name != "job",
            overflow="fold",
            min_width=min(8, len(name)),
        )
    for row in rows:
        cells = {
            "step": str(row["step"]),
            "committed": time.strftime(
                "%Y-%m-%d %H:%M:%S", time.localtime(row["committed_unix_s"])
            ),
            "job": row["job"],
            "generation": str(row["generation"]),
            "model": row["model_type"] or "-",
            "eval loss": _loss(row),
            "size": _size(row["num_bytes"]),
            "shards": str(row["num_shards"]),
            "files": str(row["num_files"]),
        }
        table.add_row(*[cells[name] for name in shown])
    console.print(table)


def _loss(row: Json) -> str:
    loss = row["evaluation_loss"]
    if loss is None:
        return "-"
    return f"{'best ' if row['is_best'] else ''}{loss:.4f}"


def _verify(args: argparse.Namespace) -> _Result:
    from recovery.checkpoint.commit import list_checkpoints

    storage = _open(args.storage)
    steps = [args.step]
    if args.step is None:
        steps = [info.step for info in list_checkpoints(storage)]
    if not steps:
        raise CheckpointMissing(storage.uri, None)

    reports: list[Any] = []
    removed = []
    later = {}
    for step in steps:
        try:
            report = _verified(args, storage, step)
        except LaterRelease as error:
            # That is no damage, and hides none of the others.
            if step == steps[-1] and not reports:
                raise
            later[step] = str(error)
            continue
        if report is None:
            removed.append(step)
        else:
            reports.append(report)
    ok = all(report.ok for report in reports) and not later
    document = {
        "ok": ok,
        "checkpoints": [{**asdict(report), "ok": report.ok} for report in reports],
        "removed": removed,
        "not_verified": later,
    }

    def show(console: Console) -> None:
        for report in reports:
            what = f"step {report.step}: {report.num_shards} shards, {_size(report.num_bytes)}"
            if report.ok:
                console.print(f"{what}: all good", soft_wrap=True)
                continue
            count = len(report.problems)
            console.print(
                f"{what}: DAMAGED, {count} problem{'s' if count > 1 else ''}", soft_wrap=True
            )
            for problem in report.problems:
                console.print(f"  {problem}", soft_wrap=True)
        for step, reason in later.items():
            console.print(f"step {step}: not verified: {reason}", soft_wrap=True)

    return _Result(document, show, ok)


def _verified(args: argparse.Namespace, storage: Any, step: int) -> Any:
    """Verify one checkpoint; return its report.

    Returns None if all checkpoints are asked for and retention removed this one meanwhile. A
    damaged manifest is the checkpoint's only reported problem, and does not stop the others'
    verification.
    """
    from recovery.checkpoint.commit import checkpoint_uri
    from recovery.checkpoint.read import VerifyReport, verify

    try:
        with _progress(args, f"Verifying step {step}") as progress:
            return verify(storage, step, progress=progress)
    except CheckpointMissing:
        if args.step is not None:
            raise
        return None
    except LaterRelease:
        raise
    except ManifestInvalid as error:
        return VerifyReport(step, checkpoint_uri(storage, step), 0, 0, (str(error),))


def _export(args: argparse.Namespace) -> _Result:
    from autohet.runtime.state.export import ExportOptions, export_checkpoint
    from recovery.checkpoint.retention import reading_checkpoint
    from recovery.storage.address import DirectoryAddress, parse_address

    if args.base is not None and not args.merge:
        raise ConfigError("--base is for --merge alone: add it, or leave --base out")
    address = parse_address(args.out)
    if not isinstance(address, DirectoryAddress):
        raise ConfigError(
            f"--out is {args.out}, and an export is written to a directory; name one, then copy it"
            " there"
        )
    storage = _open(args.storage)
    step = _best_step(storage) if args.best else args.step
    with (
        reading_checkpoint(storage, step) as manifest,
        _progress(args, "Exporting") as progress,
    ):
        summary = export_checkpoint(
            storage,
            manifest,
            address.path,
            ExportOptions(dtype=args.dtype, merge=args.merge, base=args.base),
            progress,
        )
    line = (
        f"Step {summary.step} exported to {summary.directory}: {summary.num_tensors} tensors, "
        f"{_size(summary.num_bytes)} of {summary.dtype} in {len(summary.files)} file(s)"
    )
    return _Result(asdict(summary), lambda console: console.print(line, soft_wrap=True))


def _copy(args: argparse.Namespace) -> _Result:
    from autohet.runtime.state.model_files import prefixes_beside
    from recovery.checkpoint.commit import checkpoint_uri
    from recovery.checkpoint.copy import copy_checkpoint

    source = _open(args.storage)
    target = _open(args.to, "--to")
    with _progress(args, "Copying") as progress:
        manifest = copy_checkpoint(
            source, target, args.step, beside=prefixes_beside, progress=progress
        )
    uri = checkpoint_uri(target, manifest.step)
    document = {"step": manifest.step, "uri": uri, "num_bytes": manifest.num_bytes}
    line = f"Step {manifest.step} copied to {uri}: {_size(manifest.num_bytes)}"
    return _Result(document, lambda console: console.print(line, soft_wrap=True))


def _check(args: argparse.Namespace) -> _Result:
    from recovery.storage.conformance import check_conformance

    with closing(_open(args.storage)) as storage:
        report = check_conformance(storage, thorough=True)
    return _Result(report.document, lambda console: _show_checks(console, report), report.ok)


def _show_checks(console: Console, report: Any) -> None:
    table = Table(box=SIMPLE_HEAD)
    for column in ("check", "result", "what"):
        table.add_column(column, no_wrap=column != "what")
    for result in report.results:
        failed = "FAILED" if result.required else "warning"
        word = "ok" if result.ok else failed
        remarks = [text for text in (result.problem, result.remedy) if text]
        table.add_row(result.name, word, escape("; ".join(remarks) or result.what))
    console.print(table)
    place = f"region {report.region}, endpoint {report.endpoint}; " if report.endpoint else ""
    verdict = "fit for checkpoints" if report.ok else "not fit for checkpoints"
    console.print(f"{report.storage}: {place}{verdict}", soft_wrap=True, highlight=False)


@contextmanager
def _progress(args: argparse.Namespace, what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal's standard error; elsewhere nothing.

    There the result's own line is enough.
    """
    console = PlainConsole(stderr=True)
    columns = (
        TextColumn(what, markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
