"""What a job and its cluster are refused for, in one sentence, before anything waits."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import yaml

from autohet.driver.checkpoints.cleaning import Retention
from autohet.driver.checkpoints.durable import Durable, RunFacts
from autohet.driver.job import checks, cluster_choice
from autohet.driver.job.cluster_choice import find_document
from autohet.driver.job.run import train
from autohet.driver.ray import cluster as ray_cluster
from autohet.driver.ray.cluster import RayNode
from autohet.driver.ray.this_machine import announcement, launcher_document, local_document
from autohet.driver.ray.workers import WorkerSettings
from autohet.driver.ray.workforce import RayWorkforce
from autohet.runtime.job import Job, ModelSection
from planner.errors import ConfigError
from planner.inputs.cluster import (
    Cluster,
    cluster_from_document,
    cluster_from_yaml,
    node_type_from_labels,
)
from recovery.storage.open import open_storage
from tests.harness.local_fleet import cluster_document, make_job
from tests.harness.tiny_models import TINY

AWS = "cluster_configs/aws-mixed-spot.yaml"
MOUNTS = """\
overlay / overlay rw 0 0
/dev/nvme1n1 /data ext4 rw 0 0
fs-1.efs.us-east-1.amazonaws.com:/ /data/shared\\040files nfs4 rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "shared"),
    [
        ("/home/x", False),
        ("/data/runs", False),
        ("/data/shared files", True),
        ("/data/shared files/a", True),
    ],
)
def test_a_shared_file_system_is_told_by_its_mount(tmp_path: Path, path: str, shared: bool) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    assert checks.is_shared(Path(path), mounts) is shared


@pytest.mark.parametrize(
    ("model_type", "router_balance", "message"),
    [
        ("llama", "sequence", "model_type 'llama' has no routers"),
        ("llama", "bias", "model_type 'llama' has no routers"),
        ("mixtral", "bias", "no router with a correction bias; choose sequence"),
        ("deepseek_v3", "bias", None),
    ],
)
def test_a_balance_needs_routers_that_have_it(
    tmp_path: Path, model_type: str, router_balance: str, message: str | None
) -> None:
    job = make_job(tmp_path, training={"router_balance": router_balance})
    job = replace(job, model=ModelSection(config=TINY[model_type]))
    if message is None:
        checks.check_fit(job)
        return
    with pytest.raises(ConfigError, match=message):
        checks.check_fit(job)


def test_several_machines_want_shared_storage(tmp_path: Path) -> None:
    job = make_job(tmp_path, checkpoint={"storage": None})
    checks.check_shared_storage(job, None, {"10.0.0.1"})
    checks.check_shared_storage(job, cluster_document(big=2), set())
    with pytest.raises(ConfigError, match=r"checkpoint\.storage is not given.*s3://"):
        checks.check_shared_storage(job, None, {"10.0.0.1", "10.0.0.2"})
    with pytest.raises(ConfigError, match=r"checkpoint\.storage is not given"):
        checks.check_shared_storage(job, {"provider": {"type": "aws"}}, set())
    there = make_job(tmp_path, checkpoint={"storage": f"file://{Path.cwd()}/here"})
    with pytest.raises(ConfigError, match=r"checkpoint\.storage is 'file:///.*/here'"):
        checks.check_shared_storage(there, None, {"10.0.0.1", "10.0.0.2"})
    to_s3 = make_job(tmp_path, checkpoint={"storage": "s3://bucket/prefix"})
    checks.check_shared_storage(to_s3, None, {"10.0.0.1", "10.0.0.2"})
    mistyped = make_job(tmp_path, checkpoint={"storage": "s3:/bucket/prefix"})
    with pytest.raises(ConfigError, match=r"checkpoint\.storage s3:/bucket/prefix.*two slashes"):
        checks.check_shared_storage(mistyped, None, set())


def test_a_further_kind_of_storage_says_itself_whether_it_is_on_one_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = make_job(tmp_path, checkpoint={"storage": "new://place"})
    everywhere = SimpleNamespace(local_path=None)
    monkeypatch.setattr(checks, "parse_address", lambda uri: everywhere)
    checks.check_shared_storage(job, None, {"10.0.0.1", "10.0.0.2"})


def one_format_job(directory: Path, formats: Literal["auto", "off"] = "off") -> Job:
    """Return a job in bf16 on GPUs, whose types compute nothing else."""
    training = {"precision": "bf16", "device": "auto"}
    made = make_job(directory, training=training)
    parallelism = replace(made.parallelism, compute_formats=formats)
    return replace(made, emulation=None, parallelism=parallelism)


