"""The strategy `hap`: properties of its plans, its ratios against a linear program, its plans against brute force."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from planner.errors import InfeasibleError
from planner.plan import Pipeline, Plan, Stage, check_plan
from planner.search.cost_tables import tables_of
from planner.strategies import Request, plan_with
from planner.strategies.hap import ratios, search_program
from planner.strategies.sharding import Part, Program, Space, spaces, sync_s
from tests.planner.cases import DEMO, fleet, model, request

FEW = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
fleets = st.lists(
    st.tuples(st.sampled_from(("A100", "A10G", "T4")), st.integers(1, 3), st.sampled_from((1, 2, 3, 4, 5))),
    min_size=1, max_size=3, unique_by=lambda t: t[0],
)  # fmt: skip


@FEW
@given(types=fleets, batch=st.integers(1, 41), layers=st.integers(1, 6))
def test_every_group_holds_all_layers_on_one_node_and_the_batch_is_met(types: list, batch: int, layers: int) -> None:
    asked = request(fleet(*types), batch, model(layers))
    answer = plan_with("hap", asked)
    check_plan(answer.plan, layers)
    assert sum(p.num_sequences for p in answer.plan.pipelines) == batch
    assert answer.prediction.fits
    for pipeline in answer.plan.pipelines:
        (stage,) = pipeline.stages
        assert stage.num_layers == layers
        assert len({worker.split("/")[0] for worker in stage.workers}) == 1
    idle = [worker for item in answer.idle for worker in item.workers]
    assert sorted([*answer.plan.workers, *idle]) == sorted(asked.fleet.workers)


def _space(asked: Request) -> Space:
    (space,) = spaces(asked, tables_of(asked))
    return space


@FEW
@given(types=fleets, batch=st.integers(8, 200), data=st.data())
def test_ratios_are_the_optimum_of_the_linear_program(types: list, batch: int, data: st.DataObject) -> None:
    space = _space(request(fleet(*types), batch))
    rows = data.draw(st.lists(st.sampled_from(range(len(space.tables.rows))), min_size=1, max_size=4, unique=True))
    program = tuple(Part(row, data.draw(st.integers(1, 5))) for row in rows)
    slope = [space.sequence_s(row) for row in rows]
    found = linprog(
        c=[1.0] + [0.0] * len(rows),
        A_ub=np.column_stack([-np.ones(len(rows)), np.diag(slope)]),
        b_ub=np.zeros(len(rows)),
        A_eq=[[0.0, *(part.groups for part in program)]],
        b_eq=[batch],
    )
    ours = ratios(space, program)
    assert sum(part.groups * share for part, share in zip(program, ours, strict=True)) == pytest.approx(batch)
    assert max(s * x for s, x in zip(slope, ours, strict=True)) == pytest.approx(found.fun, rel=1e-6)


@FEW
@given(types=fleets, batch=st.integers(1, 64))
def test_the_dynamic_program_finds_what_trying_every_program_finds(types: list, batch: int) -> None:
    space = _space(request(fleet(*types), batch))
    shares = {r: batch / len(space.ways) for r in range(len(space.ways))}
    best = min(_every_program_s(space, shares))
    assert search_program(space, shares)[0] == pytest.approx(best, rel=1e-9)


def _every_program_s(space: Space, shares: dict[int, float]) -> Iterator[float]:
    """Each way of each node type at the microbatch sizes that end its groups earliest, as the search weighs them."""
    for ways in itertools.product(*space.ways):
        program: Program = ()
        slowest = 0.0
        for resource, way in enumerate(ways):
            for (kind, count), share in zip(way, _shares(space, way, shares[resource]), strict=True):
                options = [(_whole_s(space, row, share), row) for row in space.rows[kind]]
                seconds, row = min(options)
                slowest, program = max(slowest, seconds), (*program, Part(row, count))
        yield slowest + sync_s(space, program)


def _shares(space: Space, way: tuple[tuple[int, int], ...], sequences: float) -> list[float]:
    speeds = [max(1 / space.sequence_s(row) for row in space.rows[kind]) for kind, _ in way]
    whole = sum(count * speed for (_, count), speed in zip(way, speeds, strict=True))
    return [sequences * speed / whole for speed in speeds]


def _whole_s(space: Space, row: int, sequences: float) -> float:
    return float(np.ceil(sequences / space.tables.rows[row].microbatch - 1e-9)) * space.seconds(row)


@pytest.mark.parametrize(
    ("types", "batch", "layers", "width"),
    [
        ((("A100", 1, 1), ("T4", 1, 2)), 7, 3, 32),
        ((("A100", 1, 2), ("A10G", 1, 2)), 6, 4, 32),
        ((("A100", 2, 2),), 5, 3, 256),
        ((("A10G", 1, 1), ("T4", 2, 1)), 9, 2, 32),
        ((("A100", 1, 3),), 8, 4, 32),
    ],
)
def test_near_the_best_of_all_plans_without_pipelining(types: tuple, batch: int, layers: int, width: int) -> None:
    spec = model(layers, width=width, vocab=1000 if width == 32 else 32000)
    asked = request(fleet(*types), batch, spec, max_microbatch_sequences=8)
    best = min(_every_plan_s(asked))
    ours = plan_with("hap", asked).prediction.step_time_s
    assert best * (1 - 1e-9) <= ours <= best * 1.01


def _every_plan_s(asked: Request) -> Iterator[float]:
    """Seconds of every plan of one-stage pipelines: every set of groups inside nodes, microbatch sizes and counts."""
    batch = asked.global_batch_sequences
    sizes = [size for size in range(1, 9) if size in (1, 2, 4, 8) or batch % size == 0]
    loads = [(size, count) for size in sizes for count in range(1, batch // size + 1)]
    per_node = [_divisions(node.workers) for node in asked.fleet.nodes]
    for division in itertools.product(*per_node):
        groups = [group for node in division for group in node]
        for chosen in itertools.product(loads, repeat=len(groups)) if groups else ():
            if sum(size * count for size, count in chosen) != batch:
                continue
            stages = [Stage(0, asked.spec.num_layers, group) for group in groups]
            pipelines = tuple(Pipeline((s,), k, b) for s, (b, k) in zip(stages, chosen, strict=True))
            prediction = asked.cost.predict(Plan("tiny", batch, chosen[0][0], 128, pipelines))
            if prediction.fits:
                yield prediction.step_time_s


def _divisions(workers: tuple[str, ...]) -> list[tuple[tuple[str, ...], ...]]:
    """Groups of 1, 2 or 4 of a node's GPUs, which are alike: by sizes only, idle ones last."""
    found: dict[tuple[int, ...], None] = {}
    for count in range(len(workers) + 1):
        for sizes in itertools.combinations_with_replacement((4, 2, 1), count):
            if sum(sizes) <= len(workers):
                found[sizes] = None
    out = []
    for sizes in found:
        ends = list(itertools.accumulate(sizes))
        out.append(tuple(workers[end - size : end] for end, size in zip(ends, sizes, strict=True)))
    return out


def test_faster_gpus_get_more_sequences() -> None:
    asked = request(fleet(("A100", 1, 1), ("T4", 1, 1)), 50, model(6, width=32, vocab=1000), max_microbatch_sequences=1)
    loads = {p.stages[0].workers[0]: p.num_sequences for p in plan_with("hap", asked).plan.pipelines}
    assert loads == {"a100-0/0": 40, "t4-0/0": 10}


def test_one_tp_degree_and_one_microbatch_size_where_asked() -> None:
    asked = request(fleet(("A100", 1, 4), ("T4", 2, 2)), 16, mixed_tp=False, mixed_microbatch=False)
    plan = plan_with("hap", asked).plan
    assert len({stage.tp_degree for p in plan.pipelines for stage in p.stages}) == 1
    assert len({p.microbatch_sequences for p in plan.pipelines}) == 1


def test_a_model_larger_than_every_group_names_what_it_lacks() -> None:
    asked = request(fleet(*DEMO), 8, model(28, width=2048))
    plan_with("autohet", asked)  # with pipelines it fits
    with pytest.raises(InfeasibleError, match=r"whole model.*would need .* GiB.*GiB too little.*autohet"):
        plan_with("hap", asked)
