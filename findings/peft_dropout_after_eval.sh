#!/usr/bin/env bash
# Software: peft 0.21.2, transformers 5.23.0, torch 2.13.0
# Expected: after model.eval() the model is deterministic, whatever adapters are added to it
#   later: training is False.
# Seen: add_adapter and get_peft_model bring dropout modules in training mode.
#   model.training says False, and two calls give different logits until eval() is called
#   once more. So does transformers' own model.add_adapter.
# Output:
#   peft: training False repeatable False
#   transformers: training False repeatable False
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


lora = LoraConfig(target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False)
tokens = torch.arange(10)[None]


@torch.no_grad()
def is_repeatable(network):
    return torch.equal(network(tokens).logits, network(tokens).logits)


network = get_peft_model(model(), lora).eval()
assert is_repeatable(network)
network.add_adapter("second", lora)
network.set_adapter("second")
by_peft = network.training, is_repeatable(network)
print("peft: training", by_peft[0], "repeatable", by_peft[1])
plain = model()
plain.add_adapter(lora, "first")
by_transformers = plain.training, is_repeatable(plain)
print("transformers: training", by_transformers[0], "repeatable", by_transformers[1])
assert by_peft == by_transformers == (False, False)
network.eval()
assert is_repeatable(network)
PY
"$work/venv/bin/python" "$work/finding.py"
