#!/usr/bin/env bash
# Software: torch 2.13.0, gloo
# Expected: a gloo group reads its peers' addresses from the store in one multi_get, which every
#   store of torch has: TCPStore's round trips to build a group do not grow with its size.
# Seen: each rank gets the addresses of all ranks one by one, and waits before each get, so the
#   queries of a group are quadratic in its size. multi_get is used only with
#   GLOO_ENABLE_STORE_V2_API=1 in the environment, which torch's documentation does not name.
# Output:
#   8 ranks, default: 8 get, 0 multi_get of each rank
#   8 ranks, with the variable: 0 get, 1 multi_get of each rank
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile torch==2.13.0
"$work/venv/bin/pip" install -qq --no-compile numpy==2.4.6

cat >"$work/finding.py" <<'PY'
import socket
import sys
import threading
from collections import Counter
from datetime import timedelta

from torch.distributed import ProcessGroupGloo, TCPStore

RANKS = 8
GET, MULTI_GET = 3, 10  # QueryType of torch/csrc/distributed/c10d/TCPStoreBackend.hpp

server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
counts = Counter()


def forward(source, sink, counts_queries):
    while data := source.recv(1 << 16):
        # A client sends a query and waits for its answer; its first byte is the kind.
        if counts_queries:
            counts[data[0]] += 1
        sink.sendall(data)


def serve(listener):
    while True:
        client, _ = listener.accept()
        upstream = socket.create_connection(("127.0.0.1", server.port))
        for pair in ((client, upstream, True), (upstream, client, False)):
            threading.Thread(target=forward, args=pair, daemon=True).start()


listener = socket.create_server(("127.0.0.1", 0))
threading.Thread(target=serve, args=(listener,), daemon=True).start()
port = listener.getsockname()[1]
stores = [TCPStore("127.0.0.1", port, is_master=False) for _ in range(RANKS)]
counts.clear()
groups = [None] * RANKS


def build(rank):
    groups[rank] = ProcessGroupGloo(stores[rank], rank, RANKS, timedelta(seconds=60))


threads = [threading.Thread(target=build, args=(rank,)) for rank in range(RANKS)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
found = [counts[kind] / RANKS for kind in (GET, MULTI_GET)]
print(f"8 ranks, {sys.argv[1]}: {found[0]:g} get, {found[1]:g} multi_get of each rank")
assert found == ([8, 0] if sys.argv[1] == "default" else [0, 1])
PY
"$work/venv/bin/python" "$work/finding.py" default
GLOO_ENABLE_STORE_V2_API=1 "$work/venv/bin/python" "$work/finding.py" "with the variable"
