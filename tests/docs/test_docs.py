"""The documentation's jobs load, its commands parse, and its reference covers every key."""

import argparse
import contextlib
import dataclasses
import io
import re
import shlex
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from autohet.cli.main import build_parser
from autohet.runtime.job import Job
from autohet.runtime.models.families import BUILT_IN

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
WRITTEN = [page for page in PAGES if page.parent.name != "reference" or page.stem == "python"]
FENCE = re.compile(r"^ *```(\S+)?[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(page.read_text()) if kind == language]


def shell_lines(page: Path) -> list[list[str]]:
    """Return the words of each line of shell blocks."""
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines]


def commands(page: Path) -> list[list[str]]:
    """Return the arguments of each `autohet` command in shell blocks."""
    found = []
    for words in shell_lines(page):
        starts = [at for at, word in enumerate(words) if word == "autohet"]
        found += [words[at + 1 :] for at in starts]
    return found


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def test_the_docs_have_jobs_and_commands() -> None:
    """Wrong: a pattern of blocks that matches none, so that all tests below pass."""
    assert sum(len(blocks(page, "yaml")) for page in WRITTEN) >= 5
    assert sum(len(commands(page)) for page in WRITTEN) >= 10


@pytest.mark.parametrize("page", WRITTEN, ids=names(WRITTEN))
def test_every_job_in_the_docs_loads(page: Path) -> None:
    for text in blocks(page, "yaml"):
        document: Any = yaml.safe_load(text)
        if "model" in document and "training" in document:
            Job.from_document(document)


@pytest.mark.parametrize("page", WRITTEN, ids=names(WRITTEN))
def test_every_command_in_the_docs_parses(page: Path) -> None:
    for arguments in commands(page):
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                build_parser(arguments[0]).parse_args(arguments)
        except (SystemExit, argparse.ArgumentError):
            pytest.fail(f"autohet {shlex.join(arguments)}: {errors.getvalue()}")


@pytest.mark.parametrize("page", WRITTEN, ids=names(WRITTEN))
def test_every_file_that_a_command_names_exists(page: Path) -> None:
    for words in shell_lines(page):
        for word in words:
            if word.startswith(("cluster_configs/", "scripts/")):
                assert (ROOT / word).exists(), word


def test_the_reference_names_every_key_of_a_job(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "reference_pages.py"), str(tmp_path)],
        check=True,
        cwd=ROOT,
        timeout=120,
    )
    page = (tmp_path / "job.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `[^`]+` \| [^|]+ \| ", page, re.MULTILINE)
    hints = typing.get_type_hints(Job)
    sections = [hints["training"], hints["elastic"], *typing.get_args(hints["data"])[:1]]
    keys = {field.name for section in sections for field in dataclasses.fields(section)}
    assert keys <= set(rows)
    titles = re.findall(r"^## .*$", page, re.MULTILINE)
    assert sorted(titles) == sorted(set(titles)), "each section once"
    assert "## autohet train" in (tmp_path / "commands.md").read_text()


def test_the_list_of_built_in_families_is_complete() -> None:
    guide = (ROOT / "docs" / "guides" / "own_model.md").read_text()
    (listed,) = re.findall(r"transformers are built in: (.*?)\.\n", guide, re.DOTALL)
    assert re.findall(r"`(\w+)`", listed) == sorted(BUILT_IN)
