#!/usr/bin/env bash
# Software: torch 2.13.0
# Expected: an optimizer built from `named_parameters()` saves its parameters' names, so its state
#   comes back to the parameters of these names, as a module's does.
# Seen: state is dealt out by position. Where a model lists equal shapes in another order, each
#   moment comes to another parameter, nothing is said, and the optimizer takes over the saved names:
#   it then calls its first parameter by the name of the second.
# Output:
#   moment of a: saved 0.1, loaded 10.0
#   names after the load: ['a', 'b'] for parameters ['b', 'a']
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0

"$work/venv/bin/python" -W ignore - <<'PY'
import torch
from torch import nn


def build(*names):
    module = nn.Module()
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.ones(1)))
    return module, torch.optim.AdamW(module.named_parameters())


module, optimizer = build("a", "b")
(module.a + 100 * module.b).sum().backward()
optimizer.step()
other, reader = build("b", "a")
other.load_state_dict(module.state_dict())
reader.load_state_dict(optimizer.state_dict())
saved = optimizer.state[module.a]["exp_avg"].item()
loaded = reader.state[other.a]["exp_avg"].item()
names = reader.state_dict()["param_groups"][0]["param_names"]
own = [name for name, _ in other.named_parameters()]
print(f"moment of a: saved {saved:.1f}, loaded {loaded:.1f}")
print(f"names after the load: {names} for parameters {own}")
assert (round(saved, 3), round(loaded, 3)) == (0.1, 10.0)
assert names == ["a", "b"] and own == ["b", "a"]
PY
