#!/usr/bin/env bash
# Software: torch 2.13.0, torch.distributed.checkpoint
# Expected: `dcp.load` into a tensor of another type is refused, as one of another shape is.
# Seen: values are cast without a word: 2.9 becomes 2, 70000 infinity, a counter of 16777217 loses
#   its last bit in fp32. A state dict built in bf16 halves the precision of a checkpoint's fp32
#   master weights.
# Output:
#   float32 [2.9000, 70000] into int64:    [2, 70000]
#   float32 [2.9000, 70000] into float16:  [2.900390625, inf]
#   int64 [16777217] into float32:         [16777216.0]
#   into another shape:                    CheckpointException
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0
"$work/venv/bin/pip" install -qq --no-compile numpy==2.4.6

"$work/venv/bin/python" -W ignore - "$work/checkpoint" <<'PY' 2> /dev/null
import sys

import torch
import torch.distributed.checkpoint as dcp

saved = {"weight": torch.tensor([2.9, 70000.0]), "count": torch.tensor([2**24 + 1])}
dcp.save(saved, checkpoint_id=sys.argv[1])


def loaded(name, into):
    dcp.load({name: into}, checkpoint_id=sys.argv[1])
    return into.tolist()


whole = loaded("weight", torch.zeros(2, dtype=torch.int64))
half = loaded("weight", torch.zeros(2, dtype=torch.float16))
count = loaded("count", torch.zeros(1))
print("float32 [2.9000, 70000] into int64:   ", whole)
print("float32 [2.9000, 70000] into float16: ", half)
print("int64 [16777217] into float32:        ", count)
try:
    loaded("weight", torch.zeros(3))
except BaseException as error:  # it is no Exception
    print("into another shape:                   ", type(error).__name__)
else:
    raise SystemExit("another shape is loaded")
assert whole == [2, 70000] and half == [2.900390625, float("inf")] and count == [2.0**24]
PY
