#!/usr/bin/env bash
# Software: datasets 5.2.0 (pyarrow 26.0.1), JSON loader and Dataset.from_list
# Expected: the type of a nested field follows from the data, alike for every way to load
#   it; two shards of one data set can be concatenated.
# Seen: objects with one set of keys load as a struct, objects with several sets of keys as
#   a Json feature. So shards of one data set get unlike types, and concatenate_datasets
#   refuses them. Dataset.from_list has a third answer for the same rows: a struct, in which
#   each absent key is None.
# Output:
#   shard with one tool:  {'city': Value('string')}
#   shard with two tools: Json(decode=True) {'city': 'Rome'}
#   from_list, two tools: {'city': Value('string'), 'path': Value('string')} {'city': 'Rome', 'path': None}
#   concatenate_datasets: The features can't be aligned because the key argum
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HF_HOME="$work/hf" HF_HUB_OFFLINE=1
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq datasets==5.2.0 pyarrow==26.0.1

cat >"$work/finding.py" <<'PY'
import json
import os

import datasets

os.chdir(os.path.dirname(os.path.abspath(__file__)))
datasets.disable_progress_bars()


def load(name, rows):
    with open(name, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return datasets.load_dataset("json", data_files=name, split="train")


one_tool = [{"arguments": {"city": "Rome"}}, {"arguments": {"city": "Oslo"}}]
two_tools = [{"arguments": {"city": "Rome"}}, {"arguments": {"path": "/tmp"}}]
first, second = load("first.jsonl", one_tool), load("second.jsonl", two_tools)
third = datasets.Dataset.from_list(two_tools)
print("shard with one tool: ", first.features["arguments"])
print("shard with two tools:", second.features["arguments"], second[0]["arguments"])
print("from_list, two tools:", third.features["arguments"], third[0]["arguments"])
assert isinstance(first.features["arguments"], dict)
assert isinstance(second.features["arguments"], datasets.Json)
assert second[0]["arguments"] == {"city": "Rome"}
assert third[0]["arguments"] == {"city": "Rome", "path": None}
try:
    datasets.concatenate_datasets([first, second])
    raise SystemExit("the shards were concatenated")
except ValueError as error:
    print("concatenate_datasets:", str(error)[:51])
PY
"$work/venv/bin/python" "$work/finding.py"
