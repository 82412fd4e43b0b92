#!/usr/bin/env bash
# Software: torch 2.13.0, CPU
# Expected: `Generator.manual_seed` takes 64 bits, and `initial_seed()` gives all of them back, so
#   that seeds made by hashing (run, step, position) to 64 bits draw unlike numbers.
# Seen: the CPU's Mersenne Twister begins from the lower 32 bits. Seeds that differ in the upper
#   ones draw the same numbers, and of 64-bit hashes two in 77,000 begin alike with a chance of a half.
# Output:
#   1 and 2**32 + 1: the same permutation, initial seeds 1 and 4294967297
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0

"$work/venv/bin/python" -W ignore - <<'PY'
import torch

one = torch.Generator().manual_seed(1)
other = torch.Generator().manual_seed(2**32 + 1)
seeds = one.initial_seed(), other.initial_seed()
assert torch.equal(torch.randperm(1000, generator=one), torch.randperm(1000, generator=other))
print(f"1 and 2**32 + 1: the same permutation, initial seeds {seeds[0]} and {seeds[1]}")
assert seeds == (1, 2**32 + 1)
PY
