#!/usr/bin/env bash
# Software: datasets 5.2.0 (pandas 3.1.1), CSV loader
# Expected: a row with more cells than the header, such as a prompt with a comma and no quotes, is
#   an error, as it is where other rows have the right number.
# Seen: if the first row has one cell more, its first cell becomes an index and all columns are
#   shifted by one: the prompt is the rest of the sentence. No warning.
# Output:
#   first row too long: {'prompt': ' then?', 'completion': 'A dog', '__index_level_0__': 'What is it'}
#   a later row too long: DatasetGenerationError
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HF_HOME="$work/hf" HF_HUB_OFFLINE=1
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq datasets==5.2.0 pyarrow==26.0.1 pandas==3.1.1

cat >"$work/finding.py" <<'PY'
import logging
import os

import datasets

os.chdir(os.path.dirname(os.path.abspath(__file__)))
datasets.disable_progress_bars()
logging.disable(logging.CRITICAL)
HEADER = "prompt,completion\n"
LONG = "What is it, then?,A dog\n"


def load(*rows):
    with open("pairs.csv", "w") as file:
        file.write(HEADER + "".join(rows))
    return datasets.load_dataset("csv", data_files="pairs.csv", split="train")


shifted = load(LONG, LONG)[0]
print("first row too long:", shifted)
try:
    later = str(load("Why?,So\n", LONG)[0])
except datasets.exceptions.DatasetGenerationError as error:
    later = type(error).__name__
print("a later row too long:", later)
assert shifted["prompt"] == " then?" and shifted["completion"] == "A dog"
assert later == "DatasetGenerationError"
PY
"$work/venv/bin/python" "$work/finding.py"
