"""Runs wrong programs against the tests that must see them: results/mutants.json, with the commit
and the machine.

Each mutant (`mutants.yaml`) changes one place of what keeps, commits, chooses or moves training
state. It is killed where its tests fail; a survivor is a hole in the tests. The tree is copied, and
every mutant undone before the next.

    mutants.py [NAME ...]     only these; the others' recorded outcomes are kept
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import yaml

from scripts.benchmarks.provenance import provenance
from scripts.benchmarks.quality.mutant_patterns import PatternError, replace_statements

ROOT = Path(__file__).resolve().parents[3]
RESULTS = Path(__file__).parents[1] / "results" / "mutants.json"
LIMIT_S = 300


@dataclass(frozen=True)
class Mutant:
    """The statements `old`, once in the definition `where` of `path`, become `new`.

    `tests`: pytest's arguments.
    """

    name: str
    what: str
    path: str
    where: str
    old: str
    new: str
    tests: list[str]

    def apply(self, text: str) -> str:
        """Return the wrong program.

        Raises PatternError where the place is not there exactly once.
        """
        return replace_statements(text, self.where, self.old, self.new)


def read_mutants() -> list[Mutant]:
    return [
        Mutant(**document)
        for document in yaml.safe_load((Path(__file__).parents[1] / "mutants.yaml").read_text())
    ]


def main() -> int:
    wanted, mutants = set(sys.argv[1:]), read_mutants()
    document = json.loads(RESULTS.read_text()) if RESULTS.exists() and wanted else {"mutants": {}}
    unknown = wanted - {mutant.name for mutant in mutants}
    if unknown:
        print(f"no such mutants: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    document.update(provenance())
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder, "tree")
        copy_tree(tree)
        for mutant in mutants:
            if not wanted or mutant.name in wanted:
                outcome = {"what": mutant.what, "tests": mutant.tests, **run(mutant, tree)}
                document["mutants"][mutant.name] = outcome
                print(
                    f"{outcome['outcome']:9} {mutant.name}: {mutant.what}"
                    f" ({outcome['seconds']:.0f} s)",
                    flush=True,
                )
                RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    outcomes = [each["outcome"] for each in document["mutants"].values()]
    print(f"{outcomes.count('killed')} of {len(outcomes)} killed")
    return 0 if set(outcomes) <= {"killed"} else 1


def copy_tree(target: Path) -> None:
    """What git tracks, as it lies here."""
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    for name in filter(None, names):
        if (ROOT / name).exists() and "results/" not in name:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run(mutant: Mutant, tree: Path) -> dict[str, object]:
    """Outcome: killed, survived, or stale (the code that it changes is not there, or its tests do
    not even run).
    """
    path = tree / mutant.path
    text = path.read_text()
    try:
        wrong = mutant.apply(text)
    except PatternError as error:
        return {"outcome": "stale", "seconds": 0.0, "why": f"{mutant.path}: {error}"}
    path.write_text(wrong)
    began = time.monotonic()
    try:
        code, tail = run_tests(mutant, tree)
    finally:
        path.write_text(text)
    outcome = {0: "survived", 1: "killed"}.get(code, "stale")
    found: dict[str, object] = {"outcome": outcome, "seconds": round(time.monotonic() - began, 1)}
    return found if outcome == "killed" else found | {"why": tail}


def run_tests(mutant: Mutant, tree: Path) -> tuple[int, str]:
    """pytest's exit code; a run that does not end is a run that fails."""
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x", *mutant.tests]
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, "no end"
    return done.returncode, "\n".join(done.stdout.splitlines()[-3:])


if __name__ == "__main__":
    sys.exit(main())
