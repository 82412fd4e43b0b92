"""Sailor's fleets: our search over the tables of Sailor's own formulas.

Its published cost model judges the result.
"""

import importlib.util
import json
import math
import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from autohet.bench.planner.searches import time_call
from planner.arrays import Floats, Ints
from planner.inputs.fleet import NodeType
from planner.plans.plan import Plan
from planner.search.autohet import placements
from planner.search.drafts.closed_form import families
from planner.search.drafts.cut import Balancer
from planner.search.drafts.cut_ranking import CutRanking, SharedNodes
from planner.search.drafts.draft import Estimator, Shape
from planner.search.drafts.families import Drafter
from planner.search.problem import limits
from planner.search.problem.stage_sums import Row
from planner.search.problem.tables import Kind, Resource, Tables
from planner.search.walk.improve import Improver, Judge, tries_for
from planner.search.walk.moves import Moves
from scripts.benchmarks.planner.measurements import measurements_folder

ResultRow = dict[str, Any]

GIB = 2**30
GPUS = ("A100-40", "V100-16")
MODELS = {"OPT-350": 1024, "GPT-Neo-2.7": 2048}
SEQUENCE_LENGTH = 2048
MOST_STAGES = 32
# A100 GPUs, V100 GPUs -> Sailor's own step time under its own simulator, by model (its plans, its
# CPU seconds of search)
SAILOR = {
    (16, 0): {"OPT-350": (15.156, 0.02), "GPT-Neo-2.7": (89.14, 0.05)},
    (32, 0): {"OPT-350": (7.993, 0.04), "GPT-Neo-2.7": (46.21, 0.06)},
    (128, 0): {"OPT-350": (2.395, 0.16), "GPT-Neo-2.7": (13.59, 0.19)},
    (16, 16): {"OPT-350": (13.005, 0.06), "GPT-Neo-2.7": (83.30, 0.06)},
    (32, 32): {"OPT-350": (7.402, 0.24), "GPT-Neo-2.7": (43.16, 0.35)},
    (32, 96): {"OPT-350": (5.884, 0.67), "GPT-Neo-2.7": (38.08, 0.78)},
    (64, 64): {"OPT-350": (4.605, 0.65), "GPT-Neo-2.7": (23.19, 1.06)},
    (80, 240): {"OPT-350": (2.771, 1.8), "GPT-Neo-2.7": (17.15, 3.8)},
    (128, 128): {"OPT-350": (2.395, 0.96), "GPT-Neo-2.7": (13.32, 2.3)},
    (128, 384): {"OPT-350": (1.912, 3.7), "GPT-Neo-2.7": (11.21, 7.7)},
    (512, 512): {"OPT-350": (1.175, 4.3), "GPT-Neo-2.7": (5.01, 20.0)},
}


