#!/usr/bin/env bash
# Software: peft 0.21.2, transformers 5.23.0, torch 2.13.0
# Expected: merge_and_unload gives the logits of the adapted model: LoRA on lm_head of a
#   model with tied embeddings is merged into the head.
# Seen: head and input embedding are one tensor, so the merge changes what goes in as well,
#   and the logits are others. Before the merge they were separate in effect. A warning says
#   "complications"; the merged model is returned and saved all the same.
# Output:
#   tied False: logits change by 0.00 in the merge
#   tied True: logits change by 5.97 in the merge
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0
"$work/venv/bin/pip" install -qq --no-compile transformers==5.23.0 peft==0.21.2

cat >"$work/finding.py" <<'PY'
import warnings

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


warnings.simplefilter("ignore")
lora = LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
tokens = torch.arange(10)[None]
changes = {}
with torch.no_grad():
    for tied in (False, True):
        network = get_peft_model(model(tie_word_embeddings=tied), lora).eval()
        before = network(tokens).logits
        merged = network.merge_and_unload()
        changes[tied] = (merged(tokens).logits - before).abs().max().item()
        print(f"tied {tied}: logits change by {changes[tied]:.2f} in the merge")
assert changes[False] < 1e-4
assert changes[True] > 0.5
PY
"$work/venv/bin/python" "$work/finding.py"
