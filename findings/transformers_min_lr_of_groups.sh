#!/usr/bin/env bash
# Software: transformers 5.23.0, torch 2.13.0, get_cosine_with_min_lr_schedule_with_warmup
# Expected: min_lr=1e-5 is the rate at which the schedule ends, in each parameter group.
# Seen: the floor is turned into the ratio min_lr / optimizer.defaults["lr"] and applied to
#   each group's own rate. Groups with rates of their own end at other floors: here 1e-6 and
#   1e-7 instead of 1e-5.
# Output:
#   asked for at the end: 1e-05; rates of the groups: ['1e-06', '1e-07']
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0
"$work/venv/bin/pip" install -qq --no-compile transformers==5.23.0

cat >"$work/finding.py" <<'PY'
import torch
from transformers import get_cosine_with_min_lr_schedule_with_warmup

groups = [
    {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1e-3},
    {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1e-4},
]
optimizer = torch.optim.AdamW(groups, lr=1e-2)
schedule = get_cosine_with_min_lr_schedule_with_warmup(optimizer, 2, 10, min_lr=1e-5)
for _ in range(10):
    optimizer.step()
    schedule.step()
rates = schedule.get_last_lr()
print("asked for at the end: 1e-05; rates of the groups:", [f"{rate:.0e}" for rate in rates])
assert abs(rates[0] - 1e-6) < 1e-12 and abs(rates[1] - 1e-7) < 1e-12
PY
"$work/venv/bin/python" "$work/finding.py"
