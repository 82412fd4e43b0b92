#!/usr/bin/env bash
# Software: torch 2.13.0, gloo
# Expected: all_reduce with MAX keeps NaN, as torch.max does, so one NaN anywhere is seen by
#   every rank (a common check for overflow).
# Seen: a comparison in one direction decides: whether the NaN survives depends on the rank
#   that has it, and in longer tensors on the position, since each half is reduced by
#   another rank. SUM keeps NaN.
# Output:
#   MAX of [1] and [nan], is NaN seen? on rank 0: [True] on rank 1: [False]
#   MAX of eight values, all NaN on rank 1: [False, False, False, False, True, True, True, True]
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


def reduce_with_nan_on(rank, length, operation):
    values = torch.full((length,), float("nan") if dist.get_rank() == rank else 1.0)
    dist.all_reduce(values, op=operation)
    return values.isnan().tolist()


seen = [reduce_with_nan_on(rank, 1, dist.ReduceOp.MAX) for rank in (0, 1)]
longer = reduce_with_nan_on(1, 8, dist.ReduceOp.MAX)
summed = [reduce_with_nan_on(rank, 1, dist.ReduceOp.SUM) for rank in (0, 1)]
if dist.get_rank() == 0:
    print("MAX of [1] and [nan], is NaN seen? on rank 0:", seen[0], "on rank 1:", seen[1])
    print("MAX of eight values, all NaN on rank 1:", longer)
assert seen == [[True], [False]]
assert any(longer) and not all(longer)
assert summed == [[True], [True]]
dist.destroy_process_group()
PY
"$work/venv/bin/torchrun" --standalone --nproc-per-node 2 "$work/finding.py"
