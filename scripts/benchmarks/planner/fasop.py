"""FASOP's cases: its published partitions, and the times of its searches.

They use its own measured layer times. The forward seconds at microbatch 1 are in the folder of
published measurements (`data/fasop/profiles.json`). How they grow with the microbatch FASOP wrote
into its program (estimate.py at 05b0cb4, measured by its authors): the figures are in `_GROWTH`.
Backward is twice the forward there. Clusters, batches and prices are those of its program.
"""

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autohet.runtime.models.specs.model_spec import model_spec_from_config
from planner.cost.basis import Measurements, Workload
from planner.cost.model import CostModel
from planner.cost.parameters import CostParameters, framework_parameters
from planner.inputs.fleet import Fleet, Node, NodeType
from planner.inputs.profile import Measurement, ProfileTable
from planner.plans.model_spec import ModelSpec
from planner.plans.plan import Pipeline, Plan, Stage
from planner.search.problem.cost_tables import tables_of
from planner.strategies import Request, plan_with
from planner.strategies.fasop import BoundaryTransfers, cuts, kinds_change
from planner.strategies.staged import Groups, Staged

ResultRow = dict[str, Any]
GIB = 2**30
SIZES = (1, 2, 4, 8, 16, 32)
# (model, GPU, layer) -> (first microbatch that takes longer, factor of each doubling from there;
# the later ones double)
_GROWTH: dict[tuple[str, str, str], tuple[int, tuple[float, ...]]] = {
    ("bert", "A10", "embedding"): (4, (1.0,)),
    ("bert", "A10", "block"): (8, ()),
    ("bert", "A100", "embedding"): (8, (1.385, 1.589, 1.565)),
    ("bert", "A100", "block"): (8, (1.236, 1.658)),
    ("gpt2XL", "A100", "embedding"): (64, ()),
    ("gpt2XL", "A100", "head"): (64, ()),
    ("T5", "A10", "encoder"): (2, (1.14,)),
    ("T5", "A10", "decoder"): (2, (1.094,)),
    ("T5", "A10", "embedding"): (2, (1.2, 1.2, 1.4, 1.6)),
    ("T5", "A10", "dec_embedding"): (2, (1.2, 1.2, 1.4, 1.6)),
    ("T5", "A100", "encoder"): (4, (1.173, 1.489)),
    ("T5", "A100", "decoder"): (4, (1.142, 1.683)),
    ("T5", "A100", "embedding"): (2, (1.386, 1.244, 1.356, 1.055, 1.368)),
    ("T5", "A100", "dec_embedding"): (2, (1.126, 1.080, 1.090, 1.596, 1.529)),
}


@dataclass(frozen=True, slots=True)
class FasopCase:
    """Setup of FASOP with nodes of four GPUs each.

    The first `a100` nodes are A100 in the mixed cluster.
    """

    model: str
    batch: int
    length: int
    nodes: int
    published_s: tuple[float, float]  # its search on equal and on mixed GPUs, on two cores


CASES = (
    FasopCase("bert", 256, 512, 4, (0.87, 3.15)),
    FasopCase("gpt2XL", 64, 1024, 8, (0.77, 5.46)),
    FasopCase("T5", 128, 512, 8, (17.8, 233.3)),
)
# model -> blocks, width, heads, vocabulary
SIZES_OF = {
    "bert": (24, 1024, 16, 30522),
    "gpt2XL": (48, 1600, 16, 50257),
    "T5": (48, 1024, 32, 30522),
}
PARETO_S = 1291.0
# model -> (microbatch, TP, DP, partition in layers with embedding and head, the decoder's embedding
# counted)
PUBLISHED: dict[str, tuple[int, int, int, tuple[int, ...]]] = {
    "bert": (8, 1, 4, (14, 5, 5, 2)),
    "T5": (2, 1, 4, (15, 10, 5, 4, 4, 4, 4, 4)),
}


