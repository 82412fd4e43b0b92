#!/usr/bin/env bash
# Software: ortools 9.15.6755, CP-SAT
# Expected: OPTIMAL means that no solution is better: of two choices worth 1e-6 and 2e-6 one
#   gets the second.
# Seen: absolute_gap_limit is 1e-4 by default, so with an objective in such units any
#   solution is OPTIMAL, here the empty one: the objective is 0, and the bound beside it
#   says 3e-6. absolute_gap_limit = 0 gives the better one.
# Output:
#   unit 1 : OPTIMAL, objective 2, bound 2
#   unit 1e-06 : OPTIMAL, objective 0, bound 3e-06
#   unit 1e-06 {'absolute_gap_limit': 0.0}: OPTIMAL, objective 2e-06, bound 2e-06
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile ortools==9.15.6755

cat >"$work/finding.py" <<'PY'
from ortools.sat.python import cp_model


def solve(unit, **parameters):
    model = cp_model.CpModel()
    a, b = model.new_bool_var("a"), model.new_bool_var("b")
    model.add(a + b <= 1)
    model.maximize(unit * a + 2 * unit * b)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    for name, value in parameters.items():
        setattr(solver.parameters, name, value)
    status = solver.status_name(solver.solve(model))
    print(f"unit {unit:g} {parameters or ''}: {status}, objective {solver.objective_value:g}, bound {solver.best_objective_bound:g}")
    return status, solver.value(a), solver.value(b)


assert solve(1.0) == ("OPTIMAL", 0, 1)
assert solve(1e-6) == ("OPTIMAL", 0, 0)
assert solve(1e-6, absolute_gap_limit=0.0) == ("OPTIMAL", 0, 1)
PY
"$work/venv/bin/python" "$work/finding.py"
