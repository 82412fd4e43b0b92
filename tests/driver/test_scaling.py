"""What is asked of Ray's autoscaler: the whole nodes that the best plan uses, or what the job
wishes.
"""

import logging
from types import SimpleNamespace

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config

from autohet.control.planning.buying import best_counts, capped, standing_first, with_min_workers
from autohet.driver.loop.planning import make_planning
from autohet.driver.ray.cluster import RayNode
from autohet.driver.ray.requests import autoscaler, scaling
from autohet.driver.ray.requests.scaling import (
    check_wish,
    fleet_request,
    read_launch_file,
    standing_nodes,
)
from autohet.runtime.job import Job
from planner.errors import ConfigError
from planner.inputs.cluster import cluster_from_document
from tests.harness.local_fleet import cluster_document

AWS = "cluster_configs/aws-mixed-spot.yaml"


@pytest.fixture
def aws():
    with open(AWS) as file:
        document = yaml.safe_load(file)
    return document, cluster_from_document(document)


def shortest_job(**sections):
    document = {
        "model": {"config": {"model_type": "gpt2"}},
        "training": {"global_batch_sequences": 8, "sequence_length": 128, "steps": 100},
        **sections,
    }
    return Job.from_document(document)


def bought(job, aws):
    """What is asked for, how many GPUs that has, and how many of them the job uses on it beside the
    nodes that stand anyway.
    """
    document, cluster = aws
    planning, standing = make_planning(job), standing_nodes(cluster, document)
    request = fleet_request(job, cluster, document, None, best_counts(planning, cluster, standing))
    come = {
        kind.name: max(request.counts.get(kind.name, 0), standing[kind.name])
        for kind in cluster.node_types
    }
    plan = planning.propose(capped(cluster, come).fleet(), None).plan
    used = {
        worker
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for worker in stage.workers
    }
    return request, sum(bundle["GPU"] for bundle in request.bundles), len(used)


@pytest.mark.usefixtures("_whole_search")
def test_the_shortest_job_buys_what_its_plan_uses(aws):
    """All GPUs that are bought train: there are 18 in the file, and a job of eight short sequences
    has work for a few.
    """
    document, _ = aws
    for name, most in (("p4d", 1), ("g6e", 2), ("g5", 1)):
        document["available_node_types"][name]["max_workers"] = most
    request, gpus, used = bought(shortest_job(), (document, cluster_from_document(document)))
    assert gpus == used < 18
    assert len(request.selectors) == len(request.bundles)
    assert {selector["ray.io/market-type"] for selector in request.selectors} <= {
        "spot",
        "on-demand",
    }


@pytest.mark.parametrize(
    ("parallelism", "said"),
    [({}, True), ({"objective": "cost"}, False), ({"max_usd_per_hour": 50.0}, False)],
)
def test_what_is_asked_for_is_told_with_its_price_and_that_nothing_bounds_it(
    aws, caplog, monkeypatch, parallelism, said
):
    document, cluster = aws
    monkeypatch.setattr(scaling, "put_request", lambda *_, wait: None)
    request = fleet_request(
        shortest_job(parallelism=parallelism), cluster, document, None, {"p4d": 1, "g6e": 2}
    )
    with caplog.at_level(logging.INFO, "autohet"):
        request.ask()
    prices = {kind.name: kind.usd_per_hour for kind in cluster.node_types}
    assert f"for 2 g6e, 1 p4d: ${prices['p4d'] + 2 * prices['g6e']:.2f} an hour" in caplog.text
    assert ("at any price" in caplog.text) is said


def test_the_first_job_of_the_readme_buys_what_costs_least_a_token():
    assert Job.from_yaml("cluster_configs/jobs/gpt2.yaml").parallelism.objective == "cost"


def test_min_workers_are_bought_too_the_cheapest_first(aws):
    _, cluster = aws
    counts = with_min_workers({"g6e": 1}, cluster, 6)
    assert counts == {"g6e": 1, "g5": 2}
    assert with_min_workers({}, cluster, 1000) == {
        kind.name: kind.max_nodes for kind in cluster.node_types
    }
    assert with_min_workers({"p4d": 1}, cluster, 3) == {"p4d": 1}


