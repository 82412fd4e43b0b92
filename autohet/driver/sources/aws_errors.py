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
        UnicodeError,
        yaml.YAMLError,
    ) as error:
        print(f"{name}: {describe_error(error)}", file=sys.stderr)
        return 1


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
        case ClientError():
            code = error.response.get("Error", {}).get("Code", "")
            return f"AWS refuses {error.operation_name} ({code}): {text}"
        case OSError() if error.filename:
            return f"{error.filename}: {error.strerror}"
        case yaml.YAMLError():
            return f"the file is no YAML: {text}"
        case _:
            return text
