#!/usr/bin/env bash
# Software: transformers 5.23.0, safetensors 0.8.0, torch 2.13.0, Mixtral
# Expected: save_pretrained writes the keys of state_dict, so safetensors' load_model fills
#   the same model from the file.
# Seen: since version 5 the module holds the experts of a layer in two fused tensors, and
#   save_pretrained writes one tensor for each expert under the names of version 4. Half of
#   the names differ, the gate's too, and load_model refuses the model's own file.
# Output:
#   only in the model: ['model.layers.0.mlp.experts.down_proj', 'model.layers.0.mlp.experts.gate_up_proj', 'model.layers.0.mlp.gate.weight']
#   only in the file:  ['model.layers.0.block_sparse_moe.experts.0.w1.weight', 'model.layers.0.block_sparse_moe.experts.0.w2.weight', 'model.layers.0.block_sparse_moe.experts.0.w3.weight'] ...
#   load_model: Error(s) in loading state_dict for MixtralForCausalLM:
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0
"$work/venv/bin/pip" install -qq --no-compile transformers==5.23.0 safetensors==0.8.0

cat >"$work/finding.py" <<'PY'
import os

from safetensors.torch import load_file, load_model
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()
folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "model")
config = MixtralConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=2,
)
model = MixtralForCausalLM(config)
model.save_pretrained(folder)
path = os.path.join(folder, "model.safetensors")
here, there = set(model.state_dict()), set(load_file(path))
print("only in the model:", sorted(here - there))
print("only in the file: ", sorted(there - here)[:3], "...")
assert "model.layers.0.mlp.experts.gate_up_proj" in here - there
assert "model.layers.0.block_sparse_moe.experts.0.w1.weight" in there - here
try:
    load_model(model, path)
    raise SystemExit("load_model took the file")
except RuntimeError as error:
    print("load_model:", str(error).splitlines()[0])
PY
"$work/venv/bin/python" "$work/finding.py"
