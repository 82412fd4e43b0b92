#!/usr/bin/env bash
# Software: torch 2.13.0, torch.distributed.checkpoint.state_dict
# Expected: get_optimizer_state_dict reads. A checkpoint of step 0 changes nothing of the
#   training that follows.
# Seen: for an optimizer without state it runs a step with gradients and rate zero, so that
#   state exists. The step count then stands at 1, and Adam's bias correction makes the
#   first real update 26% smaller.
# Output:
#   not read before: update -0.1000, count 1
#   read before:     update -0.0744, count 2
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0
"$work/venv/bin/pip" install -qq --no-compile numpy==2.4.6

cat >"$work/finding.py" <<'PY'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def first_update(read_before):
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    if read_before:
        get_optimizer_state_dict(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model.weight[0, 0].item(), optimizer.state[model.weight]["step"].item()


plain, read = first_update(False), first_update(True)
print(f"not read before: update {plain[0]:.4f}, count {plain[1]:.0f}")
print(f"read before:     update {read[0]:.4f}, count {read[1]:.0f}")
assert plain[1] == 1 and read[1] == 2
assert abs(plain[0] + 0.1) < 1e-6 and abs(read[0] + 0.0744) < 1e-4
PY
"$work/venv/bin/python" "$work/finding.py"
