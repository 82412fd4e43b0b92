"""A node whose network is ill, at 3 MB/s, has half of what a survivor lacks, in live memory: no
message can be overtaken.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from autohet.control.job_state import Training
from autohet.control.values.observation import Observation
from autohet.emulate.namespaces import NamespaceNetwork
from tests.faults.conftest import Scene
from tests.harness.exact_job import BATCH, LENGTH, exact_job
from tests.harness.leaks import nothing_left
from tests.harness.local_fleet import Interference, trains_at
from tests.harness.namespace_fleet import NamespaceFleet
from tests.harness.struck_run import StruckRun
from tests.harness.toy_model import TOY_CONFIG

pytestmark = [pytest.mark.faults, pytest.mark.cluster, pytest.mark.slow]
LAYERS = 8
STEPS = 10
HISTORY_ELEMENTS = 900_000
"""11 MB of state a layer, in shards of 3.6 MB: some come from the grey node within a generation's
time to begin, by far not all.
"""
GREY_MEGABITS = 24.0
WELL_MEGABITS = 20_000.0
ELASTIC = {"max_failures_in_a_row": 2}
SHORT = {"rendezvous_timeout_s": 3.0, "transfer_timeout_s": 3.0}
"""Once all have their first state: in this time a restore has to begin and to end."""


def plan() -> dict[str, Any]:
    """Nodes a and d have everything; c has the last quarter, and b, which is going to die, the
    rest.
    """
    return {
        "version": 1,
        "model": "exact",
        "global_batch_sequences": BATCH,
        "microbatch_sequences": 1,
        "sequence_length": LENGTH,
        "pipelines": [
            {
                "num_microbatches": 3,
                "stages": [{"first_layer": 0, "num_layers": LAYERS, "workers": ["a/0"]}],
            },
            {
                "num_microbatches": 3,
                "stages": [{"first_layer": 0, "num_layers": LAYERS, "workers": ["d/0"]}],
            },
            {
                "num_microbatches": 2,
                "stages": [
                    {"first_layer": 0, "num_layers": 6, "workers": ["b/0"]},
                    {"first_layer": 6, "num_layers": 2, "workers": ["c/0"]},
                ],
            },
        ],
    }


def trains_again(run: StruckRun, seen: Observation) -> bool:
    return isinstance(run.controller.state, Training) and run.controller.memory.generation > 1


def test_a_grey_worker_is_asked_for_nothing_after_a_broken_restore(
    network: NamespaceNetwork, scene: Scene, tmp_path: Path, memory: Path
) -> None:
    """The death is one failure, a restore that comes too late another. Were it scheduled alike
    again, the next would come too late as well, and the job would end.
    """

    def fall_ill(run: StruckRun, seen: Observation) -> None:
        run.controller.memory.job = replace(job, elastic=replace(job.elastic, **SHORT))
        network.limit("d", GREY_MEGABITS)
        run.fleet.kill_node("b")

    events = Interference()
    events.when(trains_at(3), fall_ill)
    events.when(trains_again, lambda run, seen: network.limit("d", WELL_MEGABITS))
    job = exact_job(
        tmp_path,
        scene.shared,
        memory,
        plan(),
        model={
            "config": {
                **TOY_CONFIG,
                "vocab_size": 256,
                "num_hidden_layers": LAYERS,
                "history_size": HISTORY_ELEMENTS,
            }
        },
        training={"steps": STEPS, "decay_steps": STEPS},
        elastic=ELASTIC,
        checkpoint={"every_steps": STEPS},
        parallelism={"min_pipelines": 3},
    )
    with nothing_left(memory):
        run = StruckRun(
            job,
            tmp_path,
            nodes=dict.fromkeys("abcd", 1),
            fleet=partial(NamespaceFleet, network=network),
        )
        result = run.run(events)
        assert result.ok, result.reason
    assert not events.events, result.reason
    assert run.controller.memory.generation == 3, "one broke off, and the next did not"
    assert set(run.orders.slow) == {"d"}
    assert 1e6 < run.orders.slow["d"] < 4e6
    (change,) = result.summary["reconfigurations"]
    assert change["steps_lost"] == 0
