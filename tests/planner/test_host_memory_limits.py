"""Plans on nodes with little host memory: what no change of plans could move there is not chosen,
what has no room else is said.
"""

from dataclasses import replace

import pytest

from planner.answers.replan import replan
from planner.cost.basis import Measurements, Workload
from planner.cost.memory.host_memory import GIB, USABLE, HostMemory, Kept, sentences
from planner.cost.model import CostModel
from planner.cost.parameters import OURS, CostParameters, framework_parameters
from planner.errors import InfeasibleError
from planner.inputs.fleet import Fleet, node_of
from planner.plans.plan import Pipeline, Plan, Stage
from planner.search import autohet
from planner.search.memory import search_with_memory
from planner.search.problem.request import Request
from planner.strategies import plan_with
from tests.planner.cases import fleet, model, profile

MIB = 2**20
PARAMETERS = replace(
    framework_parameters(OURS, CostParameters()), context_bytes=0.0, context_share=0.0
)
BLOCK_BYTES = 12 * 12 * 256 * 256
"""Masters and moments of a block: 9 MiB."""


def hosted(of: Fleet, **mib_by_node_type: float) -> Fleet:
    """The fleet with so much host memory on nodes of some types."""
    kinds = {
        node.node_type: replace(
            node.node_type, host_memory_bytes=int(mib_by_node_type[node.node_type.name] * MIB)
        )
        for node in of.nodes
        if node.node_type.name in mib_by_node_type
    }
    return Fleet(
        0,
        tuple(
            replace(node, node_type=kinds.get(node.node_type, node.node_type)) for node in of.nodes
        ),
    )


def small(*types: tuple[str, int, int], mib: float = 170) -> Fleet:
    """Devices that never have room for two states and the messages between."""
    return fleet(*types, memory_gib=dict.fromkeys(("A100", "A10G", "T4"), mib / 1024))


def request(of: Fleet, layers: int, batch: int = 8) -> Request:
    spec = model(layers, 256, vocab=500)
    cost = CostModel(of, Workload(spec, 128, "fp32"), Measurements(profile()), PARAMETERS)
    return Request(of, spec, cost, batch, 128, prove=False)


def blocks_by_node(plan: Plan) -> dict[str, int]:
    found: dict[str, int] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for worker in stage.workers:
                found[node_of(worker)] = found.get(node_of(worker), 0) + stage.num_layers
    return found


def test_a_node_holds_no_more_state_than_can_leave_its_devices() -> None:
    """The fast node would hold most of the model, or a copy of it, where nobody knows its host
    memory.
    """
    of = small(("A100", 1, 1), ("T4", 2, 1))
    free, limited = (search_with_memory(request(each, 12)) for each in (of, hosted(of, a100=50)))
    assert blocks_by_node(free.plan)["a100-0"] * BLOCK_BYTES > USABLE * 50 * MIB
    assert blocks_by_node(limited.plan)["a100-0"] * BLOCK_BYTES < USABLE * 50 * MIB
    assert limited.prediction.fits
    assert limited.prediction.not_staged is None
    again = request(hosted(of, a100=50), 12).cost.predict(free.plan)
    assert again.fits_devices
    assert not again.fits
    assert "from the GPUs of a100-0 to its host memory" in str(again.not_staged)


def test_a_plan_is_found_where_every_draft_for_the_devices_alone_is_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts fill devices; of the state of two of them a node's host memory holds a part."""
    wanted = request(hosted(small(("A10G", 1, 2), ("T4", 2, 2)), a10g=20, t4=40), 6)
    found = search_with_memory(wanted)
    assert found.prediction.fits
    staged = wanted.cost.memory_of.staged_by_node(found.plan)
    assert all(
        num_bytes <= USABLE * {"a10g-0": 20}.get(node, 40) * MIB
        for node, num_bytes in staged.items()
    )
    monkeypatch.setattr(autohet, "_lower_limit", lambda request, tables, row: row.limit_bytes)
    with pytest.raises(InfeasibleError):
        search_with_memory(wanted)


