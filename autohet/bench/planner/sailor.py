"""Sailor's fleets: our search over the tables of Sailor's own formulas.

Its published cost model judges the result.
"""

import importlib.util
import itertools
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from planner.cluster import NodeType
from planner.search.draft import Estimator, Shape
from planner.search.stage_sums import Floats, Ints, Row
from planner.search.tables import Kind, Resource, Tables

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
    spec = importlib.util.spec_from_file_location(
        "sailor_judge", measurements / "tools" / "sailor_judge.py"
    )
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
    resources = tuple(
        _resource(gpu, count) for gpu, count in zip(gpus, counts, strict=True) if count
    )
    choices = itertools.product(enumerate(resources), (1, 2, 4))
    kinds = tuple(Kind(r, tp, resource.num_gpus // tp) for (r, resource), tp in choices)
    rows = _rows(judge, resources, kinds)
    between = _boundaries(judge, resources, kinds, rows)
    return Tables(
        model,
        batch,
        SEQUENCE_LENGTH,
        MOST_STAGES,
        resources,
        kinds,
        rows,
        between,
        between,
        "receiver",
    )


def _resource(gpu: str, count: int) -> Resource:
    kind = NodeType(gpu, gpu, 4, judge_memory(gpu), 1e11, 1e10)
    return Resource(kind, tuple(f"{gpu}-{i}" for i in range(count // 4)))


def _rows(judge: Any, resources: tuple[Resource, ...], kinds: tuple[Kind, ...]) -> tuple[Row, ...]:
    """Return a row for each kind and each microbatch size that the judge has measured."""
    rows = []
    for number, kind in enumerate(kinds):
        gpu = resources[kind.resource].node_type.gpu_type
        for microbatch in sorted(int(size) for size in judge.profile[gpu]):
            row = _row(judge, gpu, number, kind.tp_degree, microbatch)
            if row is not None:
                rows.append(row)
    return tuple(rows)


def judge_memory(gpu: str) -> int:
    return {"A100-40": 40, "V100-16": 16, "GH-96": 96}[gpu] * GIB


def _row(judge: Any, gpu: str, kind: int, tp: int, mbs: int) -> Row | None:
    layers = judge.profile[gpu].get(str(mbs), {}).get(str(tp))
    info = judge.info.get(str(tp))
    if layers is None or info is None:
        return None
    order = [str(i) for i in range(judge.num_layers)]
    params = np.array([info[i]["params_floats"] for i in order], dtype=float)
    acts = np.array([info[i]["act_mem_floats"] for i in order], dtype=float)
    whole = np.array([judge.info["1"][i]["params_floats"] for i in order], dtype=float)
    return Row(
        kind=kind,
        microbatch=mbs,
        forward_s=np.array([layers[i][0] for i in order]),
        backward_s=np.array([layers[i][1] for i in order]),
        state_bytes=params * 24,
        activation_bytes=acts * 4 * mbs,
        sync_bytes=whole * 4 / tp,
        fixed_bytes=2e9 if tp == 1 else 3e9,
        limit_bytes=float(judge_memory(gpu)),
    )


def _boundaries(
    judge: Any, resources: tuple[Resource, ...], kinds: tuple[Kind, ...], rows: tuple[Row, ...]
) -> Floats:
    """Return the boundaries' seconds, (rows, rows) as in `Tables`."""
    act = judge.info["1"]["1"]["act_output_floats"] * 4
    out = np.full((len(rows), len(rows)), np.inf)
    for i, j in itertools.product(range(len(rows)), repeat=2):
        if rows[i].microbatch == rows[j].microbatch:
            a = kinds[rows[i].kind]
            b = kinds[rows[j].kind]
            size = act * rows[i].microbatch
            names = [resources[kind.resource].node_type.gpu_type for kind in (a, b)]
            out[i, j] = judge.transfer_s(size, names[0], a.tp_degree, names[1], b.tp_degree)
            out[i, j] += judge.transfer_s(size, names[1], b.tp_degree, names[0], a.tp_degree)
    return out


class SailorSync:
    """Gradient sync after the pipelines by Sailor's formulas.

    All stages sum as many bytes as the fullest one, over the least TP degree.
    """

    def __init__(self, judge: Any, tables: Tables) -> None:
        self._judge = judge
        self._tables = tables
        self._names = [resource.node_type.gpu_type for resource in tables.resources]

    def after_one_s(self, timing: Estimator, number: int, shape: Shape) -> float:
        kinds = [self._tables.kind(row) for row in shape.rows]
        stages = zip(shape.rows, shape.starts, shape.ends, kinds, strict=True)
        size = max(
            self._tables.sums.stage_sync_bytes(row, start, end) * kind.tp_degree
            for row, start, end, kind in stages
        )
        used = sorted({kind.resource for kind in kinds})
        ring = sorted(self._names[used[i % len(used)]] for i in range(number))
        return float(
            self._judge.all_reduce_s(size / min(4, *(kind.tp_degree for kind in kinds)), ring)
        )

    def after_kinds_s(self, number: Ints, *_: Any) -> Floats:
        """Return zeros: the closed form ranks too many candidates to compute it for each."""
        return np.zeros(len(number))


def verdict(module: ModuleType, judge: Any, document: dict[str, Any]) -> dict[str, Any]:
    scores: dict[str, Any] = json.loads(json.dumps(module.score(judge, document)))
    return scores


def ratio(ours: float, theirs: float) -> float:
    return math.floor(1e4 * ours / theirs) / 1e4
