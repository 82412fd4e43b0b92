"""A hostile user beside the servers and files of a run: 10,000 mutated, truncated and replayed
frames, 2,000 idle sockets, and damaged documents; figures go to results/hostile.json.

    python -m scripts.benchmarks.recovery.hostile [--frames 10000] [--idle 2000] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from pathlib import Path

from scripts.benchmarks.provenance import provenance
from tests.harness.besieged import besiege

ROOT = Path(__file__).parents[3]


def main() -> int:
    """Run the attack once; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=10_000)
    parser.add_argument("--idle", type=int, default=2_000)
    parser.add_argument("--out", default=str(ROOT / "scripts/benchmarks/results/hostile.json"))
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)  # the other user reaches the snapshot directories' parent
        found = besiege(Path(directory), arguments.frames, arguments.idle)
    document = {**provenance(), "what": __doc__.split("\n\n")[0].replace("\n", " "), **found}
    Path(arguments.out).write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))
    failed = found["members"]["failures"] or found["documents"]["other_errors"]
    got = found["attack"]["leaks"] or found["attack"]["directory_successes"]
    return 1 if failed or got else 0


if __name__ == "__main__":
    sys.exit(main())
