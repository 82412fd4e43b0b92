#!/usr/bin/env bash
# Software: datasets 5.2.0 (pyarrow 26.0.1), JSON loader
# Expected: a JSON string stays a string: a chat message that says 2024-01-01 reaches the
#   tokenizer as those ten characters.
# Seen: where all values of a field look like dates, the field becomes a timestamp, also
#   inside lists of messages. Each value comes out as a datetime object, printed as
#   2024-01-01 00:00:00. One other text in the field, and all stay strings.
# Output:
#   all answers are dates: datetime.datetime(2024, 1, 1, 0, 0)
#   one answer is text:    '2024-01-01'
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HF_HOME="$work/hf" HF_HUB_OFFLINE=1
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq datasets==5.2.0 pyarrow==26.0.1

cat >"$work/finding.py" <<'PY'
import datetime
import json
import os

import datasets

os.chdir(os.path.dirname(os.path.abspath(__file__)))
datasets.disable_progress_bars()


def content_after_loading(answers):
    with open("chat.jsonl", "w") as file:
        for answer in answers:
            file.write(json.dumps({"messages": [{"role": "assistant", "content": answer}]}) + "\n")
    rows = datasets.load_dataset("json", data_files="chat.jsonl", split="train")
    return rows[0]["messages"][0]["content"]


only_dates = content_after_loading(["2024-01-01", "2025-03-02"])
with_text = content_after_loading(["2024-01-01", "2025-03-02", "I do not know."])
print("all answers are dates:", repr(only_dates))
print("one answer is text:   ", repr(with_text))
assert only_dates == datetime.datetime(2024, 1, 1)
assert with_text == "2024-01-01"
PY
"$work/venv/bin/python" "$work/finding.py"