@pytest.mark.parametrize(
    ("gpu_types", "message"),
    [
        ((), r"none of the 3 living nodes .* has a GPU, and no autoscaler"),
        (("T4", "T4"), r"bf16, which a T4 cannot compute"),
        (("T4", "A10G"), None),
    ],
)
def test_a_cluster_without_gpus_for_the_job_is_refused_unless_an_autoscaler_may_bring_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_types: tuple[str, ...], message: str | None
) -> None:
    job = one_format_job(tmp_path)
    nodes = [RayNode(gpu, "", "g", 1, {"ray.io/accelerator-type": gpu}) for gpu in gpu_types]
    monkeypatch.setattr(ray_cluster, "living_nodes", lambda: nodes)
    monkeypatch.setattr(ray_cluster, "count_nodes", lambda: 3)
    monkeypatch.setattr(ray_cluster, "autoscaler_runs", lambda: False)
    if message is not None:
        with pytest.raises(ConfigError, match=message):
            checks.check_gpus(job, 0.0)
        monkeypatch.setattr(ray_cluster, "autoscaler_runs", lambda: True)
    checks.check_gpus(job, 0.0)
    monkeypatch.setattr(ray_cluster, "autoscaler_runs", lambda: False)
    if gpu_types:
        checks.check_gpus(one_format_job(tmp_path, "auto"), 0.0)


def test_a_node_that_cannot_compute_the_precision_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = one_format_job(tmp_path)
    cluster = cluster_from_yaml("cluster_configs/aws-cheap-spot.yaml")
    durable = Durable(
        open_storage(str(tmp_path / "storage")), RunFacts("job", {}, {}), Retention(1)
    )
    workforce = RayWorkforce(job, "run", durable, cluster, WorkerSettings(1))
    try:
        for name in ("g4dn", "g5"):
            workforce.observer.tracked.track(RayNode(name, "10.0.0.1", name, 1, {}), 0.0)
        assert list(workforce.observer.nodes) == ["g5-0"]
    finally:
        workforce.close(at_once=True)
    assert "is not used: training.precision is bf16, which a T4 cannot compute" in caplog.text


def test_a_job_whose_cluster_has_no_type_for_it_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    job = one_format_job(tmp_path)
    document = yaml.safe_load(Path("cluster_configs/aws-cheap-spot.yaml").read_text())
    document["available_node_types"] = {
        name: document["available_node_types"][name] for name in ("head", "g4dn")
    }
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(
        ConfigError,
        match=r"bf16, which g4dn \(T4\) cannot compute; set training\.precision to fp32",
    ):
        train(job, cluster_path=str(path), address=None, events_path=None, show=lambda *_: None)


@pytest.fixture
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_cluster, "runs_here", lambda: False)
    monkeypatch.setattr(cluster_choice, "read_launch_file", lambda: None)


@pytest.mark.usefixtures("no_cluster")
def test_where_no_cluster_runs_this_machine_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path)
    document = find_document(job, None, None)
    assert document is not None
    (kind,) = cluster_from_document(document).node_types
    assert kind.gpu_type == "CPU"
    assert kind.gpu_memory_bytes > 1 << 30
    assert find_document(job, AWS, None)["provider"]["type"] == "aws"
    assert find_document(job, None, "10.0.0.1:6379") is None, (
        "a named cluster is never replaced by this machine"
    )
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert find_document(job, None, None) is None
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setattr(ray_cluster, "runs_here", lambda: True)
    assert find_document(job, None, None) is None


def test_the_gpus_of_this_machine_have_the_catalogues_links() -> None:
    document = launcher_document("A10G", 4, 22 << 30, 48)
    cluster = cluster_from_document(document)
    (kind,) = cluster.node_types
    assert (kind.gpu_type, kind.num_gpus, kind.max_nodes) == ("A10G", 4, 1)
    assert cluster.notes == (), "the head without GPUs is no news on one machine"
    assert kind.intra_node_bytes_per_s == 256e9 / 8
    assert announcement(document).endswith("4 workers for its A10G GPUs")
    assert "on its CPU" in announcement(local_document("cpu"))


def test_a_living_node_has_the_host_memory_of_its_label_or_its_group() -> None:
    """A pod's group says less than the machine has; a node that no file knows has its instance
    type's.
    """
    labels = {
        "autohet.io/gpu-type": "A10G",
        "autohet.io/gpu-memory-gib": "22",
        "autohet.io/intra-node-gbps": "256",
        "autohet.io/inter-node-gbps": "10",
    }
    group = node_type_from_labels("pods", {**labels, "autohet.io/host-memory-gib": "12"}, 1)
    node = RayNode("id", "10.0.0.1", "pods", 1, labels)
    of = [
        ray_cluster.node_type_of(node, Cluster("c", (group,)), "g5.xlarge"),
        ray_cluster.node_type_of(
            replace(node, labels={**labels, "autohet.io/host-memory-gib": "10"}),
            Cluster("c", (group,)),
            "g5.xlarge",
        ),
        ray_cluster.node_type_of(node, None, "g5.xlarge"),
        ray_cluster.node_type_of(node, None),
    ]
    assert [kind.host_memory_bytes for kind in of] == [12 << 30, 10 << 30, 16 << 30, None]
