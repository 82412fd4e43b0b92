"""Write the reference pages of the documentation: every key of a job and every command.

Both are read from the product itself, so they cannot drift from it.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import itertools
import os
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autohet.cli.main import COMMANDS, build_parser
from autohet.runtime.job import Job
from autohet.runtime.job.strict_document import key_of

JOB_PAGE = """# Every key of a job

A job is YAML, read strictly: an unknown key is an error that names it and the key that was
probably meant. This page is generated from the dataclasses in `autohet/runtime/job`.
"""
COMMANDS_PAGE = """# Commands

Every command has `--json`. Exit codes: 0 done, 1 the work failed, 2 the input is wrong.
This page is generated from the command line's own parsers.
"""


@dataclasses.dataclass(frozen=True)
class WrittenField:
    """A field as its source has it."""

    annotation: str
    docstring: str


def written_fields(cls: type) -> dict[str, WrittenField]:
    """Return annotation and docstring of each field of a dataclass, in order."""
    tree = ast.parse(inspect.getsource(cls))
    body = tree.body[0].body  # type: ignore[attr-defined]
    found = {}
    for statement, following in itertools.zip_longest(body, body[1:]):
        if not isinstance(statement, ast.AnnAssign):
            continue
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = " ".join(str(following.value.value).split())
        name = ast.unparse(statement.target)
        found[name] = WrittenField(ast.unparse(statement.annotation), text)
    return found


def default_text(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "required"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and f"-{os.getuid()}" in value:
        return value.replace(f"-{os.getuid()}", "-UID")
    return str(list(value)) if isinstance(value, tuple) else str(value)


def nested_dataclasses(annotation: Any) -> list[type]:
    """Return the dataclasses in a type, such as `tuple[str | SourceEntry, ...]`."""
    if inspect.isclass(annotation) and dataclasses.is_dataclass(annotation):
        return [annotation]
    found = [cls for part in typing.get_args(annotation) for cls in nested_dataclasses(part)]
    return list(dict.fromkeys(found))


def section_lines(cls: type, title: str) -> Iterator[str]:
    """Yield the section of one dataclass, and then those of the dataclasses in its fields."""
    yield f"\n## {title}\n"
    yield f"{inspect.getdoc(cls)}\n"
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    written = written_fields(cls)
    hints = typing.get_type_hints(cls)
    inner: dict[str, list[type]] = {}
    for field in dataclasses.fields(cls):
        inner[field.name] = nested_dataclasses(hints[field.name])
        meaning = written[field.name].docstring.replace("|", "\\|")
        kind = written[field.name].annotation.replace("|", "\\|")
        default = (
            "its defaults"
            if inner[field.name] and field_has_factory(field)
            else (f"`{default_text(field)}`")
        )
        yield f"| `{key_of(field.name)}` | `{kind}` | {default} | {meaning} |"
    for name, classes in inner.items():
        for nested in classes:
            path = name if title == "The document" else f"{title.strip('`')}.{name}"
            yield from section_lines(nested, f"`{path}`")


def field_has_factory(field: dataclasses.Field[Any]) -> bool:
    return field.default_factory is not dataclasses.MISSING


def job_page() -> str:
    return "\n".join([JOB_PAGE, *section_lines(Job, "The document")]) + "\n"


def parsers_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers_of(inner)


def commands_page() -> str:
    os.environ["COLUMNS"] = "100"
    lines = [COMMANDS_PAGE]
    for name in COMMANDS:
        whole = build_parser(name)
        commands = next(
            action for action in whole._actions if isinstance(action, argparse._SubParsersAction)
        )
        for parser in parsers_of(commands.choices[name]):
            depth = "#" * min(4, len(parser.prog.split()))
            lines.append(
                f"\n{depth} {parser.prog}\n\n```text\n{parser.format_help().rstrip()}\n```"
            )
    return "\n".join(lines) + "\n"


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.md").write_text(job_page())
    (folder / "commands.md").write_text(commands_page())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
