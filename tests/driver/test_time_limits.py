"""One knob for all time limits: whatever follows from the step's, or is given, grows with the patience."""

from __future__ import annotations

from dataclasses import fields

import pytest

from autohet.runtime.job.elastic import ElasticSection, Timeouts


@pytest.mark.parametrize("given", [{}, {"heartbeat_timeout_s": 7.0, "debounce_s": 1.0, "checkpoint_timeout_s": 5.0}])
def test_patience_multiplies_every_limit(given: dict[str, float]) -> None:
    once, thrice = ElasticSection(**given), ElasticSection(**given, patience=3.0)
    for field in fields(Timeouts):
        assert getattr(thrice.timeouts(), field.name) == pytest.approx(3 * getattr(once.timeouts(), field.name))
    assert thrice.arrivals_debounce_s == pytest.approx(3 * once.arrivals_debounce_s)
    assert thrice.fleet_patience_s == pytest.approx(3 * once.fleet_patience_s)
