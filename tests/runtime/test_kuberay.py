"""The KubeRay files: as KubeRay's schema and Ray's own autoscaler read them, the fleet of the AWS
file, and SIGTERM as a notice.
"""

import copy
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.kuberay import node_provider

from autohet.driver.ray.cluster_file import read_document
from autohet.driver.ray.requests.node_requests import node_request
from planner.errors import ConfigError
from planner.inputs.cluster import cluster_from_document, cluster_from_yaml
from planner.inputs.kuberay import HEAD, as_launcher_document

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "cluster_configs"
CLUSTER, JOB = CONFIGS / "kuberay-raycluster.yaml", CONFIGS / "kuberay-rayjob.yaml"
ALONE = ["unshare", "--fork", "--pid", "--kill-child", "--mount-proc"]


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


# Names and types of fields: KubeRay 1.5's custom resource definitions
# (ray-operator/config/crd/bases/ray.io_rayclusters.yaml and ray.io_rayjobs.yaml, described in
# docs/reference/api.md) and Kubernetes 1.28's core/v1 (PodSpec, Container): those that files may
# use. The API server drops or refuses every other name.
def mapping(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def each(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of}


TEXT, WHOLE, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
QUANTITIES = {
    "type": "object",
    "additionalProperties": {"anyOf": [WHOLE, {**TEXT, "pattern": r"^\d+(\.\d+)?(m|[kMGTP]i?)?$"}]},
}
RESOURCES = mapping(limits=QUANTITIES, requests=QUANTITIES)
ENV = each(
    mapping(
        "name",
        name=TEXT,
        value=TEXT,
        valueFrom=mapping(secretKeyRef=mapping("key", name=TEXT, key=TEXT)),
    )
)
HOOK = mapping(exec=mapping(command=each(TEXT)))
CONTAINER = mapping(
    "name",
    name=TEXT,
    image=TEXT,
    imagePullPolicy=TEXT,
    command=each(TEXT),
    args=each(TEXT),
    env=ENV,
    resources=RESOURCES,
    lifecycle=mapping(preStop=HOOK, postStart=HOOK),
    volumeMounts=each(mapping("name mountPath", name=TEXT, mountPath=TEXT, readOnly=FLAG)),
    securityContext=mapping(
        allowPrivilegeEscalation=FLAG, capabilities=mapping(drop=each(TEXT), add=each(TEXT))
    ),
)
TOLERATION = mapping(
    key=TEXT,
    operator={"enum": ["Exists", "Equal"]},
    value=TEXT,
    effect=TEXT,
    tolerationSeconds=WHOLE,
)
POD = mapping(
    "containers",
    containers=each(CONTAINER),
    restartPolicy={"enum": ["Always", "Never", "OnFailure"]},
    nodeSelector=TEXTS,
    terminationGracePeriodSeconds=WHOLE,
    tolerations=each(TOLERATION),
    serviceAccountName=TEXT,
    securityContext=mapping(
        runAsNonRoot=FLAG,
        runAsUser=WHOLE,
        runAsGroup=WHOLE,
        fsGroup=WHOLE,
        seccompProfile=mapping("type", type=TEXT),
    ),
    volumes=each(mapping("name", name=TEXT, emptyDir=mapping(medium=TEXT, sizeLimit=TEXT))),
)
TEMPLATE = mapping(metadata=mapping(labels=TEXTS, annotations=TEXTS), spec=POD)
GROUP = {"labels": TEXTS, "resources": QUANTITIES, "rayStartParams": TEXTS, "template": TEMPLATE}
AUTOSCALER = mapping(
    resources=RESOURCES,
    image=TEXT,
    imagePullPolicy=TEXT,
    idleTimeoutSeconds=WHOLE,
    version={"enum": ["v1", "v2"]},
    env=ENV,
    upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
)
SPEC = mapping(
    "headGroupSpec",
    rayVersion=TEXT,
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=AUTOSCALER,
    suspend=FLAG,
    managedBy=TEXT,
    headServiceAnnotations=TEXTS,
    headGroupSpec=mapping("template", serviceType=TEXT, enableIngress=FLAG, **GROUP),
    workerGroupSpecs=each(
        mapping(
            "groupName minReplicas maxReplicas template",
            groupName=TEXT,
            replicas=WHOLE,
            minReplicas=WHOLE,
            maxReplicas=WHOLE,
            numOfHosts=WHOLE,
            idleTimeoutSeconds=WHOLE,
            suspend=FLAG,
            **GROUP,
        )
    ),
)
JOB_SPEC = mapping(
    entrypoint=TEXT,
    runtimeEnvYAML=TEXT,
    clusterSelector=TEXTS,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
    submitterPodTemplate=TEMPLATE,
    rayClusterSpec=SPEC,
    shutdownAfterJobFinishes=FLAG,
    ttlSecondsAfterFinished=WHOLE,
    backoffLimit=WHOLE,
    activeDeadlineSeconds=WHOLE,
    jobId=TEXT,
    suspend=FLAG,
    metadata=TEXTS,
)


@pytest.mark.parametrize(
    ("path", "kind", "spec"), [(CLUSTER, "RayCluster", SPEC), (JOB, "RayJob", JOB_SPEC)]
)
def test_the_files_fit_kuberays_schema(path: Path, kind: str, spec: dict[str, Any]) -> None:
    top = mapping(
        "apiVersion kind metadata spec",
        apiVersion={"const": "ray.io/v1"},
        kind={"const": kind},
        metadata=mapping(
            "name", name={**TEXT, "pattern": "^[a-z0-9-]{1,50}$"}, namespace=TEXT, labels=TEXTS
        ),
        spec=spec,
    )
    jsonschema.validate(load(path), top)
    wrong = copy.deepcopy(load(path))
    wrong["spec"]["workerGroups"] = []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, top)