def load_judge(measurements: Path) -> ModuleType:
    """Load the judge's own program from the folder of measured data."""
    program = measurements / "tools" / "sailor_judge.py"
    spec = importlib.util.spec_from_file_location("sailor_judge", program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sailor_tables(
    judge: Any, model: str, batch: int, counts: tuple[int, ...], gpus: tuple[str, ...] = GPUS
) -> Tables:
    """Return tables of times, memory and links by the judge's formulas.

    The fleet has `counts` GPUs of each type, four a node.
    """
    resources = []
    for gpu, count in zip(gpus, counts, strict=True):
        if count:
            resources.append(_resource(gpu, count))

    kinds = []
    for number, resource in enumerate(resources):
        for tp_degree in (1, 2, 4):
            kinds.append(Kind(number, tp_degree, resource.num_gpus // tp_degree))

    rows = _rows(judge, resources, kinds)
    # seconds there and back are in one table: the judge lets only receivers wait for transfers
    between = _boundaries(judge, resources, kinds, rows)
    return Tables(
        model,
        batch,
        SEQUENCE_LENGTH,
        MOST_STAGES,
        tuple(resources),
        tuple(kinds),
        tuple(rows),
        between,
        between,
        "receiver",
    )


def _resource(gpu: str, count: int) -> Resource:
    # transfers and sums take what the judge says, so that the links' speeds do not matter
    kind = NodeType(gpu, gpu, 4, judge_memory(gpu), 1e11, 1e10)
    nodes = tuple(f"{gpu}-{i}" for i in range(count // 4))
    return Resource(kind, nodes)


def _rows(judge: Any, resources: Sequence[Resource], kinds: Sequence[Kind]) -> list[Row]:
    """Return a row for each kind and each microbatch size that the judge has measured."""
    rows = []
    for number, kind in enumerate(kinds):
        gpu = resources[kind.resource].node_type.gpu_type
        sizes = sorted(int(size) for size in judge.profile[gpu])
        for microbatch in sizes:
            row = _row(judge, gpu, number, kind.tp_degree, microbatch)
            if row is not None:
                rows.append(row)
    return rows


def judge_memory(gpu: str) -> int:
    return {"A100-40": 40, "V100-16": 16, "GH-96": 96}[gpu] * GIB


def _row(judge: Any, gpu: str, kind: int, tp: int, microbatch: int) -> Row | None:
    """Return the row of one kind of stage; None if the judge has not measured it."""
    layers = judge.profile[gpu].get(str(microbatch), {}).get(str(tp))
    info = judge.info.get(str(tp))
    if layers is None or info is None:
        return None

    forward_s = []
    backward_s = []
    parameters = []
    activations = []
    whole_parameters = []
    for number in range(judge.num_layers):
        layer = str(number)
        forward_s.append(layers[layer][0])
        backward_s.append(layers[layer][1])
        parameters.append(info[layer]["params_floats"])
        activations.append(info[layer]["act_mem_floats"])
        whole_parameters.append(judge.info["1"][layer]["params_floats"])

    return Row(
        kind=kind,
        microbatch=microbatch,
        forward_s=np.array(forward_s),
        backward_s=np.array(backward_s),
        state_bytes=np.array(parameters, dtype=float) * 24,
        activation_bytes=np.array(activations, dtype=float) * 4 * microbatch,
        sync_bytes=np.array(whole_parameters, dtype=float) * 4 / tp,
        fixed_bytes=2e9 if tp == 1 else 3e9,
        limit_bytes=float(judge_memory(gpu)),
    )


def _boundaries(
    judge: Any, resources: Sequence[Resource], kinds: Sequence[Kind], rows: Sequence[Row]
) -> Floats:
    """Return the boundaries' seconds, (rows, rows) as in `Tables`."""
    output_bytes = judge.info["1"]["1"]["act_output_floats"] * 4
    seconds = np.full((len(rows), len(rows)), np.inf)
    for i, sending in enumerate(rows):
        for j, taking in enumerate(rows):
            # stages of one pipeline have one microbatch size
            if sending.microbatch != taking.microbatch:
                continue
            size = output_bytes * sending.microbatch
            one = kinds[sending.kind]
            other = kinds[taking.kind]
            one_gpu = resources[one.resource].node_type.gpu_type
            other_gpu = resources[other.resource].node_type.gpu_type
            there_s = judge.transfer_s(size, one_gpu, one.tp_degree, other_gpu, other.tp_degree)
            back_s = judge.transfer_s(size, other_gpu, other.tp_degree, one_gpu, one.tp_degree)
            seconds[i, j] = there_s + back_s
    return seconds


class SailorSync:
    """Gradient sync after the pipelines by Sailor's formulas.

    All stages sum as many bytes as the fullest one, over the least TP degree.
    """

    def __init__(self, judge: Any, tables: Tables) -> None:
        self._judge = judge
        self._tables = tables
        self._names = [resource.node_type.gpu_type for resource in tables.resources]

    def after_one_s(self, timing: Estimator, number: int, shape: Shape) -> float:
        """Return the seconds of the sync of `number` pipelines of one shape."""
        kinds = [self._tables.kind(row) for row in shape.rows]
        sizes = []
        for row, start, end, kind in zip(shape.rows, shape.starts, shape.ends, kinds, strict=True):
            stage_bytes = self._tables.sums.stage_sync_bytes(row, start, end)
            sizes.append(stage_bytes * kind.tp_degree)
        least_degree = min(4, *(kind.tp_degree for kind in kinds))

        used = sorted({kind.resource for kind in kinds})
        ring = sorted(self._names[used[i % len(used)]] for i in range(number))
        return float(self._judge.all_reduce_s(max(sizes) / least_degree, ring))

    def after_kinds_s(self, number: Ints, *_: Any) -> Floats:
        """Return zeros: the closed form ranks too many candidates to compute it for each."""
        return np.zeros(len(number))


def verdict(module: ModuleType, judge: Any, document: dict[str, Any]) -> dict[str, Any]:
    """Return the judge's scores of a plan as plain JSON values."""
    text = json.dumps(module.score(judge, document))
    scores: dict[str, Any] = json.loads(text)
    return scores


def ratio(ours: float, theirs: float) -> float:
    """Return our seconds over theirs, rounded down to four places."""
    return math.floor(1e4 * ours / theirs) / 1e4


def sailor_rows() -> Iterator[ResultRow]:
    folder = measurements_folder()
    if folder is None:
        yield {
            "on": "Sailor's fleets",
            "skipped": "no folder of published measurements; set AUTOHET_MEASUREMENTS",
        }
        return
    module = load_judge(folder)
    for model, batch in MODELS.items():
        judge = module.Judge(folder / "data" / "sailor", model)
        for counts, theirs in SAILOR.items():
            search = partial(
                _under_sailors_formulas, module, judge, sailor_tables(judge, model, batch, counts)
            )
            best, cost = time_call(search)
            sailor_s, sailor_cpu_s = theirs[model]
            yield {
                "on": f"Sailor {model} {counts[0]} A100 + {counts[1]} V100",
                "judge": "Sailor's formulas",
                "step_time_s": best,
                "sailor_step_time_s": sailor_s,
                "ratio": None if best is None else round(best / sailor_s, 4),
                "sailor_search_s": sailor_cpu_s,
                "reach": 1.0,
            } | cost


def _under_sailors_formulas(module: Any, judge: Any, tables: Tables) -> float | None:
    """Search under Sailor's formulas; return the best plan's step time by them."""

    def seconds(plan: Plan) -> float:
        found = verdict(module, judge, plan.to_document())
        return float(found["step_time_s"]) if found["fits"] else math.inf

    estimator = Estimator(tables)
    shared = SharedNodes(estimator, None)
    ranking = CutRanking(estimator, Balancer(tables), SailorSync(judge, tables), shared)
    proposals = Drafter(ranking, families(tables)).proposals()
    plans = [plan for each in proposals for plan in placements(tables, each, (1,))]
    starts = sorted(plans, key=seconds)[: limits.WALKS]
    tries = tries_for(sum(resource.num_gpus for resource in tables.resources))
    improver = Improver(Moves(tables, random.Random(0)), Judge(seconds))
    found = seconds(improver.best_of(starts, tries)) if starts else math.inf
    return found if math.isfinite(found) else None
