"""Judge every single-byte flip, truncation and extension of a small checkpoint and its journal; the
outcomes go to results/checkpoint_damage.json.

    python -m scripts.benchmarks.recovery.checkpoint_damage [--out FILE] [--parts N --part K]
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

from scripts.benchmarks.provenance import provenance
from tests.harness.checkpoint_damage import Judge, damages, small_storage
from tests.harness.memory_storage import MemoryStorage

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "scripts" / "benchmarks" / "results"


def main() -> int:
    """Judge all, or one part of them; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=str(RESULTS / "checkpoint_damage.json"))
    parser.add_argument("--parts", type=int, default=1, help="how many calls share the work")
    parser.add_argument("--part", type=int, default=1, help="which of them this is")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    storage = small_storage()
    found = judge_part(storage, arguments.part, arguments.parts)
    out = Path(arguments.out)
    before = json.loads(out.read_text()) if arguments.part > 1 else {}
    outcomes = Counter(before.get("outcomes", {})) + Counter(found["outcomes"])
    failures = before.get("failures", []) + found["failures"]
    document = {
        **provenance(),
        "what": "each damage of the newest of two checkpoints or of the journal: found or harmless",
        "object_bytes": {name: len(data) for name, data in storage.objects.items()},
        "parts": f"{arguments.part} of {arguments.parts}",
        "damages": sum(outcomes.values()) + len(failures),
        "outcomes": dict(sorted(outcomes.items())),
        "failures": failures,
        "seconds": round(before.get("seconds", 0.0) + found["seconds"], 1),
    }
    out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))
    return 1 if failures else 0


def judge_part(storage: MemoryStorage, part: int, parts: int) -> dict[str, Any]:
    """Judge every `parts`-th damage; returns outcomes, failures and seconds."""
    started, judge, failures = time.monotonic(), Judge(storage), []
    for damage in islice(damages(storage), part - 1, None, parts):
        try:
            judge.judge(damage)
        except Exception as error:  # noqa: BLE001
            failures.append(
                f"{damage.name} {damage.kind} {damage.at}: {type(error).__name__}: {error}"
            )
    return {
        "outcomes": dict(judge.outcomes),
        "failures": failures,
        "seconds": time.monotonic() - started,
    }


if __name__ == "__main__":
    sys.exit(main())
