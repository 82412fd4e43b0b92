#!/usr/bin/env bash
# Software: transformers 5.23.0, tokenizers 0.23.3
# Expected: truncation=True, max_length=3 is an argument of one call; save_pretrained writes
#   the tokenizer as it was loaded.
# Seen: the call sets truncation in the Rust tokenizer, where it stays, and save_pretrained
#   writes it into tokenizer.json. Every reader that takes this file by itself then cuts
#   each text to 3 tokens without a word. AutoTokenizer hides it, since it resets truncation
#   at each call.
# Output:
#   AutoTokenizer:       [1, 2, 3, 4, 5, 6]
#   Tokenizer.from_file: [1, 2, 3]
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile transformers==5.23.0 tokenizers==0.23.3

cat >"$work/finding.py" <<'PY'
import os

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

folder = os.path.dirname(os.path.abspath(__file__))
text = "one two three four five six"
words = {word: number for number, word in enumerate(["[UNK]", *text.split()])}
backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
backend.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
tokenizer(text, truncation=True, max_length=3)
tokenizer.save_pretrained(folder)
by_transformers = AutoTokenizer.from_pretrained(folder)(text).input_ids
by_tokenizers = Tokenizer.from_file(os.path.join(folder, "tokenizer.json")).encode(text).ids
print("AutoTokenizer:      ", by_transformers)
print("Tokenizer.from_file:", by_tokenizers)
assert len(by_transformers) == 6
assert len(by_tokenizers) == 3
PY
"$work/venv/bin/python" "$work/finding.py"
