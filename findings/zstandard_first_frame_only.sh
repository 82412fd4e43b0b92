#!/usr/bin/env bash
# Software: zstandard 0.25.0 (pyarrow 26.0.1 for comparison)
# Expected: zstandard.decompress returns what `zstd -d` returns: all frames, as
#   gzip.decompress returns all members. Files that grow by appending hold one frame an
#   append.
# Seen: decompress returns the first frame and says nothing of the rest, while
#   stream_reader, zstandard.open and pyarrow read all of them.
# Output:
#   decompress:    b'line 0\n'
#   stream_reader: b'line 0\nline 1\nline 2\n'
#   pyarrow:       b'line 0\nline 1\nline 2\n'
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq zstandard==0.25.0 pyarrow==26.0.1

cat >"$work/finding.py" <<'PY'
import io

import pyarrow as pa
import zstandard

appended = b"".join(zstandard.compress(f"line {number}\n".encode()) for number in range(3))
at_once = zstandard.decompress(appended)
streamed = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(appended)).read()
by_pyarrow = pa.CompressedInputStream(pa.BufferReader(appended), "zstd").read()
print("decompress:   ", at_once)
print("stream_reader:", streamed)
print("pyarrow:      ", by_pyarrow)
assert at_once == b"line 0\n"
assert streamed == by_pyarrow == b"line 0\nline 1\nline 2\n"
PY
"$work/venv/bin/python" "$work/finding.py"