def test_a_node_that_stands_anyway_is_used_before_its_equal(aws):
    document, cluster = aws
    standing = standing_nodes(cluster, document)
    assert standing_first({"g5": 2, "p4d": 1}, cluster, standing) == {
        "g5": 1,
        "p4d": 1,
        "g5-floor": 1,
    }
    assert standing_first({"g6e": 1}, cluster, standing) == {"g6e": 1}
    assert standing_first({"g5": 1, "g5-floor": 1}, cluster, standing) == {"g5": 1, "g5-floor": 1}


def test_the_jobs_wish_wins_and_is_checked(aws):
    document, cluster = aws
    request = fleet_request(
        shortest_job(elastic={"request_nodes": {"g5": 3}}), cluster, document, None, None
    )
    assert request.bundles == [{"GPU": 1, "CPU": 8}] * 3
    assert (
        request.selectors == [{"ray.io/market-type": "spot", "ray.io/accelerator-type": "A10G"}] * 3
    )
    assert not fleet_request(
        shortest_job(elastic={"request_nodes": {}}), cluster, document, None, None
    ).bundles
    with pytest.raises(ConfigError, match=r"'p5'.*has g5, g5-floor, g6e, p4d"):
        check_wish(cluster, {"p5": 1})
    with pytest.raises(ConfigError, match="9 of 'g5', whose max_workers is 8"):
        check_wish(cluster, {"g5": 9})


def test_a_change_that_no_request_names_leaves_what_was_asked_for(aws, monkeypatch, caplog):
    document, cluster = aws
    document = {**document, "max_workers": 4}
    sent = []
    monkeypatch.setattr(scaling, "put_request", lambda bundles, *_, wait: sent.append(bundles))
    request = fleet_request(
        shortest_job(elastic={"request_nodes": {"g5": 2}}), cluster, document, None, None
    )
    request.change({"g5": 3})
    request.change({"g5": 8})
    assert [len(bundles) for bundles in sent] == [3]
    assert request.counts == {"g5": 3}
    assert "max_workers of the cluster file is 4" in caplog.text


def test_an_emulated_fleet_is_not_asked_for():
    document = cluster_document(big=2)
    job = shortest_job(elastic={"request_nodes": {"big": 2}})
    cluster = cluster_from_document(document)
    assert not fleet_request(job, cluster, document, None, None).bundles
    assert fleet_request(job, cluster, document, "10.0.0.1:6379", None).bundles


def test_an_idle_head_is_not_given_back(monkeypatch):
    """It may be of a worker's type, and the driver runs there."""
    drained = []
    monkeypatch.setattr(autoscaler, "drain", lambda node_id, *_: drained.append(node_id))
    nodes = {}
    for name, is_head in (("g5-0", True), ("g5-1", False)):
        ray_node = RayNode(name, "10.0.0.1", "g5", 1, {}, is_head=is_head)
        nodes[name] = SimpleNamespace(ray_node=ray_node)
    requests = autoscaler.RayAutoscaler(SimpleNamespace(nodes=nodes), SimpleNamespace(is_mine=True))
    requests.give_back("g5-0")
    requests.give_back("g5-1")
    assert drained == ["g5-1"]


def test_a_head_with_gpus_stands_and_is_not_in_what_is_asked_for(aws, monkeypatch, caplog):
    document, _ = aws
    gpu_head = {"node_config": {"InstanceType": "g6e.12xlarge"}}
    types = {**document["available_node_types"], "head": gpu_head}
    document = {**document, "available_node_types": types}
    cluster = cluster_from_document(document)
    assert standing_nodes(cluster, document)["head"] == 1
    sent = []
    monkeypatch.setattr(scaling, "put_request", lambda bundles, *_, wait: sent.append(bundles))
    request = fleet_request(shortest_job(), cluster, document, None, {"head": 1, "p4d": 1})
    with caplog.at_level(logging.INFO, "autohet"):
        request.ask()
    assert "for 1 p4d: $" in caplog.text
    assert [bundle["GPU"] for bundle in sent[0]] == [4, 8]


def test_the_file_that_the_head_was_started_from(tmp_path, caplog):
    assert read_launch_file(tmp_path / "none.yaml") is None
    with open(AWS) as file:
        left_by_ray_up = prepare_config(yaml.safe_load(file))
    (tmp_path / "head.yaml").write_text(yaml.safe_dump(left_by_ray_up))
    assert read_launch_file(tmp_path / "head.yaml")["cluster_name"]
    (tmp_path / "bad.yaml").write_text("{cluster_name: x}")
    assert read_launch_file(tmp_path / "bad.yaml") is None
    assert "bad.yaml" in caplog.text
