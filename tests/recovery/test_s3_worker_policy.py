"""The shipped policy of a worker, enforced by moto's IAM."""

import json
import runpy
from contextlib import closing
from pathlib import Path

import boto3
import pytest

from recovery.storage.conformance import check_conformance
from recovery.storage.open import open_storage
from tests.harness.s3_server import s3_server
from tests.harness.s3_stores import environment_of, moto_store


def test_worker_writes_and_may_not_delete() -> None:
    """A worker uploads, reads, lists uploads and aborts; the check names what it lacks."""
    with (
        moto_store(["worker-policy.json"]) as worker,
        environment_of(worker),
        closing(open_storage(worker.uri)) as storage,
    ):
        report = check_conformance(storage)
    failed = {result.name: result for result in report.results if not result.ok}
    assert set(failed) == {"delete"}
    assert "allow s3:DeleteObject" in str(failed["delete"].remedy)


def versions_remark(uri: str) -> str:
    with closing(open_storage(uri)) as storage:
        report = check_conformance(storage)
    (found,) = (result for result in report.results if result.name == "versions")
    assert found.ok
    return found.problem or ""


@pytest.mark.slow
def test_a_bucket_that_keeps_every_removed_checkpoint_is_said_with_the_rule_that_helps() -> None:
    """The rule in the remark, and the one of scripts/aws/prepare, are each installed and enough."""
    prepare = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "aws" / "prepare"))
    with s3_server():
        client = boto3.client("s3", region_name="us-east-1")
        for bucket in ("plain", "versioned", "prepared"):
            client.create_bucket(Bucket=bucket)
        for bucket in ("versioned", "prepared"):
            client.put_bucket_versioning(
                Bucket=bucket, VersioningConfiguration={"Status": "Enabled"}
            )
        prepare["keep_old_versions_for_days"](client, "prepared")
        assert versions_remark("s3://plain/jobs/a") == ""
        assert versions_remark("s3://prepared/jobs/a") == ""
        remark = versions_remark("s3://versioned/jobs/a")
        assert "versioned" in remark
        rule = json.loads(remark[remark.index("{") :])
        client.put_bucket_lifecycle_configuration(
            Bucket="versioned", LifecycleConfiguration={"Rules": [rule]}
        )
        assert versions_remark("s3://versioned/jobs/a") == ""
        assert versions_remark("s3://versioned/jobs/b") != "", "the rule is of another prefix"
