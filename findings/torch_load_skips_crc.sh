#!/usr/bin/env bash
# Software: torch 2.13.0
# Expected: `torch.save` writes a zip archive with a CRC-32 of each tensor, so `torch.load` reports a
#   file that was damaged on a disk or on its way.
# Seen: the CRC-32 is written and never compared. A changed bit in a tensor is loaded as another
#   value, with and without `mmap`; Python's zipfile finds it.
# Output:
#   zipfile finds: weights/data/0
#   torch.load gives 125.0 for 500.0, with mmap 125.0
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0
"$work/venv/bin/pip" install -qq --no-compile numpy==2.4.6

"$work/venv/bin/python" -W ignore - "$work/weights.pt" <<'PY'
import sys
import zipfile
from pathlib import Path

import torch

path = Path(sys.argv[1])
torch.save(torch.arange(1000.0), path)
content = bytearray(path.read_bytes())
place = content.find(torch.tensor([500.0, 501.0]).numpy().tobytes())
content[place + 3] ^= 1
path.write_bytes(content)
bad = zipfile.ZipFile(path).testzip()
plain = torch.load(path)[500].item()
mapped = torch.load(path, mmap=True)[500].item()
print("zipfile finds:", bad)
print(f"torch.load gives {plain} for 500.0, with mmap {mapped}")
assert bad == "weights/data/0" and plain == mapped == 125.0
PY
