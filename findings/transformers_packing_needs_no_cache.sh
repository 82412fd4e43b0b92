#!/usr/bin/env bash
# Software: transformers 5.23.0, torch 2.13.0
# Expected: position ids that begin again at 0 keep packed documents apart in the model's
#   plain call, or they do not; use_cache is a matter of speed alone.
# Seen: they do only with use_cache=False. The default call makes a cache, and then the
#   second document attends to the first, in training mode too. Gradient checkpointing turns
#   the cache off, and with it the leak. A mask of ones, which many collators add, brings
#   the leak back.
# Output:
#   second document against the same one alone, largest difference of logits:
#   plain call 0.19, use_cache=False 0.00, with a mask of ones 0.19
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0
"$work/venv/bin/pip" install -qq --no-compile transformers==5.23.0

cat >"$work/finding.py" <<'PY'
import torch
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


packed = torch.randint(0, 64, (1, 10), generator=torch.Generator().manual_seed(1))
positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4]])
network = model()
with torch.no_grad():
    alone = network(packed[:, 5:], use_cache=False).logits


def leak(**arguments):
    with torch.no_grad():
        logits = network(packed, position_ids=positions, **arguments).logits
    return (logits[:, 5:] - alone).abs().max().item()


default, no_cache = leak(), leak(use_cache=False)
ones = leak(use_cache=False, attention_mask=torch.ones_like(packed))
print("second document against the same one alone, largest difference of logits:")
print(f"plain call {default:.2f}, use_cache=False {no_cache:.2f}, with a mask of ones {ones:.2f}")
assert default > 0.01 and ones > 0.01
assert no_cache < 1e-5
PY
"$work/venv/bin/python" "$work/finding.py"
