#!/usr/bin/env bash
# Software: transformers 5.23.0, torch 2.13.0, Phi-3 with longrope
# Expected: the rows of a padded batch do not depend on each other: the logits of a short
#   row are the same alone and beside a long row.
# Seen: the long factors are taken for the whole batch as soon as one row is longer than the
#   original context, so that a short row gets other logits beside a long one. Packing and
#   batch sizes thus change what is trained.
# Output:
#   beside a row of 16 tokens: difference 0.0000; beside one of 24: 3.5059
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0
"$work/venv/bin/pip" install -qq --no-compile transformers==5.23.0

cat >"$work/finding.py" <<'PY'
import torch
from transformers import Phi3Config, Phi3ForCausalLM

torch.manual_seed(0)
rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4}
rope |= {"long_factor": [4.0] * 4, "original_max_position_embeddings": 16}
config = Phi3Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=64,
    original_max_position_embeddings=16,
    pad_token_id=0,
    initializer_range=0.2,
    rope_parameters=rope,
)
network = Phi3ForCausalLM(config).eval()
short = torch.randint(1, 64, (1, 8))


def beside(length):
    neighbour = torch.randint(1, 64, (1, length))
    padded = torch.nn.functional.pad(short, (0, length - 8))
    batch = torch.cat([padded, neighbour])
    with torch.no_grad():
        logits = network(batch, attention_mask=(batch != 0).long()).logits[0, :8]
        return (logits - network(short).logits[0]).abs().max().item()


near, far = beside(16), beside(24)
print(f"beside a row of 16 tokens: difference {near:.4f}; beside one of 24: {far:.4f}")
assert near < 1e-5
assert far > 1e-2
PY
"$work/venv/bin/python" "$work/finding.py"
