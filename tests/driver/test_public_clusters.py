"""Cluster files of people who run Ray, against Ray's own reading and scheduling of them.

What is planned is what Ray launches and what is priced; what cannot be planned is one sentence.
"""

import copy
import functools
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest
import yaml
from moto.ec2.models.instance_types import INSTANCE_TYPES
from ray.autoscaler._private.aws import node_provider as aws
from ray.autoscaler._private.kuberay.autoscaling_config import (
    _derive_autoscaling_config_from_ray_cr,
)
from ray.autoscaler._private.util import prepare_config
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig as RaysConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.schema import AutoscalerInstance
from ray.core.generated import instance_manager_pb2

from autohet.driver.ray.requests.node_requests import (
    NodeRequest,
    node_request,
    resource_constraints,
)
from planner.errors import ConfigError
from planner.inputs.autoscaling import AutoscaledType, AutoscalingConfig, autoscaling_config
from planner.inputs.cluster import Cluster, cluster_from_document
from planner.inputs.cluster_documents import cluster_document, read_cluster_yaml, with_legacy_types
from tests.harness.s3_server import s3_server

ROOT = Path(__file__).parents[2]
PUBLIC = yaml.safe_load((Path(__file__).parent / "public_clusters.yaml").read_text())
PLANNED = {case["source"]: case for case in PUBLIC if "planned" in case}
REFUSED = {case["source"]: case for case in PUBLIC if "refused" in case}
LEGACY = ("autoscaling_mode", "head_node", "initial_workers", "worker_nodes")
LEGACY += ("target_utilization_fraction",)
"""Keys that Ray's rewriting leaves and its schema (2.60) refuses; earlier releases took them."""
SLURM = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=64
srun ray start --head --num-gpus 4
"""
"""As volcengine/verl, examples/slurm/ray_on_slurm.slurm."""
pb2: Any = instance_manager_pb2


def described_p3(name: str, vcpus: int, memory_mib: int, gpus: int) -> dict[str, Any]:
    """EC2's description of a machine that moto has no more."""
    device = {"Name": "V100", "Manufacturer": "NVIDIA", "Count": gpus}
    return {
        "InstanceType": name,
        "VCpuInfo": {"DefaultVCpus": vcpus},
        "MemoryInfo": {"SizeInMiB": memory_mib},
        "GpuInfo": {"Gpus": [device]},
    }


DESCRIBED = {name: {"InstanceType": name, **row} for name, row in INSTANCE_TYPES.items()} | {
    "p2.xlarge": described_p3("p2.xlarge", 4, 62464, 1),
    "p3.2xlarge": described_p3("p3.2xlarge", 8, 62464, 1),
    "p3.8xlarge": described_p3("p3.8xlarge", 32, 249856, 4),
    "p3.16xlarge": described_p3("p3.16xlarge", 64, 499712, 8),
}
"""Instance types as EC2 describes them (P3: EC2 User Guide, accelerated computing)."""


def written(documents: list[dict[str, Any]], directory: Path) -> Path:
    path = directory / "cluster.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    return path