def test_rays_autoscaler_and_the_planner_read_the_same_groups() -> None:
    from ray.autoscaler._private.kuberay.autoscaling_config import (
        _derive_autoscaling_config_from_ray_cr,
    )

    document = load(CLUSTER)
    document["metadata"]["namespace"] = "default"  # as the API server gives it
    theirs = _derive_autoscaling_config_from_ray_cr(copy.deepcopy(document))["available_node_types"]
    ours = as_launcher_document(document, "the file")["available_node_types"]
    assert ours.keys() == theirs.keys()
    for name, kind in theirs.items():
        for key in ("CPU", "GPU"):
            assert ours[name]["resources"].get(key, 0) == kind["resources"].get(key, 0), name
        assert (ours[name]["min_workers"], ours[name]["max_workers"]) == (
            kind["min_workers"],
            kind["max_workers"],
        )
        assert kind["labels"].items() <= ours[name]["labels"].items()


def test_it_is_the_fleet_of_the_aws_file() -> None:
    def facts(path: Path) -> dict[str, tuple[object, ...]]:
        return {
            k.name: (
                k.gpu_type,
                k.num_gpus,
                k.gpu_memory_bytes,
                k.inter_node_bytes_per_s,
                k.usd_per_hour,
                k.spot,
                k.max_nodes,
            )
            for k in cluster_from_yaml(path).node_types
        }

    assert facts(CLUSTER) == facts(CONFIGS / "aws-mixed-spot.yaml")


