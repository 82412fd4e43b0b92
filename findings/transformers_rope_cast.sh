#!/usr/bin/env bash
# Software: transformers 5.23.0, torch 2.13.0
# Expected: a model that is loaded with dtype=torch.bfloat16 and one that is loaded in fp32
#   and cast by .to(torch.bfloat16) are the same model.
# Seen: from_pretrained keeps the rotary frequencies in fp32, .to rounds this buffer as well:
#   at position 20,000 the angle is off by 2 radians, so long inputs are rotated otherwise.
# Output:
#   parameters equal: True
#   frequencies: torch.float32 and torch.bfloat16
#   angle at position 20,000 off by 1.95 rad
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0
"$work/venv/bin/pip" install -qq --no-compile transformers==5.23.0

cat >"$work/finding.py" <<'PY'
import os

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()

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


folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "model")
model(max_position_embeddings=4096).save_pretrained(folder)
loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
cast = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(torch.bfloat16)
frequencies = loaded.model.rotary_emb.inv_freq, cast.model.rotary_emb.inv_freq
angles = [20_000 * each.double() for each in frequencies]
off = (angles[0] - angles[1]).abs().max().item()
same = all(torch.equal(*pair) for pair in zip(loaded.parameters(), cast.parameters()))
print("parameters equal:", same)
print("frequencies:", frequencies[0].dtype, "and", frequencies[1].dtype)
print(f"angle at position 20,000 off by {off:.2f} rad")
assert same
assert frequencies[0].dtype == torch.float32 and frequencies[1].dtype == torch.bfloat16
assert off > 1
PY
"$work/venv/bin/python" "$work/finding.py"
