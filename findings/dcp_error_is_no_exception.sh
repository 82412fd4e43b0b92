#!/usr/bin/env bash
# Software: torch 2.13.0, torch.distributed.checkpoint
# Expected: dcp.load raises an Exception when a checkpoint lacks a tensor, so `except
#   Exception` can fall back to an older one.
# Seen: it raises CheckpointException, which derives from BaseException, like
#   KeyboardInterrupt: the handler is passed over, and the process ends.
# Output:
#   passed `except Exception`: CheckpointException
#   its bases: ['BaseException', 'object']
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0
"$work/venv/bin/pip" install -qq --no-compile numpy==2.4.6

cat >"$work/finding.py" <<'PY'
import os

import torch
import torch.distributed.checkpoint as dcp

folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "checkpoint")
dcp.save({"a": torch.zeros(1)}, checkpoint_id=folder, no_dist=True)
try:
    try:
        dcp.load({"b": torch.zeros(1)}, checkpoint_id=folder, no_dist=True)
        raise SystemExit("the checkpoint was loaded")
    except Exception as error:
        raise SystemExit(f"caught: {type(error).__name__}") from error
except BaseException as error:
    print("passed `except Exception`:", type(error).__name__)
    print("its bases:", [each.__name__ for each in type(error).__mro__[1:]])
    assert type(error).__name__ == "CheckpointException"
    assert not isinstance(error, Exception)
PY
"$work/venv/bin/python" "$work/finding.py"
