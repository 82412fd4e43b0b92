#!/usr/bin/env bash
# Software: torch 2.13.0, torch.distributed.pipelining
# Expected: with a mean loss, the gradient of a pipelined step is that of the whole batch,
#   or a batch that does not divide evenly is refused.
# Seen: 7 rows in 3 microbatches are cut into 3, 2 and 2 rows, and each microbatch's mean
#   counts a third: rows of small microbatches weigh more. No warning.
# Output:
#   6 rows, 3 microbatches: relative error 0.000
#   7 rows, 3 microbatches: relative error 1.230
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0
"$work/venv/bin/pip" install -qq --no-compile numpy==2.4.6

cat >"$work/finding.py" <<'PY'
import os

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

store = os.path.join(os.path.dirname(os.path.abspath(__file__)), "store")
dist.init_process_group("gloo", init_method="file://" + store, rank=0, world_size=1)
loss = torch.nn.functional.mse_loss


def error_of_gradient(rows, microbatches):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1, bias=False)
    inputs, targets = torch.randn(rows, 2), torch.randn(rows, 1)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    ScheduleGPipe(stage, n_microbatches=microbatches, loss_fn=loss).step(inputs, target=targets)
    pipelined = model.weight.grad.clone()
    model.weight.grad = None
    loss(model(inputs), targets).backward()
    return ((pipelined - model.weight.grad).norm() / model.weight.grad.norm()).item()


even, uneven = error_of_gradient(6, 3), error_of_gradient(7, 3)
print(f"6 rows, 3 microbatches: relative error {even:.3f}")
print(f"7 rows, 3 microbatches: relative error {uneven:.3f}")
assert even < 1e-5
assert uneven > 0.02
dist.destroy_process_group()
PY
"$work/venv/bin/python" "$work/finding.py"
