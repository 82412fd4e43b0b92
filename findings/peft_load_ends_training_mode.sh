#!/usr/bin/env bash
# Software: peft 0.21.2, transformers 5.23.0, torch 2.13.0
# Expected: load_adapter adds an adapter, for example a frozen reference in preference
#   training; the model stays in training mode.
# Seen: without is_trainable=True, load_adapter puts the whole model into evaluation mode.
#   Dropout is off for all that is trained afterwards, and nothing says so.
# Output:
#   training before: True after load_adapter: False
#   adapter that trains: default dropouts in training mode: {False}
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0
"$work/venv/bin/pip" install -qq --no-compile transformers==5.23.0 peft==0.21.2

cat >"$work/finding.py" <<'PY'
import os

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


folder = os.path.dirname(os.path.abspath(__file__))
lora = LoraConfig(target_modules=["q_proj"], lora_dropout=0.5)
network = get_peft_model(model(), lora)
network.save_pretrained(folder)
network.train()
before = network.training
network.load_adapter(folder, "reference")
dropouts = {m.training for name, m in network.named_modules() if "lora_dropout." in name}
print("training before:", before, "after load_adapter:", network.training)
print("adapter that trains:", network.active_adapter, "dropouts in training mode:", dropouts)
assert before and not network.training and dropouts == {False}
assert network.active_adapter == "default"
PY
"$work/venv/bin/python" "$work/finding.py"
