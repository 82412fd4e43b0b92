"""A simulation's layout puts the same bytes on the same workers as the real one, whatever the model
and the plan.
"""

import pytest

from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.job import ModelSection
from autohet.runtime.models.config import load_config
from autohet.simulate.fleet.coarse_layout import CoarseLayouts
from planner.plans.plan import Pipeline, Plan, Stage
from recovery.state.layout import Layout
from tests.harness.tiny_models import TINY


def plan_of(num_layers: int) -> Plan:
    """Four pipelines of unlike cuts, TP degrees and shares."""
    cut = num_layers - 1
    wide = Stage(0, num_layers, ("d/0", "d/1"))
    deep = Pipeline((Stage(0, 1, ("a/0",)), Stage(1, cut, ("b/0", "b/1"))), 4, 1)
    other = Pipeline((Stage(0, cut, ("c/0", "c/1")), Stage(cut, 1, ("c/2",))), 4, 1)
    uneven = Stage(0, num_layers, ("e/0", "e/1"), tp_shares=(3, 1))
    return Plan(
        "tiny", 16, 1, 16, (deep, other, Pipeline((wide,), 4, 1), Pipeline((uneven,), 4, 1))
    )


def bytes_missing(layout: Layout, wanting: str, having: str) -> int:
    """Bytes that one worker needs and another has not."""
    return sum(
        map(layout.shard_bytes, layout.shards_by_worker[wanting] - layout.shards_by_worker[having])
    )


@pytest.mark.parametrize("model_type", sorted(TINY))
def test_every_worker_holds_and_lacks_the_same_bytes(model_type: str) -> None:
    config = load_config(ModelSection(config=TINY[model_type]))
    plan = plan_of(config.num_hidden_layers)
    real, coarse = layout_of_plan(plan, config), CoarseLayouts(config)(plan)
    assert len(coarse.shards) < len(real.shards) / 3
    assert sum(map(coarse.shard_bytes, coarse.shards)) == sum(map(real.shard_bytes, real.shards))
    for one in plan.workers:
        assert coarse.bytes_of(one) == real.bytes_of(one)
        for other in plan.workers:
            assert bytes_missing(coarse, one, other) == bytes_missing(real, one, other)
