#!/usr/bin/env bash
# Software: safetensors 0.8.0 (numpy 2.4.6)
# Expected: the same tensors and the same metadata give the same file, so that a file's
#   checksum names its content.
# Seen: the order of metadata keys in the header is another one at each call, even within
#   one process. Files of equal content differ in bytes and checksum. Without metadata, or
#   with one key, they are equal.
# Output:
#   different files of 50, metadata of eight keys: many
#   different files of 50, metadata of one key:    1
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq safetensors==0.8.0 numpy==2.4.6

cat >"$work/finding.py" <<'PY'
import hashlib

import numpy as np
from safetensors.numpy import save


def num_different_files(metadata):
    tensors = {"w": np.zeros(2, dtype=np.float32)}
    return len({hashlib.sha256(save(tensors, metadata)).hexdigest() for _ in range(50)})


eight = num_different_files({f"key{number}": "value" for number in range(8)})
one = num_different_files({"format": "pt"})
print("different files of 50, metadata of eight keys:", "many" if eight > 10 else eight)
print("different files of 50, metadata of one key:   ", one)
assert eight > 10
assert one == 1
PY
"$work/venv/bin/python" "$work/finding.py"
