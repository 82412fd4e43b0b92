#!/usr/bin/env bash
# Software: scipy 1.17.1 (HiGHS), scipy.optimize.milp
# Expected: a constraint 1e-9 x <= 5e-9 means x <= 5, whatever its unit; or the solver says
#   that it cannot hold it.
# Seen: matrix entries of 1e-9 and less are taken for zero, so the constraint is gone: x =
#   10, "Optimization terminated successfully", status 0. Bytes against a limit in exabytes,
#   or seconds as nanoseconds, do that.
# Output:
#   1 x <= 5: x = 5, status 0
#   1e-09 x <= 5e-09: x = 10, status 0
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile scipy==1.17.1 numpy==2.4.6

cat >"$work/finding.py" <<'PY'
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

answers = {}
for unit in (1.0, 1e-9):
    limit = LinearConstraint([[unit]], -np.inf, 5 * unit)
    answers[unit] = milp([-1.0], integrality=[1], bounds=Bounds(0, 10), constraints=limit)
    print(f"{unit:g} x <= {5 * unit:g}: x = {answers[unit].x[0]:g}, status {answers[unit].status}")
assert answers[1.0].x[0] == 5
assert answers[1e-9].x[0] == 10
assert answers[1e-9].status == 0 and answers[1e-9].success
PY
"$work/venv/bin/python" "$work/finding.py"
