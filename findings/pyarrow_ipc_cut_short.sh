#!/usr/bin/env bash
# Software: pyarrow 26.0.1 and datasets 5.2.0, Arrow stream files
# Expected: a stream that is cut short is refused, as a Parquet file is.
# Seen: a stream that ends at the end of any record batch is read as whole: the
#   end-of-stream mark is optional, and the number of rows is written nowhere.
#   Dataset.from_file, whose cache files have this format, returns fewer rows.
# Output:
#   whole file, 2976 bytes: 300 rows
#   cut file, 2024 bytes: 200 rows, no error
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export HF_HOME="$work/hf" HF_HUB_OFFLINE=1
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq datasets==5.2.0 pyarrow==26.0.1

cat >"$work/finding.py" <<'PY'
import os

import datasets
import pyarrow as pa

os.chdir(os.path.dirname(os.path.abspath(__file__)))
schema = pa.schema([("token", pa.int64())])
with open("whole.arrow", "wb") as file:
    with pa.ipc.new_stream(file, schema) as writer:
        for batch in range(3):
            writer.write_batch(pa.record_batch({"token": list(range(100))}, schema=schema))
            if batch == 1:
                cut = file.tell()
with open("whole.arrow", "rb") as file:
    content = file.read()
with open("cut.arrow", "wb") as file:
    file.write(content[:cut])
whole = datasets.Dataset.from_file("whole.arrow").num_rows
short = datasets.Dataset.from_file("cut.arrow").num_rows
print(f"whole file, {len(content)} bytes: {whole} rows")
print(f"cut file, {cut} bytes: {short} rows, no error")
assert (whole, short) == (300, 200)
assert pa.ipc.open_stream(content[:cut]).read_all().num_rows == 200
PY
"$work/venv/bin/python" "$work/finding.py"
