#!/usr/bin/env bash
# Software: torch 2.13.0, DTensor
# Expected: float(tensor) and tensor.item() of a sharded tensor's sum or norm give the
#   value, or refuse.
# Seen: a sum over shards is a DTensor whose parts still have to be added (Partial), and
#   item() reads this rank's part. Each rank has its own number, without a warning; a logged
#   loss or a norm for clipping is wrong. full_tensor() first.
# Output:
#   rank 0: sum().item() 1, float(norm()) 1.000
#   rank 1: sum().item() 5, float(norm()) 3.606
#   by full_tensor: sum 6, norm 3.742
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
tensor = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
total = tensor.sum()
mine = torch.tensor([total.item(), float(tensor.norm())])
everyone = [torch.zeros(2) for _ in range(2)]
dist.all_gather(everyone, mine)
right = total.full_tensor().item(), tensor.norm().full_tensor().item()
if dist.get_rank() == 0:
    for rank, (a, b) in enumerate(torch.stack(everyone).tolist()):
        print(f"rank {rank}: sum().item() {a:.0f}, float(norm()) {b:.3f}")
    print(f"by full_tensor: sum {right[0]:.0f}, norm {right[1]:.3f}")
assert [each[0].item() for each in everyone] == [1, 5]
assert right[0] == 6
dist.destroy_process_group()
PY
"$work/venv/bin/torchrun" --standalone --nproc-per-node 2 "$work/finding.py"