def rays_config(document: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> RaysConfig:
    """Ray's own reading: of a RayCluster by its autoscaler on KubeRay, of a file by `ray up`."""
    document = copy.deepcopy(document)
    if "apiVersion" not in document:
        monkeypatch.setattr(aws, "list_ec2_instances", lambda *_: [*DESCRIBED.values()])
        config = prepare_config(document)
        for key in LEGACY:
            config.pop(key, None)
        if config["provider"]["type"] == "aws":
            config = aws.AWSNodeProvider.fillout_available_node_types_resources(config)
        return RaysConfig(config, skip_content_hash=True)

    spec = document["spec"]
    spec = spec.get("rayClusterSpec") or spec.get("rayClusterConfig") or spec
    for group in spec["workerGroupSpecs"]:
        group.setdefault("minReplicas", 0)  # the API server's default
        if not spec.get("enableInTreeAutoscaling"):
            # no autoscaler runs: KubeRay makes the replicas
            group["minReplicas"] = group["maxReplicas"] = group["replicas"]
    resource = {"metadata": {"name": "cluster", "namespace": "default"}, "spec": spec}
    return RaysConfig(_derive_autoscaling_config_from_ray_cr(resource), skip_content_hash=True)


def ray_launches(config: RaysConfig, request: NodeRequest) -> dict[str, int]:
    """The workers that Ray's scheduler launches beside the head."""
    head = pb2.Instance(
        instance_id="head",
        instance_type=config.get_head_node_type(),
        status=pb2.Instance.ALLOCATED,
        node_kind=pb2.NodeKind.HEAD,
    )
    reply = ResourceDemandScheduler().schedule(
        SchedulingRequest(
            disable_launch_config_check=True,
            node_type_configs=config.get_node_type_configs(),
            max_num_nodes=config.get_max_num_nodes(),
            cluster_resource_constraints=resource_constraints(request),
            current_instances=[AutoscalerInstance(im_instance=head)],
        )
    )
    found: dict[str, int] = {}
    for launch in reply.to_launch:
        found[launch.instance_type] = found.get(launch.instance_type, 0) + launch.count
    return found


def largest_fleets(cluster: Cluster) -> list[dict[str, int]]:
    """All nodes of each type alone, and of all types if the file's bound allows that."""
    whole = {kind.name: kind.max_nodes for kind in cluster.node_types}
    alone = [{name: count} for name, count in whole.items()]
    return alone if cluster.bound is not None else [*alone, whole]


def aws_file(most: int | None, **types: dict[str, Any]) -> dict[str, Any]:
    """A file in which each type has a label of its own; the first is the head's."""
    for name, kind in types.items():
        kind["node_config"] = {"InstanceType": kind.pop("machine")}
        kind["labels"] = {"pool": name}
    found = {
        "cluster_name": "c",
        "provider": {"type": "aws", "region": "us-east-1"},
        "head_node_type": next(iter(types)),
        "available_node_types": types,
    }
    return found if most is None else {**found, "max_workers": most}


def machine(name: str, **counts: int) -> dict[str, Any]:
    return {"machine": name, **counts}


FILES = {
    "a bound of the file below its types'": (
        aws_file(2, head=machine("m5.large"), gpu=machine("g5.xlarge", max_workers=4)),
        {"gpu": 2},
    ),
    "minimums of types without GPUs take places": (
        aws_file(
            3,
            head=machine("m5.large"),
            cpu=machine("c5.9xlarge", min_workers=1),
            gpu=machine("g5.xlarge", max_workers=4),
        ),
        {"gpu": 2},
    ),
    "the head counts towards its type's minimum": (
        aws_file(4, head=machine("g5.xlarge", min_workers=2, max_workers=3)),
        {"head": 4},
    ),
    "equal machines in two types": (
        aws_file(
            4,
            a=machine("p3.16xlarge", max_workers=4),
            b=machine("p3.16xlarge", max_workers=1),
        ),
        {"a": 5, "b": 1},
    ),
    "memory in Ray's score": (
        aws_file(
            3,
            a=machine("g5.12xlarge", max_workers=3),
            b=machine("g6e.12xlarge", max_workers=1),
            c=machine("c5.9xlarge"),
        ),
        {"a": 4, "b": 1},
    ),
}
"""Files of our own, with the nodes at most of each type; Ray's scheduler has found each of them."""


@pytest.mark.parametrize("name", FILES)
def test_every_fleet_that_a_file_allows_is_what_ray_launches(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong: bounds and heads by rules of our own, equal scores in the order of the file."""
    document, most = copy.deepcopy(FILES[name])
    cluster = cluster_from_document(document)
    assert {kind.name: kind.max_nodes for kind in cluster.node_types} == most
    rays = rays_config(document, monkeypatch)
    config = autoscaling_config(document)
    standing = ray_launches(rays, NodeRequest())
    assert standing == config.workers({})
    for counts in itertools.product(*[range(number + 1) for number in most.values()]):
        fleet = dict(zip(most, counts, strict=True))
        if any(fleet[each] < config.types[each].standing for each in most):
            continue
        if cluster.bound is None or cluster.bound.allows(fleet):
            launched = ray_launches(rays, node_request(cluster, document, fleet))
            assert launched == config.workers(fleet), fleet
        else:
            with pytest.raises(ConfigError, match="max_workers"):
                node_request(cluster, document, fleet)


def test_a_group_without_cpus_is_refused_where_an_autoscaler_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray's own reading ends its autoscaler; without one `ray start` counts them."""
    source = "ray-project/kuberay ray-operator/config/samples/ray-cluster-label-selector.yaml"
    document = copy.deepcopy(PLANNED[source]["documents"][0])
    resources = document["spec"]["workerGroupSpecs"][1]["template"]["spec"]["containers"][0]
    resources["resources"] = {"limits": {"memory": "1Gi"}}
    with pytest.raises(ValueError, match="failed to detect `CPU`"):
        rays_config(document, monkeypatch)
    with pytest.raises(ConfigError, match="'accelerator-group' names no CPUs"):
        cluster_document([document], "cluster")
    document["spec"]["enableInTreeAutoscaling"] = False
    cluster_document([document], "cluster")


def test_there_are_fifty_public_files() -> None:
    sources = {case["source"] for case in PUBLIC}
    assert len(sources) == len(PUBLIC)
    assert len(PUBLIC) + 1 >= 50


@pytest.mark.parametrize("source", PLANNED)
def test_what_is_planned_is_what_ray_launches_and_what_is_priced(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = PLANNED[source]
    document: Any = read_cluster_yaml(written(case["documents"], tmp_path))
    cluster = cluster_from_document(document)
    expected = case["planned"]
    found = {}
    for kind in cluster.node_types:
        found[kind.name] = {
            "gpu_type": kind.gpu_type,
            "num_gpus": kind.num_gpus,
            "nodes": kind.max_nodes,
            "usd_per_hour": kind.usd_per_hour and pytest.approx(kind.usd_per_hour),
        }
    assert found == expected

    rays = rays_config(case["documents"][0], monkeypatch)
    minimums = {name: kind.min_worker_nodes for name, kind in rays.get_node_type_configs().items()}
    head = rays.get_head_node_type()
    for counts in largest_fleets(cluster):
        launched = ray_launches(rays, node_request(cluster, document, counts))
        for name, minimum in minimums.items():
            # the head counts towards its type's minimum
            nodes = max(minimum, counts.get(name, 0))
            assert launched.get(name, 0) == max(0, nodes - (name == head)), (name, counts)


def aws_document(case: dict[str, Any]) -> dict[str, Any] | None:
    """The file with its node types; None if AWS launches nothing of it."""
    document = case["documents"][0]
    if (document.get("provider") or {}).get("type") != "aws":
        return None
    return dict(with_legacy_types(document))


@pytest.fixture(scope="module")
def check() -> Iterator[Any]:
    """scripts/aws/check, which asks moto."""
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        path = str(ROOT / "scripts" / "aws" / "check")
        yield SourceFileLoader("check_script", path).load_module()


@pytest.mark.parametrize("source", [name for name in PLANNED if aws_document(PLANNED[name])])
def test_quotas_are_asked_for_what_ray_launches(
    source: str, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong: a script that reads bounds, heads and legacy files by rules of its own."""
    document = aws_document(PLANNED[source])
    assert document is not None
    config = autoscaling_config(document)
    found = check.check(document, config, document["provider"]["region"], None)
    rays = rays_config(PLANNED[source]["documents"][0], monkeypatch)
    cluster = cluster_from_document(document)

    needed: Counter[str] = Counter()
    for counts in largest_fleets(cluster):
        nodes = Counter(ray_launches(rays, node_request(cluster, document, counts)))
        nodes[rays.get_head_node_type()] += 1
        vcpus: Counter[str] = Counter()
        for name, number in nodes.items():
            kind = found["types"][name]
            if name in counts:
                assert kind["nodes"] == number
            each = DESCRIBED[kind["instance_type"]]["VCpuInfo"]["DefaultVCpus"]
            vcpus[kind["quota"]] += number * each
        needed |= vcpus
    # other types, which no plan names, have further quotas
    planned = {found["types"][kind.name]["quota"] for kind in cluster.node_types}
    asked = {code: each["needed"] for code, each in found["quotas"].items()}
    assert {code: asked[code] for code in planned} == {code: needed[code] for code in planned}
    assert not [each for each in found["fails"] if "refuse the file" in each]


def test_check_refuses_what_is_not_for_aws_and_what_plan_refuses(
    check: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for case in PUBLIC:
        path = written(case["documents"], tmp_path)
        monkeypatch.setattr("sys.argv", ["check", str(path), "--json"])
        document = aws_document(case)
        if document is None:
            with pytest.raises(ConfigError):
                check.main()
        elif "refused" in case:
            assert check.main() == 1
            assert case["refused"] in capsys.readouterr().out


@pytest.mark.parametrize("source", REFUSED)
def test_what_cannot_be_planned_is_one_sentence(source: str, tmp_path: Path) -> None:
    case = REFUSED[source]
    with pytest.raises(ConfigError) as refused:
        cluster_from_document(read_cluster_yaml(written(case["documents"], tmp_path)))
    assert case["refused"] in str(refused.value)


def places(value: Any, parents: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = {}
    if isinstance(value, dict | list):
        items = value if isinstance(value, dict) else dict(enumerate(value))
    for key, item in items.items():
        yield (*parents, key)
        yield from places(item, (*parents, key))


def test_a_value_of_another_form_is_a_sentence_and_never_a_traceback() -> None:
    """Each value of each file in turn is a text, a number, a list, null or absent."""
    values = itertools.cycle(("text", 7, [1], None, {"a": 1}, True, ...))
    for case in PUBLIC:
        for place in places(case["documents"]):
            changed = copy.deepcopy(case["documents"])
            *parents, key = place
            inside = functools.reduce(lambda found, name: found[name], parents, changed)
            inside[key] = next(values)
            if inside[key] is ...:
                del inside[key]
            with suppress(ConfigError):
                cluster_from_document(cluster_document(changed, "cluster"))


def test_a_slurm_script_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ray_on_slurm.slurm"
    path.write_text(SLURM)
    with pytest.raises(ConfigError, match="is a Slurm script, which `sbatch` reads"):
        read_cluster_yaml(path)


def test_the_vcpus_that_a_quota_must_allow_are_those_of_the_largest_fleet() -> None:
    """Of all fleets that the bounds allow, found by trying each."""
    chance = random.Random(0)
    for _ in range(200):
        types = {}
        for name in ("a", "b", "c"):
            least = chance.randrange(2)
            most = least + chance.randrange(3)
            types[name] = AutoscaledType(name, None, {}, {}, least, most, is_head=name == "a")
        limit = sum(kind.min_workers for kind in types.values()) + chance.randrange(5)
        weights = {name: chance.choice((0, 4, 48)) for name in types}
        ranges = [range(kind.standing, kind.max_nodes + 1) for kind in types.values()]
        allowed = [counts for counts in itertools.product(*ranges) if sum(counts) <= limit + 1]
        totals = [
            sum(number * weights[name] for number, name in zip(counts, types, strict=True))
            for counts in allowed
        ]
        config = AutoscalingConfig("a", limit, types)
        assert config.largest_total(weights) == max(totals)
