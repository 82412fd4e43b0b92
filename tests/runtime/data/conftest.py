"""What the data tests share: a data section whose cache is the test's own directory."""

from collections.abc import Callable
from pathlib import Path

import pytest

from autohet.runtime.job import DataSection


@pytest.fixture
def make_data(tmp_path: Path) -> Callable[..., DataSection]:
    """DataSection(source, ...) with a cache under tmp_path / "cache"."""

    def make(source: str | Path | tuple[str, ...], **keys: object) -> DataSection:
        chosen = source if isinstance(source, tuple) else str(source)
        return DataSection(source=chosen, **{"cache": str(tmp_path / "cache"), **keys})  # type: ignore[arg-type]

    return make
