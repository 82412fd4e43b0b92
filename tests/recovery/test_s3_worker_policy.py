"""The shipped policy of a worker, enforced by moto's IAM."""

from __future__ import annotations

from contextlib import closing

from recovery.storage.conformance import check_conformance
from recovery.storage.open import open_storage
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
