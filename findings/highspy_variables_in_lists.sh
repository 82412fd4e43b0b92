#!/usr/bin/env bash
# Software: highspy 1.16.0
# Expected: `y in [x]` is False for two variables of a model, and [x, y].index(y) is 1.
# Seen: `==` makes a linear expression, and an expression is true, so each list of variables
#   holds any variable, at its first place. Sets and dicts work, since they compare hashes
#   first.
# Output:
#   Running HiGHS 1.16.0 (git hash: f3f113d): Copyright (c) 2026 under MIT licence terms
#   Includes third-party software components, see THIRD_PARTY_NOTICES.md for full details
#   y in [x]: True  [x, y].index(y): 0  y in {x}: False
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile highspy==1.16.0 numpy==2.4.6

cat >"$work/finding.py" <<'PY'
import highspy

solver = highspy.Highs()
solver.silent()
x, y = solver.addVariable(0, 10), solver.addVariable(0, 10)
print("y in [x]:", y in [x], " [x, y].index(y):", [x, y].index(y), " y in {x}:", y in {x})
assert y in [x] and [x, y].index(y) == 0
assert y not in {x}
assert type(x == y).__name__ == "highs_linear_expression" and bool(x == y)
PY
"$work/venv/bin/python" "$work/finding.py"
