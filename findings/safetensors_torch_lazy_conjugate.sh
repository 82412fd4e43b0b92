#!/usr/bin/env bash
# Software: safetensors 0.8.0, torch 2.13.0
# Expected: a complex tensor that was conjugated is stored conjugated. It is contiguous, so
#   save_file has nothing to refuse.
# Seen: torch keeps a conjugate as a bit beside the old memory, and save stores the memory:
#   the imaginary parts come back with the other sign. Rotary tables kept as complex numbers
#   are such tensors. resolve_conj() before saving avoids it.
# Output:
#   contiguous: True conjugate bit: True
#   saved:  [-0.4794, -0.8415]
#   loaded: [0.4794, 0.8415]
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq torch==2.13.0
"$work/venv/bin/pip" install -qq safetensors==0.8.0 numpy==2.4.6

cat >"$work/finding.py" <<'PY'
import torch
from safetensors.torch import load, save

table = torch.polar(torch.ones(2), torch.tensor([0.5, 1.0])).conj()
back = load(save({"table": table}))["table"]
print("contiguous:", table.is_contiguous(), "conjugate bit:", table.is_conj())
print("saved: ", [round(x, 4) for x in table.imag.tolist()])
print("loaded:", [round(x, 4) for x in back.imag.tolist()])
assert table.is_contiguous()
assert torch.equal(back, table.conj().resolve_conj()) and not torch.equal(back, table)
assert torch.equal(load(save({"table": table.resolve_conj()}))["table"], table)
PY
"$work/venv/bin/python" "$work/finding.py"
