"""What is asked of Ray's autoscaler: whole nodes, every type as often as it may be, or what the job wishes."""

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config

from autohet.driver.ray.scaling import bundles_of, launched_from, wanted_nodes
from autohet.driver.run import fleet_request
from autohet.runtime.job import Job
from planner.cluster import cluster_from_document
from planner.errors import ConfigError
from tests.harness.local_fleet import cluster_document

AWS = "cluster_configs/aws-mixed-spot.yaml"


@pytest.fixture
def aws():
    with open(AWS) as file:
        document = yaml.safe_load(file)
    return document, cluster_from_document(document)


def test_every_type_up_to_its_max_workers(aws):
    document, cluster = aws
    counts = wanted_nodes(cluster, None)
    assert counts == {"p4d": 2, "g6e": 4, "g5": 8, "g5-floor": 1}
    shapes = bundles_of(cluster, document, counts)
    assert sum(shape["GPU"] for shape in shapes) == 41
    assert shapes.count({"GPU": 8, "CPU": 96}) == 2


def test_the_jobs_wish_wins_and_is_checked(aws):
    document, cluster = aws
    assert bundles_of(cluster, document, wanted_nodes(cluster, {"g5": 3})) == [{"GPU": 1, "CPU": 8}] * 3
    assert wanted_nodes(cluster, {}) == {}
    with pytest.raises(ConfigError, match=r"'p5'.*has g5, g5-floor, g6e, p4d"):
        wanted_nodes(cluster, {"p5": 1})
    with pytest.raises(ConfigError, match="9 of 'g5', whose max_workers is 8"):
        wanted_nodes(cluster, {"g5": 9})


def test_an_emulated_fleet_is_not_asked_for():
    document = cluster_document(big=2)
    job = Job.from_document(
        {"model": {"config": {"model_type": "gpt2"}}, "training": {"global_batch_sequences": 1, "sequence_length": 8}}
    )
    cluster = cluster_from_document(document)
    assert not fleet_request(job, cluster, document, None).bundles
    assert fleet_request(job, cluster, document, "10.0.0.1:6379").bundles


def test_the_file_that_the_head_was_started_from(tmp_path, caplog):
    assert launched_from(tmp_path / "none.yaml") is None
    with open(AWS) as file:
        left_by_ray_up = prepare_config(yaml.safe_load(file))
    (tmp_path / "head.yaml").write_text(yaml.safe_dump(left_by_ray_up))
    assert launched_from(tmp_path / "head.yaml")["cluster_name"]
    (tmp_path / "bad.yaml").write_text("{cluster_name: x}")
    assert launched_from(tmp_path / "bad.yaml") is None
    assert "bad.yaml" in caplog.text
