#!/usr/bin/env bash
# Software: transformers 4.56.2 and 5.23.0, torch 2.13.0
# Expected: a model's logits do not depend on the attention implementation, beyond rounding, and
#   `scale_attn_by_inverse_layer_idx` of a GPT-2 config (Mistral's and Stanford's GPT-2 have it)
#   scales the scores of each layer.
# Seen: the default of 4.56.2 (sdpa) ignores the key, and only "eager" heeds it. 5.23.0 heeds it in
#   both, so that the same files give other logits after an upgrade, without a warning.
# Output:
#   4.56.2: eager and sdpa differ by 0.20
#   5.23.0: eager and sdpa differ by 0.00
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cat >"$work/finding.py" <<'PY'
import torch
import transformers
from transformers import AutoModelForCausalLM, GPT2Config

config = GPT2Config(
    n_embd=32,
    n_layer=6,
    n_head=4,
    vocab_size=64,
    bos_token_id=1,
    eos_token_id=2,
    scale_attn_by_inverse_layer_idx=True,
)
logits = {}
for name in ("eager", "sdpa"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(0.5 * torch.randn(each.shape))
        logits[name] = model(torch.arange(20)[None]).logits
difference = (logits["eager"] - logits["sdpa"]).abs().max().item()
print(f"{transformers.__version__}: eager and sdpa differ by {difference:.2f}")
assert (difference > 1e-2) == transformers.__version__.startswith("4."), difference
PY
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0 numpy==2.4.6
for version in 4.56.2 5.23.0; do
    "$work/venv/bin/pip" install -qq --no-compile "transformers==$version"
    "$work/venv/bin/python" "$work/finding.py"
done
