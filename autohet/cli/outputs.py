"""Checks of a command's output files, before minutes of work rather than after."""

from collections.abc import Sequence
from pathlib import Path

from planner.errors import ConfigError


def check_output(option: str, path: str | None, endings: Sequence[str] = ()) -> None:
    """Raise ConfigError if an option's file cannot be written or has none of `endings`.

    A path of None passes.
    """
    if path is None:
        return
    if endings and Path(path).suffix.lower() not in endings:
        raise ConfigError(f"{option} is '{path}'; its name must end in {' or '.join(endings)}")
    if Path(path).is_dir():
        raise ConfigError(f"{option} is '{path}', a directory; name a file")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(
            f"{option} is '{path}', but there is no directory '{Path(path).parent}'; make it first"
        )