def test_where_no_plan_can_be_moved_that_is_why_there_is_none() -> None:
    of = hosted(small(("A100", 1, 1)), a100=20)
    with pytest.raises(
        InfeasibleError, match=r"to its host memory, of which .* can be used \(label autohet"
    ):
        search_with_memory(request(of, 8))


def test_a_job_that_can_train_is_not_refused_for_a_change_that_may_never_come() -> None:
    of = small(("A100", 2, 1))
    lacking = request(hosted(of, a100=20), 8)
    found = plan_with("autohet", lacking)
    assert found.prediction.fits_devices
    assert "to its host memory" in str(found.prediction.not_staged)
    left = replace(lacking, fleet=Fleet(1, lacking.fleet.nodes[:1]))
    left = replace(left, cost=request(left.fleet, 8).cost)
    assert replan(found.plan, left).answer.plan.workers == ("a100-0/0",)
    assert replan(found.plan, lacking).answer.plan == found.plan
    with pytest.raises(InfeasibleError):
        search_with_memory(lacking)


def test_what_nobody_knows_changes_nothing() -> None:
    of = small(("A100", 2, 1), ("T4", 1, 2))
    unknown, plenty = (
        search_with_memory(request(each, 8)) for each in (of, hosted(of, a100=10_000, t4=10_000))
    )
    assert unknown.plan == plenty.plan
    assert unknown.prediction == plenty.prediction
    assert request(of, 8).cost.memory_of.host_memory(unknown.plan, Kept()) == ()


def test_of_another_frameworks_run_nothing_is_said() -> None:
    of = hosted(small(("A100", 1, 1)), a100=20)
    cost = CostModel(of, Workload(model(12, 256, vocab=500), 128, "fp32"), Measurements(profile()))
    plan = Plan("tiny", 8, 1, 128, (Pipeline((Stage(0, 12, ("a100-0/0",)),), 8, 1),))
    assert cost.predict(plan).not_staged is None
    assert cost.memory_of.host_memory(plan, Kept()) == ()


def memory(
    host: float, state: float, sole: float, copies: float = 0.0, staged: float = 0.0
) -> HostMemory:
    return HostMemory(
        "n-0", "n", int(host * GIB), state * GIB, sole * GIB, copies * GIB, staged * GIB
    )


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (memory(100, 10, 10, 10), None),
        (memory(100, 30, 10, 10), "of the rest what fits"),
        (memory(100, 30, 10, 40), "copies for other nodes go to its disk"),
        (memory(100, 30, 30), "not all of the 30.0 GiB that no other node holds is kept"),
        (
            memory(100, 5, 0, 0, 85),
            (
                "a change of plans may move 85.0 GiB of state from its GPUs to host memory, where"
                " 80.0 GiB are free"
            ),
        ),
    ],
)
def test_what_is_left_out_is_said_in_one_sentence_a_node_type(
    of: HostMemory, said: str | None
) -> None:
    """Of 100 GiB a half is the file system's, 45 of it for snapshots and copies, and 90 can be used
    in all.
    """
    found = sentences([memory(1000, 1, 1), of])
    assert len(found) == (said is not None)
    assert said is None or said in found[0]


@pytest.mark.parametrize(
    ("state", "copies", "staged"), [(30.0, 0.0, 0.0), (10.0, 60.0, 20.0), (20.0, 10.0, 70.0)]
)
def test_what_is_said_to_be_enough_is(state: float, copies: float, staged: float) -> None:
    lacking = memory(100, state, state, copies, staged)
    enough = float(str(lacking.sentence()).split("With ")[1].split(" GiB")[0])
    assert memory(enough + 0.1, state, state, copies, staged).sentence() is None
    assert memory(enough - 0.2, state, state, copies, staged).sentence() is not None
