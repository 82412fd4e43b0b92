#!/usr/bin/env bash
# Software: zstandard 0.25.0 and fsspec 2026.9.0 (pyarrow 26.0.1 for comparison)
# Expected: reading a compressed file that was cut off raises, as gzip raises EOFError.
# Seen: stream_reader, copy_stream and fsspec's compression="zstd" return the part that is
#   there and then the end of the file. Only pyarrow raises. A partial download is a shorter
#   data set.
# Output:
#   of 300000 bytes: stream_reader 199985, copy_stream 199985, fsspec 199985
#   pyarrow: Truncated compressed stream
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq zstandard==0.25.0 fsspec==2026.9.0 pyarrow==26.0.1

cat >"$work/finding.py" <<'PY'
import io
import os
import random

import fsspec
import pyarrow as pa
import zstandard

content = random.Random(0).randbytes(300_000)
cut = zstandard.compress(content)[:200_000]
path = os.path.join(os.path.dirname(__file__), "cut.zst")
with open(path, "wb") as file:
    file.write(cut)
by_reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(cut)).read()
read, written = zstandard.ZstdDecompressor().copy_stream(io.BytesIO(cut), io.BytesIO())
with fsspec.open(path, "rb", compression="zstd") as file:
    by_fsspec = file.read()
print(f"of 300000 bytes: stream_reader {len(by_reader)}, copy_stream {written}, fsspec {len(by_fsspec)}")
assert len(by_reader) == written == len(by_fsspec) < 300_000
assert content.startswith(by_reader)
try:
    pa.CompressedInputStream(pa.BufferReader(cut), "zstd").read()
    raise SystemExit("pyarrow read the cut file")
except OSError as error:
    print("pyarrow:", error)
PY
"$work/venv/bin/python" "$work/finding.py"
