"""A Ray head with the real autoscaler (version 2), whose provider starts nodes as processes of this
machine.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
)
from ray.autoscaler.v2.utils import is_autoscaler_v2
from ray.exceptions import RayError

from autohet.driver.ray import cluster as ray_cluster
from tests.harness.living import end_session
from tests.harness.local_fleet import cluster_document, free_port
from tests.harness.waits import HANG_S
from tests.harness.warm_ray import launcher_environment

PROVIDER = "tests.harness.warm_provider.WarmNodeProvider"
ROOT = Path(__file__).parents[2]


def at_most(**counts: int) -> dict[str, Any]:
    """Worker types of `cluster_document` that all start at no node; their max_workers."""
    kinds = cluster_document()["available_node_types"]
    return {
        name: {**kinds[name], "max_workers": count, "min_workers": 0}
        for name, count in counts.items()
    }


def autoscaled_document(
    gcs_address: str, kinds: Mapping[str, Any], head: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A cluster of these worker types, entries of `available_node_types`, and a head (default: one
    without GPUs).

    The provider is named by its class (`external`): for its own name Ray would read an example file
    that the wheel lacks.
    """
    document = cluster_document()
    types = {FAKE_HEAD_NODE_TYPE: head or document["available_node_types"]["head"], **kinds}
    provider = {
        "type": "external",
        "module": PROVIDER,
        "head_node_id": FAKE_HEAD_NODE_ID,
        "launch_multiple": True,
    }
    lists = (
        "cluster_synced_files",
        "rsync_exclude",
        "rsync_filter",
        "initialization_commands",
        "setup_commands",
    )
    commands = (
        "head_setup_commands",
        "worker_setup_commands",
        "head_start_ray_commands",
        "worker_start_ray_commands",
    )
    return {
        **document,
        "available_node_types": types,
        "max_workers": 8 + sum(kind["max_workers"] for kind in kinds.values()),
        **{name: [] for name in (*lists, *commands)},
        "provider": {**provider, "gcs_address": gcs_address},
        "auth": {},
        "head_node_type": FAKE_HEAD_NODE_TYPE,
        "upscaling_speed": 100.0,
        "idle_timeout_minutes": 60,
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
    }


@contextmanager
def autoscaling_cluster(
    directory: Path, kinds: Mapping[str, Any], head: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """The running cluster's document, with this process connected, also as `autoscaled.yaml` in the
    directory; every process of it is ended afterwards, by its id.
    """
    address = f"{ray._private.services.get_node_ip_address()}:{free_port()}"
    document = autoscaled_document(address, kinds, head)
    path = directory / "autoscaled.yaml"
    path.write_text(json.dumps(document))
    process = _start_head(path, document, directory / "head.log")
    try:
        _connect(address, process)
        # Ray remembers this of the first cluster that a process sees, and asks the wrong one of its
        # two autoscalers in another
        is_autoscaler_v2(fetch_from_server=True)
        yield document
    finally:
        ray.shutdown()
        end_session(process.pid)  # the head, and the nodes that its autoscaler started
        process.wait(10)


def _start_head(path: Path, document: Mapping[str, Any], log: Path) -> subprocess.Popen[bytes]:
    """Start the head as `ray up` would: with the name, labels and GPUs of its node type."""
    address = document["provider"]["gcs_address"]
    head = document["available_node_types"][FAKE_HEAD_NODE_TYPE]
    labels = [f"{name}={value}" for name, value in (head.get("labels") or {}).items()]
    environment = {
        "RAY_NODE_TYPE_NAME": FAKE_HEAD_NODE_TYPE,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        # On a busy machine a head takes longer than Ray's half a minute.
        "RAY_raylet_start_wait_time_s": "120",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(":"),
        **launcher_environment(),
    }
    command = [
        str(Path(sys.executable).parent / "ray"),
        "start",
        "--head",
        "--block",
        f"--port={address.rpartition(':')[2]}",
        "--num-cpus=2",
        f"--num-gpus={head['resources']['GPU']}",
        *([f"--labels={','.join(labels)}"] if labels else []),
        "--include-dashboard=false",
        f"--autoscaling-config={path}",
        "--object-store-memory=80000000",
    ]
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _connect(address: str, head: subprocess.Popen[bytes]) -> None:
    ray_cluster.quieten()
    deadline = time.monotonic() + HANG_S
    while True:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
            return
        except (
            ConnectionError,
            RuntimeError,
            ValueError,
            RayError,
        ) as error:  # what a head that is not up yet answers with differs
            ray.shutdown()
            if time.monotonic() > deadline or head.poll() is not None:
                raise TimeoutError(f"no head at {address}") from error
            time.sleep(0.5)
