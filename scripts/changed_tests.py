#!/usr/bin/env python3
"""Print the test files that a change can break: those that import what differs from a commit.

    scripts/changed_tests.py [--most N] [COMMIT]

COMMIT: by default where this branch left main, or HEAD. --most: the N test files that import the
change most directly; how many more there are goes to standard error.

Imports are followed through the packages and the tests by grimp, which import-linter brings along.
No test imports a conftest.py; where one changes, it names the tests of its directory.
A change of anything but Python (a job, a script, a table) names every test directory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("autohet", "planner", "recovery", "tests")
sys.path.insert(0, str(ROOT))  # `tests` is not installed


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the test files that a change can break.")
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--most", type=int)
    asked = parser.parse_args()
    changed = [Path(name) for name in changed_files(asked.commit or branch_point())]
    found = affected_files(changed)
    nearest = found[: asked.most]
    for path in nearest:
        print(path)

    num_left_out = len(found) - len(nearest)
    if num_left_out:
        print(
            f"{num_left_out} more test files import the change through others; scripts/test runs"
            " them",
            file=sys.stderr,
        )


def branch_point() -> str:
    """Commit at which this branch left main; HEAD on main itself."""
    found = subprocess.run(
        ["git", "merge-base", "HEAD", "main"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "HEAD"


def changed_files(base: str) -> list[str]:
    """Tracked files that differ from `base`, and new ones that git does not ignore."""
    commands = (
        ["git", "diff", "--name-only", base],
        ["git", "ls-files", "--others", "--exclude-standard"],
    )
    names: set[str] = set()
    for command in commands:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        names.update(done.stdout.split())
    return sorted(names)


def affected_files(changed: list[Path]) -> list[str]:
    """Test files that import a changed module, the nearest first; `tests` where that is unknown.

    Files that import it through as many others follow each other with those of the directory that
    mirrors the change first.
    """
    documents = [path for path in changed if path.suffix == ".md"]
    modules = [path for path in changed if path.suffix == ".py" and path.parts[0] in PACKAGES]
    if len(documents) + len(modules) < len(changed):
        return ["tests"]
    distances = import_distances([module_name(path) for path in modules])
    files = {}
    for name, distance in distances.items():
        path = Path(*name.split(".")).with_suffix(".py")
        if path.name.startswith("test_") and (ROOT / path).exists():
            files[path.as_posix()] = distance
    for path in modules:
        if path.name == "conftest.py":
            for each in (ROOT / path.parent).rglob("test_*.py"):
                files.setdefault(str(each.relative_to(ROOT)), 1)

    mirrors = tuple(mirror_of(path) for path in modules)
    return sorted(files, key=lambda path: (files[path], not path.startswith(mirrors), path))


def import_distances(names: list[str]) -> dict[str, int]:
    """Number of imports between each module and the nearest of `names`; none where it has none."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    nearest = [name for name in names if name in graph.modules]
    distances = dict.fromkeys(nearest, 0)
    distance = 0
    while nearest:
        distance += 1
        importers = []
        for name in nearest:
            for importer in graph.find_modules_that_directly_import(name):
                if importer not in distances:
                    distances[importer] = distance
                    importers.append(importer)
        nearest = importers
    return distances


def mirror_of(path: Path) -> str:
    """Directory of the tests of a module: `tests/driver` of `autohet/driver/job/run.py`."""
    parts = path.parts[1:-1] if path.parts[0] == "autohet" else path.parts[:-1]
    return "/".join(("tests", *parts[:1], ""))


def module_name(path: Path) -> str:
    """Dotted name of a file of these packages, relative to the root."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


if __name__ == "__main__":
    main()
