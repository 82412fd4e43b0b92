#!/usr/bin/env bash
# Software: torch 2.13.0, CPU
# Expected: a longer draw from one seed begins with the shorter one, as `torch.rand` does, so that a
#   shard's noise is a slice of the whole tensor's.
# Seen: fewer than 16 normal numbers are computed another way than 16 and more, and where the size is
#   no multiple of 16 the last 16 numbers are drawn again: 20 numbers share four with 16, and 8 share
#   none. A tensor of another layout in memory is filled by yet another way.
# Output:
#   rand:  8 are the first of 16: True, 16 the first of 20: True
#   randn: 8 are the first of 16: False, 16 the first of 20: False, their first four: True
#   randn into a transposed tensor: False
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0

"$work/venv/bin/python" -W ignore - <<'PY'
import torch


def drawn(how, size):
    return how(size, generator=torch.Generator().manual_seed(3))


def begins(how, few, many):
    return torch.equal(drawn(how, few), drawn(how, many)[:few])


uniform = begins(torch.rand, 8, 16), begins(torch.rand, 16, 20)
normal = begins(torch.randn, 8, 16), begins(torch.randn, 16, 20)
first = torch.equal(drawn(torch.randn, 16)[:4], drawn(torch.randn, 20)[:4])
seed = torch.Generator().manual_seed
turned = torch.empty(4, 8).t().normal_(generator=seed(3))
layout = torch.equal(turned, torch.empty(8, 4).normal_(generator=seed(3)))
print(f"rand:  8 are the first of 16: {uniform[0]}, 16 the first of 20: {uniform[1]}")
print(f"randn: 8 are the first of 16: {normal[0]}, 16 the first of 20: {normal[1]}, "
      f"their first four: {first}")
print(f"randn into a transposed tensor: {layout}")
assert uniform == (True, True) and normal == (False, False) and first and not layout
PY
