"""The step at which a prepared generation begins is named in time for a notice's deadline."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from autohet.control.job_state import Preparing
from autohet.control.states import cutting_over
from autohet.control.values.effects import Round
from autohet.runtime.job.elastic import ElasticSection

STEP_S = 1.4


@pytest.mark.parametrize(("left_s", "is_named"), [(2 * STEP_S + 0.1, True), (2.7, False)])
def test_a_notice_leaves_time_for_the_step_in_flight_and_one_more(
    left_s: float, is_named: bool
) -> None:
    """Wrong: three steps are asked for, so that all workers stop for a notice of 20 s."""
    ledger: Any = SimpleNamespace(
        committed_steps=12, last_step=100, measured_step_s=lambda generation: STEP_S
    )
    job = SimpleNamespace(elastic=ElasticSection())
    memory: Any = SimpleNamespace(ledger=ledger, proposal=object(), generation=1, job=job)
    proposal: Any = SimpleNamespace(predicted_step_s=STEP_S)
    change: Any = SimpleNamespace(reason="a notice")
    preparing = Preparing(2, change, proposal, ("n/0",), 100.0 + left_s, 200.0)
    book: Any = object()
    with (
        patch.object(cutting_over, "is_possible", return_value=True),
        patch.object(cutting_over, "_write_orders", return_value=book) as write,
        patch.object(cutting_over, "claim", return_value=iter(())),
    ):
        seen: Any = SimpleNamespace(now=100.0)
        Round().collect(cutting_over.name_step(preparing, memory, seen))
    assert (preparing.cut_over is not None) == is_named
    if is_named:
        assert write.call_args.args[1] == 14
