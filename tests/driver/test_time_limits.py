"""One knob for all time limits: whatever follows from the step's, or is given, grows with the
patience.
"""

import logging
from dataclasses import fields

import pytest

from autohet.driver.job import preparation, run
from autohet.driver.job.submission import JOB_CONFIG
from autohet.runtime.job.elastic import ElasticSection, Timeouts
from tests.harness.fake_job import fake_job


@pytest.mark.parametrize(
    "given", [{}, {"heartbeat_timeout_s": 7.0, "debounce_s": 1.0, "checkpoint_timeout_s": 5.0}]
)
def test_patience_multiplies_every_limit(given: dict[str, float]) -> None:
    once, thrice = ElasticSection(**given), ElasticSection(**given, patience=3.0)
    for field in fields(Timeouts):
        assert getattr(thrice.timeouts(), field.name) == pytest.approx(
            3 * getattr(once.timeouts(), field.name)
        )
    assert thrice.arrivals_debounce_s == pytest.approx(3 * once.arrivals_debounce_s)
    assert thrice.fleet_patience_s == pytest.approx(3 * once.fleet_patience_s)


class ReachesRay(Exception):
    """The job was not refused before."""


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a job says before it reaches Ray."""

    def connection(*_: object) -> None:
        raise ReachesRay

    monkeypatch.setattr(preparation, "find_document", lambda *_: None)
    monkeypatch.setattr(preparation, "check_inputs", lambda *_, **__: (None, None))
    monkeypatch.setattr(run, "connection", connection)
    with caplog.at_level(logging.INFO, "autohet"), pytest.raises(ReachesRay):
        run.train(
            fake_job(steps=5, elastic={"step_timeout_s": 77}),
            cluster_path=None,
            address=None,
            events_path=None,
            show=lambda *_: None,
        )
    return [record.getMessage() for record in caplog.records]


def test_the_limits_are_told_before_anything_can_run_into_them(begin: list[str]) -> None:
    assert sum("a step 77 s" in said and "a checkpoint 770 s" in said for said in begin) == 1


@pytest.mark.parametrize("submitted", [True, False])
def test_a_submitted_driver_that_nobody_starts_again_is_told_so(
    submitted: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv(JOB_CONFIG, "{}") if submitted else monkeypatch.delenv(
        JOB_CONFIG, raising=False
    )
    said = request.getfixturevalue("begin")
    assert (
        any("goes on only once it is submitted again" in sentence for sentence in said) == submitted
    )
