#!/usr/bin/env bash
# Software: ray 2.60.0
# Expected: a SIGTERM handler that a program has installed stays, or is called by the one that
#   replaces it, since a spot notice, a pod's eviction and `timeout` come as SIGTERM.
# Seen: ray.init() that starts a local cluster replaces it without a word. SIGTERM then raises
#   SystemExit(15) in the main thread, and the program's own handler is never called. One that is
#   installed after ray.init() stays.
# Output:
#   installed afterwards, called: True
#   kept: False  called: False  ended by: SystemExit(15)
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile ray==2.60.0

cat >"$work/finding.py" <<'PY'
import os
import signal
import time

import ray

calls = []


def on_notice(*_):
    calls.append("notice")


def send():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    except SystemExit as ended:
        return f"SystemExit({ended.code})"
    return "nothing"


signal.signal(signal.SIGTERM, on_notice)
ray.init("local", num_cpus=1, include_dashboard=False, logging_level="ERROR")
kept = signal.getsignal(signal.SIGTERM) is on_notice
of_ray = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, on_notice)
assert send() == "nothing"
print("installed afterwards, called:", bool(calls))
assert calls == ["notice"]
calls.clear()
signal.signal(signal.SIGTERM, of_ray)
ended = send()
print("kept:", kept, " called:", bool(calls), " ended by:", ended)
assert (kept, calls, ended) == (False, [], "SystemExit(15)")
os._exit(0)  # Ray's handler has ended its processes
PY
RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0 "$work/venv/bin/python" "$work/finding.py"
