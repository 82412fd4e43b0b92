#!/usr/bin/env bash
# Software: torch 2.13.0, gloo
# Expected: new_group takes the timeout that init_process_group was given.
# Seen: it takes the default of the library, 30 minutes. A lost peer is noticed by the world
#   group after the 20 s that were asked for, and by a subgroup half an hour later.
# Output:
#   world: 0:00:20  new_group: 0:30:00
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0
"$work/venv/bin/pip" install -qq --no-compile numpy==2.4.6

cat >"$work/finding.py" <<'PY'
import datetime

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))


def timeout_of(group):
    return group._get_backend(torch.device("cpu")).options._timeout


world, sub = timeout_of(dist.group.WORLD), timeout_of(dist.new_group([0, 1]))
if dist.get_rank() == 0:
    print("world:", world, " new_group:", sub)
assert world == datetime.timedelta(seconds=20)
assert sub == datetime.timedelta(minutes=30)
dist.destroy_process_group()
PY
"$work/venv/bin/torchrun" --standalone --nproc-per-node 2 "$work/finding.py"
