"""Scripts of `scripts/aws`, as a user starts them but in this process, which has imported boto3."""

import functools
import io
import os
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

import boto3
import botocore.session
from botocore.loaders import create_loader

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "aws"
load_once = functools.cache(create_loader)
"""Loader of API descriptions, which keeps them: to read EC2's takes longer than most scripts."""


def run_script(name: str, *arguments: str, **environment: str) -> CompletedProcess[str]:
    """Run a script with more variables in its environment; an error that it lets through is the
    caller's.
    """
    path = str(SCRIPTS / name)
    out = io.StringIO()
    err = io.StringIO()
    with (
        patch.dict(os.environ, environment),
        patch.object(sys, "argv", [path, *arguments]),
        patch.object(boto3, "DEFAULT_SESSION", None),  # it remembers another test's credentials
        patch.object(botocore.session, "create_loader", load_once),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            runpy.run_path(path, run_name="__main__")
            code = 0
        except SystemExit as ended:
            code = _exit_code(ended.code)
    return CompletedProcess([path, *arguments], code, out.getvalue(), err.getvalue())


def _exit_code(code: str | int | None) -> int:
    """Return what the interpreter would exit with, and print what it would print."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
        return 1
    return code or 0
