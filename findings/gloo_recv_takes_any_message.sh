#!/usr/bin/env bash
# Software: torch 2.13.0, gloo
# Expected: `recv` into a tensor of another size or type than was sent is refused.
# Seen: a shorter message fills the tensor's first bytes and leaves the rest as it was; floats come
#   into integers as their bits. Neither rank hears of it: two pipeline stages that disagree about a
#   microbatch's size train on.
# Output:
#   4 floats into 8:       [1.0, 2.0, 3.0, 4.0, -1.0, -1.0, -1.0, -1.0]
#   float 1.5 into int32:  [1069547520]
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
if dist.get_rank() == 0:
    dist.send(torch.tensor([1.0, 2.0, 3.0, 4.0]), 1)
    dist.send(torch.tensor([1.5]), 1)
else:
    longer = torch.full((8,), -1.0)
    dist.recv(longer, 0)
    other = torch.zeros(1, dtype=torch.int32)
    dist.recv(other, 0)
    print("4 floats into 8:      ", longer.tolist())
    print("float 1.5 into int32: ", other.tolist())
    assert longer.tolist() == [1.0, 2.0, 3.0, 4.0, -1.0, -1.0, -1.0, -1.0]
    assert other.item() == torch.tensor(1.5).view(torch.int32).item()
dist.destroy_process_group()
PY
"$work/venv/bin/torchrun" --standalone --nproc-per-node 2 "$work/finding.py"