def fasop_rows(folder: Path, *, pareto: bool = True) -> list[ResultRow]:
    """Return the rows of partitions, search times of the six cases, and the Pareto front if asked.

    Each row has `reached`: true if it reaches its limits.
    """
    profiles = json.loads((folder / "data" / "fasop" / "profiles.json").read_text())
    rows = []
    for case in CASES:
        if case.model in PUBLISHED:
            rows.append(partition_row(profiles, case))
    for case in CASES:
        rows += fasop_search_rows(profiles, case)
    if pareto:
        rows.append(pareto_row(profiles))
    return rows


# ---- its measurements, models and clusters ----


def growth(model: str, gpu: str, layer: str, size: int) -> float:
    """Return seconds at a microbatch over seconds at microbatch 1, by FASOP's program.

    Proportional to the microbatch if it has no figures.
    """
    first, steps = _GROWTH.get((model, gpu, layer), (2, ()))
    factor = 1.0
    doubled = 0
    at = 1
    while at < size:
        at *= 2
        if at >= first:
            factor *= steps[doubled] if doubled < len(steps) else 2.0
            doubled += 1
    return factor


def fasop_profile(entries: Sequence[ResultRow], case: FasopCase) -> ProfileTable:
    """Return FASOP's measurements of one model as a profile.

    T5 has 48 blocks, with the decoder's embedding in the first decoder block.
    """
    rows = []
    for entry in entries:
        if entry["model"] != case.model:
            continue
        for size in SIZES:
            for layer, seconds in _layers(case.model, entry, size).items():
                rows.append(
                    Measurement(
                        model=case.model,
                        gpu_type=entry["gpu"],
                        dtype="fp16",
                        tp_degree=entry["tp"],
                        sequence_length=case.length,
                        microbatch_sequences=size,
                        layer=layer,
                        forward_s=seconds,
                        backward_s=2 * seconds,
                    )
                )
    return ProfileTable(rows)


def _layers(model: str, entry: ResultRow, size: int) -> dict[str, float]:
    seconds = entry["fwd_seconds"]
    gpu = entry["gpu"]

    def grown(theirs: str, layer: str) -> float:
        return float(seconds[theirs]) * growth(model, gpu, layer, size)

    if model != "T5":
        names = {"embedding": "embedding", "transformer_layer": "block", "post_process": "head"}
        return {ours: grown(theirs, ours) for theirs, ours in names.items()}

    encoder = grown("encoder_layer", "encoder")
    decoder = grown("decoder_layer", "decoder")
    found = {
        "embedding": grown("enc_embedding", "embedding"),
        "head": grown("decoder_last_incl_post", "decoder") - decoder,
    }
    for block in range(48):
        found[f"block:{block}"] = encoder if block < 24 else decoder
    found["block:23"] = grown("encoder_last_incl_post", "encoder")
    found["block:24"] = decoder + grown("dec_embedding", "dec_embedding")
    return found


def spec(case: FasopCase) -> ModelSpec:
    """Return GPT-2 blocks of the case's sizes.

    FASOP counts 12 h^2 parameters a layer for every model.
    """
    layers, width, heads, vocab = SIZES_OF[case.model]
    sizes = {
        "n_layer": layers,
        "n_embd": width,
        "n_head": heads,
        "vocab_size": vocab,
        "n_positions": case.length,
    }
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    config = {"model_type": "gpt2"} | sizes | tokens
    return model_spec_from_config(case.model, config, precision="fp16")


