#!/usr/bin/env bash
# Software: pyarrow 26.0.1, S3FileSystem (moto 5.2.5 as the store)
# Expected: an exception inside `with fs.open_output_stream(...)` leaves no object: S3 shows
#   an object only after its upload is completed, so the stream aborts it.
# Seen: leaving the block closes the stream, and closing completes the upload: the half of
#   the data that was written stands under the final key, and looks whole.
# Output:
#   raised in the block: the source of the second half is gone
#   object in the store: b'first half, '
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile pyarrow==26.0.1 moto[server]==5.2.5 boto3==1.44.5

cat >"$work/finding.py" <<'PY'
import logging

import boto3
from moto.server import ThreadedMotoServer
from pyarrow.fs import S3FileSystem

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
try:
    address = "%s:%d" % server.get_host_and_port()
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
    s3 = boto3.client("s3", endpoint_url="http://" + address, region_name="us-east-1", **keys)
    s3.create_bucket(Bucket="bucket")
    fs = S3FileSystem(
        access_key="key", secret_key="secret", endpoint_override=address, scheme="http"
    )
    try:
        with fs.open_output_stream("bucket/shard") as stream:
            stream.write(b"first half, ")
            raise RuntimeError("the source of the second half is gone")
    except RuntimeError as error:
        print("raised in the block:", error)
    content = s3.get_object(Bucket="bucket", Key="shard")["Body"].read()
    print("object in the store:", content)
    assert content == b"first half, "
finally:
    server.stop()
PY
"$work/venv/bin/python" "$work/finding.py"
