#!/usr/bin/env bash
# Software: pyarrow 26.0.1, pickle of slices
# Expected: a slice of one value out of a million pickles to some bytes: its nbytes says 8.
# Seen: the pickle carries the whole buffer, 8 MB for one value. A table that is sliced for
#   1,000 worker processes is sent 1,000 times over. take of the same value makes a small
#   one.
# Output:
#   slice of one value: nbytes 8, pickled 8000166 bytes
#   the same by take:   pickled 159 bytes
#   table of one row:   pickled 8000294 bytes
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq pyarrow==26.0.1

cat >"$work/finding.py" <<'PY'
import pickle

import pyarrow as pa

column = pa.array(range(1_000_000))
one = column.slice(500_000, 1)
sliced = len(pickle.dumps(one))
taken = len(pickle.dumps(column.take([500_000])))
table = len(pickle.dumps(pa.table({"x": column}).slice(0, 1)))
print(f"slice of one value: nbytes {one.nbytes}, pickled {sliced} bytes")
print(f"the same by take:   pickled {taken} bytes")
print(f"table of one row:   pickled {table} bytes")
assert one.nbytes == 8
assert sliced > 8_000_000 and table > 8_000_000
assert taken < 1_000
PY
"$work/venv/bin/python" "$work/finding.py"