def fleet(
    a100: int,
    a10: int,
    gpus: int = 4,
    gbps: tuple[float, float] = (40.0, 40.0),
    a10_usd: float = 8.144,
) -> Fleet:
    """Return FASOP's nodes with FASOP's prices.

    Their usable memory is 39.59 and 22.2 GiB (40 and 24 here: the cost model leaves its own
    margin).
    """
    fast_gbps, slow_gbps = gbps
    fast = NodeType(
        name="a100",
        gpu_type="A100",
        num_gpus=gpus,
        gpu_memory_bytes=40 * GIB,
        intra_node_bytes_per_s=1840e9 / 8,
        inter_node_bytes_per_s=fast_gbps * 1e9 / 8,
        usd_per_hour=32.7726,
        max_nodes=a100,
    )
    slow = NodeType(
        name="a10",
        gpu_type="A10",
        num_gpus=gpus,
        gpu_memory_bytes=24 * GIB,
        intra_node_bytes_per_s=252e9 / 8,
        inter_node_bytes_per_s=slow_gbps * 1e9 / 8,
        usd_per_hour=a10_usd,
        max_nodes=a10,
    )
    fast_nodes = [Node(f"a100-{i}", fast) for i in range(a100)]
    slow_nodes = [Node(f"a10-{i}", slow) for i in range(a10)]
    return Fleet(0, (*fast_nodes, *slow_nodes))


def request(entries: Sequence[ResultRow], case: FasopCase, of: Fleet, **wishes: Any) -> Request:
    """Return a request with FASOP's framework.

    That is Megatron-LM with fp16 gradients and a two-step sum of the tied embedding. Its layer
    times are taken as they are, as in its own model.
    """
    megatron = framework_parameters("megatron", CostParameters())
    parameters = replace(megatron, launch_exposure=1.0)
    model = spec(case)
    workload = Workload(model, case.length, "fp16")
    measurements = Measurements(fasop_profile(entries, case))
    cost = CostModel(of, workload, measurements, parameters)
    return Request(
        of,
        model,
        cost,
        case.batch,
        case.length,
        max_tp_degree=4,
        max_microbatch_sequences=32,
        clock=time.perf_counter,
        **wishes,
    )


# ---- the rows ----


def partition_row(entries: Sequence[ResultRow], case: FasopCase) -> ResultRow:
    """Return the row of the grid that FASOP publishes, cut by our `fasop`.

    It has FASOP's partition and ours, both under our simulation.
    """
    size, tp, dp, published = PUBLISHED[case.model]
    asked = request(entries, case, fleet(1, case.nodes - 1))
    tables = tables_of(asked)
    staged = Groups(tables, asked.fleet.workers).stages([tp * dp] * len(published), dp, size)
    assert staged is not None
    sums = tables.sums.time_sums.tolist()
    tried = cuts(
        sums,
        staged.slowest(tables),
        BoundaryTransfers(asked).seconds(staged, size),
        kinds_change(sums[0]),
    )

    def step_s(ends: Sequence[int]) -> float:
        return asked.cost.predict(_plan(case, staged, ends, size)).step_time_s

    ends = min(tried, key=step_s)
    theirs = _our_ends(case, published)
    ours_s = step_s((*ends[:-1], tables.num_layers))
    published_s = step_s((*theirs, tables.num_layers))
    partition = _counted(case, ends)
    is_equal = partition == list(published)
    found = plan_with("fasop", asked)
    return {
        "on": (
            f"FASOP's partition of {case.model}: 1 node of A100 and {case.nodes - 1} of A10, TP"
            f" {tp}, {dp} pipelines, microbatch {size}"
        ),
        "published": list(published),
        "partition": partition,
        "equal": is_equal,
        "step_time_s": ours_s,
        "published_step_time_s": published_s,
        "fasop_best_step_time_s": found.prediction.step_time_s,
        "reached": is_equal or ours_s < published_s,
    }


def _our_ends(case: FasopCase, published: Sequence[int]) -> list[int]:
    """Return the ends of all published stages but the last in our layers.

    The decoder's embedding of T5 is a layer of its own in FASOP's count alone.
    """
    found = []
    for end in itertools.accumulate(published[:-1]):
        is_past_decoder_embedding = case.model == "T5" and end > 25
        found.append(end - 1 if is_past_decoder_embedding else end)
    return found


