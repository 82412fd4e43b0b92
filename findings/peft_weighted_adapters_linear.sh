#!/usr/bin/env bash
# Software: peft 0.21.2, transformers 5.23.0, torch 2.13.0
# Expected: add_weighted_adapter([a, b], [1, 1], combination_type="linear") makes the linear
#   combination of what the two adapters add to the weights.
# Seen: it adds the A matrices and the B matrices, so that the product holds A of one
#   adapter times B of the other: the error is as large as the sum itself. "svd" cuts to the
#   larger rank of the two and loses half here. Only "cat" is the sum.
# Output:
#   linear: relative error 1.00
#   svd: relative error 0.47
#   cat: relative error 0.00
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0
"$work/venv/bin/pip" install -qq --no-compile transformers==5.23.0 peft==0.21.2

cat >"$work/finding.py" <<'PY'
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def model(**settings):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **settings,
    )
    return LlamaForCausalLM(config).eval()


lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
network = get_peft_model(model(), lora, adapter_name="a")
network.add_adapter("b", lora)
layer = network.base_model.model.model.layers[0].self_attn.q_proj
total = layer.get_delta_weight("a") + layer.get_delta_weight("b")
errors = {}
for kind in ("linear", "svd", "cat"):
    network.add_weighted_adapter(["a", "b"], [1.0, 1.0], kind, combination_type=kind)
    errors[kind] = ((layer.get_delta_weight(kind) - total).norm() / total.norm()).item()
    print(f"{kind}: relative error {errors[kind]:.2f}")
assert errors["linear"] > 0.9
assert errors["svd"] > 0.3
assert errors["cat"] < 1e-5
PY
"$work/venv/bin/python" "$work/finding.py"
