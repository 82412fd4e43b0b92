#!/usr/bin/env bash
# Software: triton 3.7.1, TRITON_INTERPRET=1
# Expected: a kernel that passes in the interpreter computes on a GPU what it computed there, within
#   rounding, in bf16 too.
# Seen: tl.dot multiplies the 16 bits of bf16 numbers as integers, so that a product of ones is
#   4e9 instead of 16; and a conversion from fp32 to bf16 cuts off where a GPU rounds to nearest.
#   fp16 and fp32 are right. Kernels in bf16 have to be tested in fp16, or on a card.
# Output:
#   product of ones, 16 terms: fp16 16.0, bf16 4228120576.0
#   1.998 in bf16: by torch 2.0, by the kernel 1.9921875
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0
"$work/venv/bin/pip" install -qq --no-compile numpy==2.4.6 triton==3.7.1

cat >"$work/finding.py" <<'PY'
import torch
import triton
import triton.language as tl


@triton.jit
def multiply(source, out):
    places = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    factor = tl.load(source + places)
    tl.store(out + places, tl.dot(factor, factor))


@triton.jit
def convert(source, out):
    places = tl.arange(0, 16)
    tl.store(out + places, tl.load(source + places).to(tl.bfloat16))


found = []
for dtype in (torch.float16, torch.bfloat16):
    out = torch.empty(16, 16)
    multiply[(1,)](torch.ones(16, 16, dtype=dtype), out)
    found.append(out[0, 0].item())
print(f"product of ones, 16 terms: fp16 {found[0]}, bf16 {found[1]}")
assert found[0] == 16
assert found[1] > 1e9
source = torch.full((16,), 1.998)
out = torch.empty(16, dtype=torch.bfloat16)
convert[(1,)](source, out)
rounded = source.bfloat16()[0].item()
print(f"1.998 in bf16: by torch {rounded}, by the kernel {out[0].item()}")
assert out[0].item() < rounded
PY
TRITON_INTERPRET=1 "$work/venv/bin/python" "$work/finding.py"
