#!/usr/bin/env bash
# Software: safetensors 0.8.0 (numpy 2.4.6), safetensors.numpy
# Expected: save_file stores the values of an array, transposed or not, or refuses it, as
#   safetensors.torch does ("You are trying to save a non contiguous tensor").
# Seen: a transposed array is written in the order of its memory under the shape of the
#   transposed one, without an error: other values at other places come back.
#   np.ascontiguousarray avoids it.
# Output:
#   saved:  [[0, 3], [1, 4], [2, 5]]
#   loaded: [[0, 1], [2, 3], [4, 5]]
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq safetensors==0.8.0 numpy==2.4.6

cat >"$work/finding.py" <<'PY'
import numpy as np
from safetensors.numpy import load, save

weight = np.arange(6).reshape(2, 3).T
back = load(save({"w": weight}))["w"]
print("saved: ", weight.tolist())
print("loaded:", back.tolist())
assert back.shape == weight.shape
assert back.tolist() == [[0, 1], [2, 3], [4, 5]]
assert weight.tolist() == [[0, 3], [1, 4], [2, 5]]
whole = np.ascontiguousarray(weight)
assert load(save({"w": whole}))["w"].tolist() == weight.tolist()
PY
"$work/venv/bin/python" "$work/finding.py"
