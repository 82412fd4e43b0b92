#!/usr/bin/env bash
# Software: datasets 5.2.0 (numpy 2.4.6, pyarrow 26.0.1), Dataset.with_format
# Expected: with_format("numpy") gives each column in the type that it is stored in: a
#   float64 column as float64, an int32 column as int32.
# Seen: float64 comes out as float32 and int32 as int64, without a warning. Seconds since
#   1970 are then off by up to a minute.
# Output:
#   stored:       {'when': Value('float64'), 'rank': Value('int32')}
#   numpy format: float32 int64
#   error:        -50.0 s
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HF_HOME="$work/hf" HF_HUB_OFFLINE=1
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq datasets==5.2.0 pyarrow==26.0.1 numpy==2.4.6

cat >"$work/finding.py" <<'PY'
import datasets
import numpy as np

when = 1_800_000_050.0
rows = datasets.Dataset.from_dict({"when": [when], "rank": np.array([7], dtype=np.int32)})
print("stored:      ", rows.features)
read = rows.with_format("numpy")[:]
print("numpy format:", read["when"].dtype, read["rank"].dtype)
print("error:       ", float(read["when"][0]) - when, "s")
assert rows.features["when"].dtype == "float64" and rows.features["rank"].dtype == "int32"
assert read["when"].dtype == np.float32 and read["rank"].dtype == np.int64
assert abs(float(read["when"][0]) - when) > 40
assert rows[0]["when"] == when
PY
"$work/venv/bin/python" "$work/finding.py"
