"""`--help` of every command says what it is for and what each option takes."""

import re
import tomllib
from pathlib import Path

import pytest

from autohet.cli.main import COMMANDS, main

ACTIONS = [
    ["checkpoint", "list"],
    ["checkpoint", "verify"],
    ["checkpoint", "export"],
    ["checkpoint", "copy"],
    ["bench", "planner"],
    ["bench", "recovery"],
    ["bench", "step"],
]


def _help(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--help"])
    assert stopped.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("arguments", [*([name] for name in COMMANDS), *ACTIONS], ids=" ".join)
def test_a_command_is_described_and_so_is_each_option(arguments, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = _help(arguments, capsys)
    _usage, description, *_ = text.split("\n\n")
    assert not description.startswith(("options:", "positional"))
    bare = [
        line for line in text.splitlines() if re.fullmatch(r"  (-\w, )?--[\w-]+( [A-Z]+)?", line)
    ]
    following = [text.split(line + "\n")[1].splitlines()[0] for line in bare]
    assert all(line.startswith(" " * 10) for line in following), bare


def test_the_program_says_its_version_and_its_exit_codes(capsys):
    assert "Exit codes" in _help([], capsys)
    with pytest.raises(SystemExit):
        main(["--version"])
    root = Path(__file__).parents[2]
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    assert capsys.readouterr().out == f"autohet {version}\n"
    changes = re.findall(r"^## \[(.*)\]", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changes[0] == version, "the version rises with the changelog"
