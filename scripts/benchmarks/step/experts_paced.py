"""Uneven experts on one fast and two slow paced processes, beside even ones: predicted, measured.

    python -m scripts.benchmarks.step.experts_paced [--steps 2] [--block-s 1.0]

Each rank takes time by the tokens that the real router sends to its own experts
(`tests/harness/paced_experts.py`), at the speed of the GPU type that it poses as, and waits for the
others in real gloo sums. The cost model knows the types' speeds and the spread of the loads.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.benchmarks.provenance import provenance
from tests.harness.paced_experts import cost_of, job_of, measured_step_s, plan_of, work_of

RESULTS = Path(__file__).parents[1] / "results" / "experts_paced.json"
SHARES = {"even": (3, 3, 2), "uneven": (4, 2, 2)}
"""Parts of the fast GPU and of the two slow ones; there are eight experts and eight heads."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--block-s", type=float, default=1.0)
    options = parser.parse_args()
    job = job_of(options.block_s)
    cost = cost_of(job)
    work = work_of(cost, options.block_s)
    rows: dict[str, Any] = {}
    for name, shares in SHARES.items():
        plan = plan_of(shares)
        predicted_s = cost.predict(plan).step_time_s
        measured_s = measured_step_s(job, plan, work, options.steps)
        rows[name] = {"shares": shares, "predicted_s": predicted_s, "measured_s": measured_s}
        rows[name]["error"] = predicted_s / measured_s - 1.0
        print(f"{name} {shares}: predicted {predicted_s:.3f} s, measured {measured_s:.3f} s")
    faster = {
        kind: rows["even"][f"{kind}_s"] / rows["uneven"][f"{kind}_s"]
        for kind in ("predicted", "measured")
    }
    print(
        f"uneven is faster: predicted {faster['predicted']:.3f}, measured {faster['measured']:.3f}"
    )
    document = {"steps": options.steps, "load": os.getloadavg()[0], "work": asdict(work)}
    profile = cost.measurements.profile
    assert profile is not None
    spread = next(r.expert_load_spread for r in profile.measurements if r.layer == "block")
    document |= {"expert_load_spread": spread, "plans": rows, "uneven_faster": faster}
    RESULTS.write_text(json.dumps(provenance() | document, indent=2) + "\n")


if __name__ == "__main__":
    main()
