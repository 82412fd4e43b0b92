#!/usr/bin/env bash
# Software: pyarrow 26.0.1
# Expected: a Parquet file written with `write_page_checksum=True` is checked when it is read.
# Seen: readers compare no checksum unless they are asked to (`page_checksum_verification=True`): a
#   changed bit in a page is read as another value by `read_table` and by `dataset`.
# Output:
#   read_table: 501, dataset: 501 (written: 500)
#   page_checksum_verification=True: OSError
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile pyarrow==26.0.1

"$work/venv/bin/python" -W ignore - "$work/rows.parquet" <<'PY'
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as dataset
import pyarrow.parquet as parquet

path = Path(sys.argv[1])
table = pa.table({"row": pa.array(range(1000), pa.int32())})
parquet.write_table(
    table, path, write_page_checksum=True, compression="none", use_dictionary=False
)
content = bytearray(path.read_bytes())
place = content.find((500).to_bytes(4, "little") + (501).to_bytes(4, "little"))
content[place] ^= 1
path.write_bytes(content)
plain = parquet.read_table(path)["row"][500].as_py()
scanned = dataset.dataset(path).to_table()["row"][500].as_py()
print(f"read_table: {plain}, dataset: {scanned} (written: 500)")
try:
    parquet.read_table(path, page_checksum_verification=True)
except OSError as error:
    print("page_checksum_verification=True:", type(error).__name__)
else:
    raise SystemExit("a changed page passes the check")
assert plain == scanned == 501
PY
