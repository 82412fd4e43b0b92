"""Arrow files of Hugging Face hub datasets, fetched by the `datasets` library."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from autohet.runtime.data.selection import SourceFile
from autohet.runtime.job.data import SourceEntry
from planner.errors import ConfigError

HUB_SCHEME = "hf://"


def hub_files(entry: SourceEntry, cache: Path) -> list[SourceFile]:
    """Return the files of one split of one subset of `hf://org/name` (or `hf://` and a directory).

    Rows that do not fill whole files, such as a part of a split, are written below `cache`.

    Raises:
        ConfigError: `datasets` is missing, or refuses the data set.
    """
    name = entry.path.removeprefix(HUB_SCHEME)
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            f"data.source {entry.path} needs the datasets library; pip install 'autohet[hub]'"
        ) from error
    try:
        found = datasets.load_dataset(name, entry.subset, split=entry.split)
    except Exception as error:
        raise ConfigError(
            f"data.source {entry.path}, split {entry.split!r}, subset {entry.subset!r}: {error};"
            " check the name, source.split and source.subset"
        ) from error
    fingerprint = found._fingerprint
    paths = [Path(each["filename"]) for each in found.cache_files]
    num_rows = sum(_num_rows(path) for path in paths)
    # A part of a split has the whole split's files.
    if not paths or num_rows != found.num_rows:
        directory = cache / "hub" / fingerprint
        if not (directory / "state.json").exists():
            found.save_to_disk(str(directory))
        paths = sorted(directory.glob("*.arrow"))
    files = []
    for number, path in enumerate(paths):
        size = path.stat().st_size
        files.append(SourceFile(str(path), "arrow", size, f"{fingerprint}:{number}"))
    return files


def _num_rows(path: Path) -> int:
    with pa.memory_map(str(path)) as file:
        return sum(batch.num_rows for batch in pa.ipc.open_stream(file))