def test_a_pod_has_the_memory_that_it_may_use() -> None:
    """Of its machine a part: snapshots in its tmpfs count to it.

    What is no quantity says nothing, and a label counts before it.
    """
    document = load(CLUSTER)
    group = document["spec"]["workerGroupSpecs"][0]

    def of_the_group() -> int | None:
        kinds = cluster_from_document(as_launcher_document(document, "the file")).node_types
        return {kind.name: kind.host_memory_bytes for kind in kinds}[group["groupName"]]

    assert of_the_group() == 1000 << 30
    for quantity, num_bytes in (
        ("2000M", 2e9),
        ("1.1Ti", 1.1 * 2**40),
        ("3000000000", 3e9),
        ("1e12", 1e12),
        ("1e", 1152 * 2**30),
    ):
        limits = {"cpu": "8", "memory": quantity, "nvidia.com/gpu": "8"}
        group["template"]["spec"]["containers"][0]["resources"] = {"limits": limits}
        assert of_the_group() == pytest.approx(num_bytes, rel=1e-3), quantity
    gpus = {"cpu": "8", "nvidia.com/gpu": "8"}
    for resources in (
        {"requests": {"memory": "8Gi"}, "limits": gpus},
        {"limits": {"memory": "0", **gpus}},
    ):
        group["template"]["spec"]["containers"][0]["resources"] = (
            resources  # what is asked for is no limit
        )
        assert of_the_group() == 1152 * 2**30
    group["labels"]["autohet.io/host-memory-gib"] = "64"
    assert of_the_group() == 64 << 30


def test_pods_have_accounts_by_which_they_reach_storage_and_those_are_explained() -> None:
    """Workers write checkpoints and the driver reads them; only the head's account may scale the
    cluster.
    """
    spec = load(CLUSTER)["spec"]
    workers = {
        group["template"]["spec"]["serviceAccountName"] for group in spec["workerGroupSpecs"]
    }
    assert (spec["headGroupSpec"]["template"]["spec"]["serviceAccountName"], workers) == (
        "autohet-head",
        {"autohet-worker"},
    )
    told = (CONFIGS / "README.md").read_text()
    (command,) = re.findall(
        r"aws eks create-pod-identity-association (.*?)\n    done", told, re.DOTALL
    )
    assert re.findall(r"--([a-z-]+)", command) == [
        "cluster-name",
        "namespace",
        "service-account",
        "role-arn",
    ]
    trust = json.loads((CONFIGS / "aws" / "trust-policy.json").read_text())["Statement"]
    (pods,) = [
        entry for entry in trust if entry["Principal"]["Service"] == "pods.eks.amazonaws.com"
    ]
    assert pods["Action"] == ["sts:AssumeRole", "sts:TagSession"], "as EKS's Pod Identity wants it"


def test_a_stopped_job_has_time_for_its_checkpoint() -> None:
    """A job's supervisor runs on the head and has the environment of its Ray."""
    (head,) = load(CLUSTER)["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
    assert {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "600"} in head["env"]


def test_the_token_is_in_no_programs_arguments() -> None:
    for path in (CONFIGS / "README.md", CLUSTER, JOB):
        text = path.read_text()
        assert "from-literal" not in text, path
        assert not re.search(r"\$\(ray get-auth-token", text), path
    assert "--from-file=auth_token=$HOME/.ray/auth_token" in (CONFIGS / "README.md").read_text()


def test_the_images_context_leaves_out_what_git_does() -> None:
    """COPY takes what is left: an environment in .venv has gigabytes."""
    ignored = {
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if not line.startswith("#")
    }
    assert ignored == {".git"} | {
        f"**/{line.rstrip('/')}" for line in (ROOT / ".gitignore").read_text().splitlines()
    }
    assert "COPY --chown=ray:users . /opt/autohet" in (CONFIGS / "kuberay.Dockerfile").read_text()


def test_nodes_are_asked_for_by_their_groups_labels() -> None:
    document = as_launcher_document(load(CLUSTER), "the file")
    cluster = cluster_from_document(document)
    request = node_request(cluster, document, {"g6e": 1})
    (bundle,), (selector,) = request.bundles, request.selectors
    assert bundle == {"GPU": 4, "CPU": 44}
    assert selector == {"ray.io/market-type": "spot", "ray.io/accelerator-type": "L40S"}


def test_a_pod_is_not_killed_before_its_notice_is_over() -> None:
    for group in load(CLUSTER)["spec"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        env = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
        assert (
            float(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
            < pod["terminationGracePeriodSeconds"]
            <= 120
        )  # spot: two minutes
        assert pod["restartPolicy"] == "Never"
        assert pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == hook()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda d: d["spec"]["workerGroupSpecs"][0].pop("maxReplicas"),
            "worker group 'p4d' has no maxReplicas",
        ),
        (lambda d: d["spec"]["workerGroupSpecs"][1].update(groupName="p4d"), "groupName 'p4d'"),
        (lambda d: d["spec"]["workerGroupSpecs"][1].update(groupName=HEAD), f"groupName '{HEAD}'"),
        (lambda d: d.update(kind="RayService"), "rayClusterConfig of .* must be a mapping"),
    ],
)
def test_what_is_wrong_with_a_document_is_said(tmp_path: Path, change: Any, named: str) -> None:
    document = load(CLUSTER)
    change(document)
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError, match=named):
        cluster_from_yaml(path)


