#!/usr/bin/env bash
# Software: torch 2.13.0, gloo
# Expected: `reduce` to rank 0 leaves the tensors of the other ranks as they were; only rank 0's gets
#   the sum.
# Seen: other ranks' tensors are working memory: of two ranks, rank 1 keeps one half of its input and
#   finds the sum in the other half. A gradient that is reduced to its owner cannot be used again.
# Output:
#   rank 0: 1 became [3.0, 3.0, 3.0, 3.0]
#   rank 1: 2 became [2.0, 2.0, 3.0, 3.0]
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0
"$work/venv/bin/pip" install -qq --no-compile numpy==2.4.6

cat >"$work/finding.py" <<'PY'
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
tensor = torch.full((4,), rank + 1.0)
dist.reduce(tensor, 0)
print(f"rank {rank}: {rank + 1} became {tensor.tolist()}", flush=True)
assert tensor.tolist() == ([3.0] * 4 if rank == 0 else [2.0, 2.0, 3.0, 3.0])
dist.destroy_process_group()
PY
"$work/venv/bin/torchrun" --standalone --nproc-per-node 2 "$work/finding.py"
