"""Folder of the published measurements that the planner's benchmarks compare with."""

import os
from pathlib import Path


def measurements_folder() -> Path | None:
    """Return the folder of published measurements, or None if there is none.

    It is the one that AUTOHET_MEASUREMENTS names, or `shared` next to the checkout.
    """
    given = os.environ.get("AUTOHET_MEASUREMENTS")
    if given:
        folder = Path(given)
    else:
        folder = Path(__file__).resolve().parents[3].parent / "shared"
    return folder if (folder / "data").is_dir() else None