def test_a_job_that_brings_its_cluster_is_a_cluster_and_one_that_selects_is_not(
    tmp_path: Path,
) -> None:
    document = load(JOB)
    with pytest.raises(ConfigError, match="only selects; give the RayCluster's own file"):
        cluster_from_yaml(JOB)
    document["spec"]["rayClusterSpec"] = load(CLUSTER)["spec"]
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(document))
    assert cluster_from_yaml(path).node_types == cluster_from_yaml(CLUSTER).node_types


def hook() -> list[str]:
    """What Kubernetes runs in a worker's pod before it sends SIGTERM."""
    return load(CLUSTER)["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0][
        "lifecycle"
    ]["preStop"]["exec"]["command"]


NOTICE = r"""
import json, os, subprocess, sys, time
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from autohet.driver.ray.cluster import draining_nodes, living_nodes
from tests.harness.local_fleet import free_port

def wait_for(what, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found

port, start = free_port(), [os.path.join(os.path.dirname(sys.executable), "ray"), "start", "--disable-usage-stats"]
subprocess.run([*start, "--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false"], check=True, stdout=sys.stderr)
environment = {**os.environ, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "60"}
command = [*start, f"--address=127.0.0.1:{port}", "--num-gpus=1", "--block", "--labels=autohet.io/gpu-type=L4"]
pod = subprocess.Popen(command, env=environment, stdout=sys.stderr)
ray.init(f"127.0.0.1:{port}", log_to_driver=False)
(node,) = wait_for(living_nodes)

@ray.remote(num_cpus=0)
class Agent:
    def answer(self):
        return 1

agent = Agent.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)).remote()
ray.get(agent.answer.remote())
assert draining_nodes() == {}
hook = subprocess.Popen(json.loads(sys.argv[1]))
drains = wait_for(draining_nodes)
answers = ray.get(agent.answer.remote())  # what is needed there goes on
ended_before = pod.poll() is not None
ray.kill(agent)  # nothing on the node is needed any more
pod.wait(50)
hook.wait(30)
right = list(drains) == [node.node_id]
print(json.dumps({"seconds": list(drains.values()), "right": right, "ended_before": ended_before, "answers": answers}))
"""  # noqa: E501


@pytest.mark.cluster
@pytest.mark.skipif(
    subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode != 0,
    reason="a process namespace needs root",
)
def test_the_hooks_sigterm_is_a_notice_with_a_deadline_and_ends_early() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        environment = os.environ | {
            "RAY_TMPDIR": short,
            "HOME": short,
            "RAY_raylet_start_wait_time_s": "120",
        }
        environment |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }  # as the file's pods have it
        command = [*ALONE, sys.executable, "-c", NOTICE, json.dumps(hook())]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
            env=environment,
            cwd=CONFIGS.parent,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert 0 < found["seconds"][0] <= 60
    assert found == {
        "seconds": found["seconds"],
        "right": True,
        "ended_before": False,
        "answers": 1,
    }


