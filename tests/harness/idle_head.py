"""scripts/aws/autostop beside a real Ray head with its job API: run inside namespaces of its own,
prints as JSON when the script takes the head for used.

unshare --net --pid --fork --kill-child --mount-proc python -m tests.harness.idle_head DIRECTORY
"""

import json
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from ray.job_submission import JobStatus, JobSubmissionClient

from tests.harness.slurm_cluster import NETWORK, ROOT
from tests.harness.waits import wait_until

NOBODY = "http://127.0.0.1:9"


def scenario(directory: Path) -> dict[str, bool]:
    for line in NETWORK:
        subprocess.run(["ip", *line.split()], check=True)
    os.environ |= {"RAY_TMPDIR": str(directory), "RAY_raylet_start_wait_time_s": "120"}
    path = str(ROOT / "scripts" / "aws" / "autostop")
    autostop: Any = SourceFileLoader("autostop", path).load_module()
    found = {"without Ray": autostop.in_use()}
    start = ["ray", "start", "--head", "--num-cpus=2", f"--temp-dir={directory}"]
    subprocess.run(start, check=True, stdout=sys.stderr)
    clients: list[JobSubmissionClient] = []

    def answers() -> bool:
        try:
            clients[:] = [JobSubmissionClient(autostop.DASHBOARD)]
            clients[0].list_jobs()
        except Exception:  # noqa: BLE001
            return False
        return True

    wait_until(answers, "the dashboard")
    (client,) = clients
    found["idle"] = autostop.in_use()
    job = client.submit_job(entrypoint="sleep 100000")
    found["submitted"] = autostop.in_use()
    wait_until(lambda: client.get_job_status(job) == JobStatus.RUNNING, "the job")
    found["running"] = autostop.in_use()
    dashboard, autostop.DASHBOARD = autostop.DASHBOARD, NOBODY
    found["running, and no dashboard answers"] = autostop.in_use()
    autostop.DASHBOARD = dashboard
    client.stop_job(job)
    wait_until(lambda: client.get_job_status(job).is_terminal(), "its end")
    found["stopped"] = autostop.in_use()
    autostop.DASHBOARD = NOBODY
    wait_until(lambda: not autostop.in_use(), "its supervisor's end")
    found["stopped, and no dashboard answers"] = autostop.in_use()
    return found


if __name__ == "__main__":
    print(json.dumps(scenario(Path(sys.argv[1]))))
