#!/usr/bin/env bash
# Software: ray 2.60.0
# Expected: with a port for each of a node's agents (`ray start --dashboard-agent-listen-port
#   --metrics-export-port --runtime-env-agent-port`, RayParams.metrics_agent_port) a raylet knows all
#   of them, and waits for no agent to name one, as for ports that are left to be chosen.
# Seen: the raylet has an option for the port at which the dashboard agent listens, with default 0
#   (to be chosen), but Ray's Python tells that port to the agent alone. The raylet begins to serve
#   only once the agent, which imports for seconds, has written the port into a file; the other
#   three it is told.
# Output:
#   option of the raylet: dashboard_agent_listen_port default 0
#   told to the raylet: metrics_agent metrics_export runtime_env_agent
#   told to the agent: listen
#   written by the agent before the node served: True
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --no-compile "ray[default]==2.60.0"

cat >"$work/finding.py" <<'PY'
import re
import socket
import subprocess
from pathlib import Path

from ray._private import services
from ray.cluster_utils import Cluster

help_text = subprocess.run([services.RAYLET_EXECUTABLE, "--help"], capture_output=True, text=True)
option = re.search(r"-(dashboard_agent_listen_port) .*?(default): (\d)", help_text.stdout, re.S)
print("option of the raylet:", *option.groups())
assert option[3] == "0"


def free_port():
    with socket.socket() as chosen:
        chosen.bind(("", 0))
        return chosen.getsockname()[1]


names = ("dashboard_agent_listen", "metrics_agent", "metrics_export", "runtime_env_agent")
ports = {name: free_port() for name in names}
head = {f"{name}_port": port for name, port in ports.items()}
cluster = Cluster(initialize_head=True, head_node_args=head | {"include_dashboard": False})
node = cluster.head_node
process_id = node.all_processes["raylet"][0].process.pid
arguments = Path(f"/proc/{process_id}/cmdline").read_text().split("\0")
own = [each for each in arguments if "_command=" not in each]
told = {name for name in names if any(each.endswith(f"={ports[name]}") for each in own)}
print("told to the raylet:", *sorted(told))
assert told == set(names) - {"dashboard_agent_listen"}
listen = f"--listen-port={ports['dashboard_agent_listen']}"
assert any(listen in each for each in arguments if "_command=" in each)
print("told to the agent: listen")
written = list(Path(node.get_session_dir_path()).glob("dashboard_agent_listen_port_*"))
print("written by the agent before the node served:", bool(written))
assert len(written) == 1
cluster.shutdown()
PY
RAY_AUTH_MODE=disabled RAY_USAGE_STATS_ENABLED=0 "$work/venv/bin/python" "$work/finding.py"