def _plan(case: FasopCase, staged: Staged, ends: Sequence[int], size: int) -> Plan:
    """Return the plan of stages that end at these layers, with embedding and head."""
    blocks = ends[-1] - 2
    cut = []
    begin = 0
    for end in ends:
        cut.append((max(begin - 1, 0), min(end - 1, blocks)))
        begin = end

    num_microbatches = case.batch // size // staged.width
    pipelines = []
    for d in range(staged.width):
        stages = []
        for (first, last), groups in zip(cut, staged.stages, strict=True):
            stages.append(Stage(first, last - first, groups[d]))
        pipelines.append(Pipeline(tuple(stages), num_microbatches, size))
    return Plan(case.model, case.batch, size, case.length, tuple(pipelines))


def _counted(case: FasopCase, ends: Sequence[int]) -> list[int]:
    """Return the layers of each stage as FASOP counts them: with embedding and head.

    For T5 it counts two embeddings, and no head.
    """
    counts = [end - begin for begin, end in itertools.pairwise((0, *ends))]
    if case.model == "T5":
        decoder = next(i for i, end in enumerate(ends) if end > 25)
        counts[decoder] += 1
        counts[-1] -= 1
    return counts


def fasop_search_rows(entries: Sequence[ResultRow], case: FasopCase) -> Iterator[ResultRow]:
    """Seconds of our searches on its equal and mixed clusters."""
    clusters = (
        ("A10 only", fleet(0, case.nodes)),
        ("1 node of A100", fleet(1, case.nodes - 1)),
    )
    for (name, of), theirs in zip(clusters, case.published_s, strict=True):
        row: ResultRow = {
            "on": f"FASOP's case {case.model}, {case.nodes} nodes of 4, {name}",
            "published_search_s": theirs,
            "reach_s": 1.0,
        }
        for strategy in ("fasop", "autohet"):
            asked = request(entries, case, of)
            begin = time.process_time()
            answer = plan_with(strategy, asked)
            row[f"{strategy}_cpu_s"] = round(time.process_time() - begin, 3)
            row[f"{strategy}_step_time_s"] = answer.prediction.step_time_s

        longest_s = max(row["fasop_cpu_s"], row["autohet_cpu_s"])
        never_worse = row["autohet_step_time_s"] <= row["fasop_step_time_s"] * (1 + 1e-9)
        row["reached"] = longest_s < row["reach_s"] and never_worse
        yield row


def pareto_row(entries: Sequence[ResultRow]) -> ResultRow:
    """Return the row of the front over 80 fleets of up to 8 + 8 nodes of 8 GPUs, GPT-2 XL."""
    smaller = next(case for case in CASES if case.model == "gpt2XL")
    case = replace(smaller, nodes=16)
    of = fleet(8, 8, 8, (400.0, 100.0), 9.773)
    asked = request(entries, case, of, objective="pareto", time_limit_s=120.0)
    begin = time.process_time()
    front = plan_with("fasop", asked).front
    cpu_s = round(time.process_time() - begin, 2)
    points = []
    for answer in front:
        seconds = answer.prediction.step_time_s
        point = {"usd_per_hour": answer.prediction.usd_per_hour, "step_time_s": seconds}
        points.append(point | shape(answer.plan))
    return {
        "on": "FASOP's Pareto front: GPT-2 XL on 80 fleets of up to 128 GPUs",
        "published_search_s": PARETO_S,
        "cpu_s": cpu_s,
        "reach_s": 10.0,
        "points": len(points),
        "front": points,
        "reached": cpu_s < 10.0,
    }


def shape(plan: Plan) -> ResultRow:
    """Return TP, DP and PP of a grid, as the paper's table has them."""
    first = plan.pipelines[0]
    return {"tp": first.stages[0].tp_degree, "dp": len(plan.pipelines), "pp": len(first.stages)}