def templates() -> list[dict[str, Any]]:
    """Every pod's spec in the shipped files."""
    spec = load(CLUSTER)["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    pods = [group["template"]["spec"] for group in groups]
    return [*pods, load(JOB)["spec"]["submitterPodTemplate"]["spec"]]


def test_pods_run_as_an_ordinary_user_from_an_image_with_a_tag() -> None:
    for pod in templates():
        user = pod["securityContext"]
        assert (user["runAsNonRoot"], user["runAsUser"]) == (True, 1000)
        assert user["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            confined = container["securityContext"]
            assert confined["allowPrivilegeEscalation"] is False
            assert confined["capabilities"] == {"drop": ["ALL"]}
            assert re.search(r"(:[\w.]+|@sha256:.+)$", container["image"])
            for mount in container.get("volumeMounts", ()):
                if mount["name"] == "disk":
                    assert mount["mountPath"] == f"/tmp/autohet-{user['runAsUser']}"


def test_a_network_policy_closes_the_pods_of_the_shipped_cluster() -> None:
    (path,) = CONFIGS.glob("kuberay-networkpolicy.yaml")
    policy = load(path)["spec"]
    label = {"ray.io/cluster": load(CLUSTER)["metadata"]["name"]}
    assert policy["podSelector"]["matchLabels"] == label
    assert policy["policyTypes"] == ["Ingress"]
    within, dashboard = policy["ingress"]
    assert within == {"from": [{"podSelector": {"matchLabels": label}}]}
    assert dashboard["ports"] == [{"protocol": "TCP", "port": 8265}]
    submitter = load(JOB)["spec"]["submitterPodTemplate"]["metadata"]["labels"]
    assert {"podSelector": {"matchLabels": submitter}} in dashboard["from"]


def test_a_job_plans_by_the_cluster_that_was_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Kubernetes answers has more than the file: its status, and who set what. Its groups are
    those of today, not of the image's copy.
    """
    applied = load(CLUSTER)
    applied["metadata"] |= {"uid": "u", "managedFields": [{}], "resourceVersion": "1"}
    applied["status"] = {"state": "ready"}
    g6e = applied["spec"]["workerGroupSpecs"][1]
    g6e["maxReplicas"] = 3
    # Only the pool says what its nodes are.
    g6e["template"]["spec"]["nodeSelector"] = {"karpenter.sh/nodepool": "large"}
    large = {"key": "node.kubernetes.io/instance-type", "operator": "In"}
    large["values"] = ["g6e.12xlarge"]
    pool = {
        "metadata": {"name": "large"},
        "spec": {"template": {"spec": {"requirements": [large]}}},
    }
    asked = []

    def get_pools(url: str, **more: Any) -> SimpleNamespace:
        asked.append(("karpenter", url.partition("/apis/")[2]))
        return SimpleNamespace(raise_for_status=lambda: None, json=lambda: {"items": [pool]})

    monkeypatch.setattr(node_provider, "load_k8s_secrets", lambda: ({}, "ca.crt", None))
    monkeypatch.setattr(node_provider.requests, "get", get_pools)

    def get(self: Any, path: str) -> dict[str, Any]:
        asked.append((self._namespace, path))
        return applied

    monkeypatch.setattr(node_provider.KubernetesHttpApiClient, "get", get)
    started: list[str] = []
    monkeypatch.setattr(os, "execvp", lambda program, words: started.extend(words))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    entrypoint = load(JOB)["spec"]["entrypoint"]
    assert not re.search(r"[&;|<>\"'$]", entrypoint), "KubeRay's submitter is a shell"
    _, script, *arguments = entrypoint.split()
    path = ROOT / Path(script).relative_to("/opt/autohet")
    train: Any = SourceFileLoader("kuberay_train", str(path)).load_module()
    train.NAMESPACE = tmp_path / "namespace"
    train.NAMESPACE.write_text("team")
    train.main(arguments)
    assert asked == [
        ("team", f"rayclusters/{load(CLUSTER)['metadata']['name']}"),
        ("karpenter", "karpenter.sh/v1/nodepools"),
    ]
    assert (started[:3], started[4:]) == (["autohet", "train", "--cluster"], arguments[1:])
    kinds = {kind.name: kind.max_nodes for kind in planned(Path(started[3])).node_types}
    assert kinds == {"p4d": 2, "g6e": 3, "g5": 8, "g5-floor": 1}


def planned(path: Path) -> Any:
    """Return the cluster as `autohet train --cluster` reads it."""
    return cluster_from_document(read_document(path))
