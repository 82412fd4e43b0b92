#!/usr/bin/env bash
# Software: torch 2.13.0, DTensor on a CPU mesh
# Expected: torch.nn.init.normal_ on a sharded tensor gives what it gives on the whole tensor
#   with the same seed.
# Seen: on a CPU mesh each rank fills its shard from its own generator. With the same seed on
#   each rank all shards are equal: half the rows of a weight over two ranks are copies of
#   the others.
# Output:
#   sharded over two ranks: [1.541, -0.2934, 1.541, -0.2934]
#   one device:             [1.541, -0.2934, -2.1788, 0.5684]
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0
"$work/venv/bin/pip" install -qq --no-compile numpy==2.4.6

cat >"$work/finding.py" <<'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
weight = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
torch.manual_seed(0)
torch.nn.init.normal_(weight)
whole = weight.full_tensor()
torch.manual_seed(0)
plain = torch.nn.init.normal_(torch.zeros(4))
if dist.get_rank() == 0:
    print("sharded over two ranks:", [round(x, 4) for x in whole.tolist()])
    print("one device:            ", [round(x, 4) for x in plain.tolist()])
assert torch.equal(whole[:2], whole[2:])
assert torch.equal(whole[:2], plain[:2]) and not torch.equal(whole, plain)
dist.destroy_process_group()
PY
"$work/venv/bin/torchrun" --standalone --nproc-per-node 2 "$work/finding.py"
