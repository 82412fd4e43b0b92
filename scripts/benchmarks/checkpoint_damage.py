"""Judge every single-byte flip, truncation and extension of a small checkpoint and its journal; the
outcomes go to results/checkpoint_damage.json.

    python scripts/benchmarks/checkpoint_damage.py [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "benchmarks")]

from provenance import provenance  # noqa: E402

from tests.harness.checkpoint_damage import Judge, damages, small_storage  # noqa: E402


def main() -> int:
    """Judge all; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", default=str(ROOT / "scripts/benchmarks/results/checkpoint_damage.json")
    )
    arguments = parser.parse_args()
    started = time.monotonic()
    storage = small_storage()
    judge = Judge(storage)
    failures = []
    for damage in damages(storage):
        try:
            judge.judge(damage)
        except Exception as error:  # noqa: BLE001
            failures.append(
                f"{damage.name} {damage.kind} {damage.at}: {type(error).__name__}: {error}"
            )
    document = {
        **provenance(),
        "what": "each damage of the newest of two checkpoints or of the journal: found or harmless",
        "object_bytes": {name: len(data) for name, data in storage.objects.items()},
        "damages": sum(judge.outcomes.values()) + len(failures),
        "outcomes": dict(sorted(judge.outcomes.items())),
        "failures": failures,
        "seconds": round(time.monotonic() - started, 1),
    }
    Path(arguments.out).write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
