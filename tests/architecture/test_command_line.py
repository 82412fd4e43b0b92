"""The commands that others' scripts call are there, with the options that they use."""

import subprocess
import sys

import pytest

from autohet.cli.main import COMMANDS, build_parser, main

SURFACE = {
    "plan": [
        "--job",
        "--cluster",
        "--profile",
        "--links",
        "--strategy",
        "--compare",
        "--evaluate",
        "--calibrate",
        "--objective",
        "--max-usd-per-hour",
        "--out",
        "--trace-out",
        "--json",
    ],
    "train": ["--job", "--cluster", "--address", "--events", "--json"],
    "profile": ["--job", "--out"],
    "quote": ["--job", "--cluster", "--by", "--usd", "--trace", "--prices", "--json"],
    "simulate": ["--job", "--cluster", "--trace", "--json"],
    "bench": ["--json"],
    "checkpoint": ["--storage", "--json"],
    "status": ["--address", "--json"],
    "replay": ["--json"],
    "report": ["--events", "--out", "--json"],
    "sky": ["--job", "--cluster", "--region", "--json"],
}


def help_of(command, capsys):
    arguments = {
        "bench": ["bench", "planner", "--help"],
        "checkpoint": ["checkpoint", "list", "--help"],
    }.get(command, [command, "--help"])
    with pytest.raises(SystemExit) as ended:
        build_parser(command).parse_args(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", SURFACE)
def test_a_command_keeps_its_options(command, capsys):
    text = help_of(command, capsys)
    assert [option for option in SURFACE[command] if option not in text] == []


def test_no_command_was_dropped():
    assert set(SURFACE) <= set(COMMANDS)


def test_wrong_input_is_exit_code_2_and_one_message(tmp_path, capsys):
    assert main(["train", "--job", str(tmp_path / "none.yaml")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "none.yaml" in err
    assert "Traceback" not in err


def test_the_console_script_starts():
    run = subprocess.run(
        [sys.executable, "-m", "autohet.cli.main", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0
    assert all(command in run.stdout for command in COMMANDS)
