"""Errors of AWS and of files, as the sentences with which the scripts of `scripts/aws` end."""

from __future__ import annotations

import sys
from collections.abc import Callable

import yaml
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
    TokenRetrievalError,
)

from planner.errors import ConfigError

LOG_IN = "log in (aws configure, or aws sso login), and try again"


def run_script(name: str, main: Callable[[], int | None]) -> int:
    """Run a script's `main`; say in one sentence why it fails, without a traceback."""
    try:
        return main() or 0
    except (
        BotoCoreError,
        ClientError,
        ConfigError,
        OSError,
        ValueError,
        EOFError,
        yaml.YAMLError,
    ) as error:
        print(f"{name}: {describe_error(error)}", file=sys.stderr)
        return 1


def bucket_name(text: str) -> str:
    """Return the name of a bucket, which may be given as s3://NAME.

    Raises:
        ConfigError: a path follows.
    """
    name, _, path = text.removeprefix("s3://").partition("/")
    if path:
        raise ConfigError(f"a bucket is given by its name, here '{name}', not as {text!r}")
    return name


def describe_error(error: Exception) -> str:
    """Return what happened and what to do, on one line."""
    text = " ".join(str(error).split())[:300]
    match error:
        case SSOError() | TokenRetrievalError():
            return f"the login of this AWS profile has expired ({text}); {LOG_IN}"
        case NoCredentialsError() | PartialCredentialsError():
            return f"there are no AWS credentials here ({text}); {LOG_IN}"
        case ProfileNotFound():
            return f"{text}; `aws configure list-profiles` names those that exist"
        case ConfigError():
            return " ".join(str(error).split())
        case ValueError() if not isinstance(error, UnicodeError):
            return (
                f"the AWS settings here are not understood ({text}); look at the AWS_ variables,"
                " the config file, and what its credential_process prints"
            )
        case EOFError():
            return "this AWS profile asks for an MFA code; run the script in a terminal"
        case ClientError():
            code = error.response.get("Error", {}).get("Code", "")
            return f"AWS refuses {error.operation_name} ({code}): {text}"
        case OSError() if error.filename:
            return f"{error.filename}: {error.strerror}"
        case yaml.YAMLError():
            return f"the file is no YAML: {text}"
        case _:
            return text
