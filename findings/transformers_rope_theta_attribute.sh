#!/usr/bin/env bash
# Software: transformers 5.23.0, torch 2.13.0
# Expected: config.rope_theta = 500000 does what LlamaConfig(rope_theta=500000) does, or
#   fails.
# Seen: the constructor moves the value into rope_parameters; a later assignment makes a new
#   attribute that no model reads. It is saved beside the old value, and the file is loaded
#   with the old one. Scripts written for transformers 4 train another model in silence.
# Output:
#   constructor: {'rope_theta': 500000.0, 'rope_type': 'default'}
#   assignment:  {'rope_theta': 10000.0, 'rope_type': 'default'}
#   saved:       {'rope_parameters': {'rope_theta': 10000.0, 'rope_type': 'default'}, 'rope_theta': 500000.0}
#   loaded:      {'rope_theta': 10000.0, 'rope_type': 'default'}
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0
"$work/venv/bin/pip" install -qq --no-compile transformers==5.23.0

cat >"$work/finding.py" <<'PY'
import json
import os

import torch
from transformers import AutoConfig, LlamaConfig

folder = os.path.dirname(os.path.abspath(__file__))
by_constructor = LlamaConfig(rope_theta=500_000.0)
by_assignment = LlamaConfig()
by_assignment.rope_theta = 500_000.0
by_assignment.save_pretrained(folder)
with open(os.path.join(folder, "config.json")) as file:
    saved = {key: value for key, value in json.load(file).items() if "rope" in key}
loaded = AutoConfig.from_pretrained(folder).rope_parameters
print("constructor:", by_constructor.rope_parameters)
print("assignment: ", by_assignment.rope_parameters)
print("saved:      ", saved)
print("loaded:     ", loaded)
assert by_constructor.rope_parameters["rope_theta"] == 500_000
assert by_assignment.rope_parameters["rope_theta"] == 10_000
assert saved["rope_theta"] == 500_000 and saved["rope_parameters"]["rope_theta"] == 10_000
assert loaded["rope_theta"] == 10_000
PY
"$work/venv/bin/python" "$work/finding.py"
