"""The planner loads fast: no framework, and the heavy readers only when a file needs them."""

import subprocess
import sys


def test_importing_the_planner_loads_no_framework():
    code = (
        "import planner, planner.cost.model, planner.cost.calibration, planner.cost.trace, sys;"
        "print([m for m in ('torch', 'ray', 'boto3', 'transformers', 'pyarrow', 'scipy', 'pandas') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"
