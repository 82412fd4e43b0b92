"""On a head that `ray up` started: asks for one node of each type of its file, as a driver asks,
and prints the nodes once all are there.

python -m tests.harness.aws_every_type
"""

import json
import time

import ray

from autohet.driver.ray.requests.scaling import FleetRequest, read_launch_file
from planner.inputs.cluster import cluster_from_document
from tests.harness.waits import HANG_S


def main() -> None:
    ray.init(address="auto", log_to_driver=False)
    document = read_launch_file()
    assert document is not None
    cluster = cluster_from_document(document)
    request = FleetRequest(cluster, document, {kind.name: 1 for kind in cluster.node_types})
    request.ask()
    deadline = time.monotonic() + HANG_S
    while len(nodes := [node for node in ray.nodes() if node["Alive"]]) <= len(cluster.node_types):
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {HANG_S} s there are {[node['Labels'] for node in nodes]}")
        time.sleep(1)
    request.withdraw()
    print(
        json.dumps(
            [
                {
                    "ip": n["NodeManagerAddress"],
                    "labels": n["Labels"],
                    "gpus": n["Resources"].get("GPU", 0),
                }
                for n in nodes
            ]
        )
    )


if __name__ == "__main__":
    main()
