#!/usr/bin/env python3
"""Print the test files that a change can break: those that import what differs from a commit.

    scripts/changed_tests.py [COMMIT]     by default from where this branch left main, or from HEAD

Imports are followed through the packages and the tests by grimp, which import-linter brings along.
No test imports a conftest.py; where one changes, it names the tests of its directory.
A change of anything but Python (a job, a script, a table) names every test directory.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("autohet", "planner", "recovery", "tests")


def main() -> None:
    base = sys.argv[1] if len(sys.argv) > 1 else branch_point()
    changed = [Path(name) for name in changed_files(base)]
    for path in affected_files(changed):
        print(path)


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
    """Test files that import a changed module, in sorted order; `tests` where that is unknown."""
    documents = [path for path in changed if path.suffix == ".md"]
    modules = [path for path in changed if path.suffix == ".py" and path.parts[0] in PACKAGES]
    if len(documents) + len(modules) < len(changed):
        return ["tests"]
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    affected: set[str] = set()
    for path in modules:
        name = module_name(path)
        if name in graph.modules:
            affected.add(name)
            affected |= graph.find_downstream_modules(name)
    files = {Path(*name.split(".")).with_suffix(".py") for name in affected}
    for path in modules:
        if path.name == "conftest.py":
            beside = (ROOT / path.parent).rglob("test_*.py")
            files.update(each.relative_to(ROOT) for each in beside)
    found = sorted(str(path) for path in files if path.name.startswith("test_"))
    return [path for path in found if (ROOT / path).exists()]


def module_name(path: Path) -> str:
    """Dotted name of a file of these packages, relative to the root."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


if __name__ == "__main__":
    main()
