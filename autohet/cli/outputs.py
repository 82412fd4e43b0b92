"""Files that a command will write, checked before minutes of work rather than after."""

from collections.abc import Sequence
from pathlib import Path

from planner.errors import ConfigError


def check_output(option: str, path: str | None, endings: Sequence[str] = ()) -> None:
    """ConfigError where the file of an option could not be written, or its name has none of
    `endings`. None passes.
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
