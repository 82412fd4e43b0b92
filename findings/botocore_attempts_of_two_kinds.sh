#!/usr/bin/env bash
# Software: botocore 1.44.5 (boto3 1.44.5)
# Expected: AWS_MAX_ATTEMPTS=2 and Config(retries={"max_attempts": 2}) mean the same number
#   of requests.
# Seen: the variable counts all requests, the argument of the same name only those after the
#   first: 2 requests and 3. Config has total_max_attempts for the variable's meaning.
# Output:
#   max_attempts=2 in Config:       3 requests
#   total_max_attempts=2 in Config: 2 requests
#   AWS_MAX_ATTEMPTS=2:             2 requests
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile boto3==1.44.5 botocore==1.44.5

cat >"$work/finding.py" <<'PY'
import http.server
import os
import threading

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError


class Unavailable(http.server.BaseHTTPRequestHandler):
    requests = 0

    def do_GET(self):
        Unavailable.requests += 1
        self.send_response(503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Unavailable)
threading.Thread(target=server.serve_forever, daemon=True).start()
keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret"}
place = {"endpoint_url": f"http://127.0.0.1:{server.server_port}", "region_name": "us-east-1"}


def num_requests(**retries):
    Unavailable.requests = 0
    config = Config(retries={"mode": "standard", **retries})
    try:
        boto3.Session().client("s3", config=config, **place, **keys).list_buckets()
    except ClientError:
        return Unavailable.requests
    raise SystemExit("the server was available")


by_argument = num_requests(max_attempts=2)
by_total = num_requests(total_max_attempts=2)
os.environ["AWS_MAX_ATTEMPTS"] = "2"
by_variable = num_requests()
print("max_attempts=2 in Config:      ", by_argument, "requests")
print("total_max_attempts=2 in Config:", by_total, "requests")
print("AWS_MAX_ATTEMPTS=2:            ", by_variable, "requests")
assert (by_argument, by_total, by_variable) == (3, 2, 2)
PY
"$work/venv/bin/python" "$work/finding.py"
