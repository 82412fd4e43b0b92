"""Predictions of the cost model against what others measured and published.

If their folder is absent (`measurements.py`), the rows say so. Each row names what was fitted and
what was held out. "Nothing" fitted means the defaults of `CostParameters`, one set for all rows.
They were chosen with these sets in view (docs/guides/predictions.md), so only measurements that are
not listed here test them blind. Facts of a framework (gradient width, how a tied embedding is
summed) are given.
"""

import csv
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autohet.bench.planner.layer_times import layer_times_row
from autohet.cli.plans.inputs import read_runs
from autohet.runtime.facts.planning import planning_inputs
from autohet.runtime.job import Job
from autohet.runtime.models.specs.model_spec import model_spec_from_config
from planner.cost.basis import Measurements, Workload
from planner.cost.layers.calibration import MeasuredRun, calibrate
from planner.cost.links.traffic import Links
from planner.cost.model import CostModel
from planner.cost.parameters import CostParameters, framework_parameters
from planner.inputs.cluster import cluster_from_yaml
from planner.inputs.fleet import Fleet, Node, NodeType
from planner.inputs.profile import Measurement, ProfileTable
from planner.plans.plan import Pipeline, Plan, Stage
from scripts.benchmarks.planner.measurements import measurements_folder

CALIBRATION_RUNS = 6
ResultRow = dict[str, Any]


def accuracy_rows() -> list[ResultRow]:
    """Return every accuracy row.

    A row that needs the absent folder has `skipped` with the reason.
    """
    folder = measurements_folder()
    rows = [layer_times_row()]
    needing: tuple[Callable[[Path], list[ResultRow]], ...] = (
        _amp_rows,
        _sailor_rows,
        _fasop_rows,
        _metis_rows,
        _hap_rows,
    )
    for make in needing:
        if folder is None:
            name = make.__name__.strip("_").removesuffix("_rows")
            why = "no measurements here: set AUTOHET_MEASUREMENTS to their folder"
            rows.append({"on": name, "skipped": why})
        else:
            rows += make(folder)
    return rows


# ---- sets that published_runs.py writes as documents ----


def _amp_rows(folder: Path) -> list[ResultRow]:
    before, after, fitted = _published(folder, "amp_t4")
    what = "AMP: GPT-2 345M on 16 T4"
    return [
        {"on": what, "fitted": "nothing", "held_out": "47 runs", **before, "reach": {"mape": 0.15}},
        {
            "on": what,
            "fitted": fitted,
            "held_out": "the other 41 runs",
            **after,
            "reach": {"mape": 0.04, "spearman": 0.98, "regret": 1.03},
        },
    ]


def _sailor_rows(folder: Path) -> list[ResultRow]:
    before, after, fitted = _published(folder, "sailor_opt350")
    what = "Sailor: OPT-350M on 4 to 128 GH200, its own profiles"
    reach = {"mape": 0.05, "memory_mape": 0.05}
    return [
        {"on": what, "fitted": "nothing", "held_out": "15 runs", **before, "reach": reach},
        {"on": what, "fitted": fitted, "held_out": "the other 9 runs", **after, "reach": reach},
    ]


def _published(folder: Path, name: str) -> tuple[ResultRow, ResultRow, str]:
    """Return the scores of published runs before and after calibration, and what was fitted.

    The first are scores of all runs uncalibrated, the second those of the rest after calibration on
    the first six.
    """
    with tempfile.TemporaryDirectory() as directory:
        tool = folder / "tools" / "published_runs.py"
        subprocess.run(
            [sys.executable, str(tool), "build", name, directory],
            check=True,
            capture_output=True,
            timeout=120,
        )
        at = Path(directory)
        job = Job.from_yaml(at / "job.yaml")
        table = at / "links.csv"
        links = table if table.exists() else None
        inputs = planning_inputs(job, profile=at / "profile.csv", links=links)
        parameters = framework_parameters("deepspeed", inputs.parameters)
        inputs = replace(inputs, parameters=parameters)
        fleet = cluster_from_yaml(at / "cluster.yaml").fleet()
        runs = read_runs(at / "runs.csv")

    def model_of(plan: Plan, parameters: CostParameters) -> CostModel:
        return inputs.cost_model(
            fleet, sequence_length=plan.sequence_length, parameters=parameters, model=plan.model
        )

    fit = calibrate(runs[:CALIBRATION_RUNS], model_of, inputs.parameters)
    names = sorted(fit.to_document()["parameters"])
    fitted = f"{CALIBRATION_RUNS} runs: " + ", ".join(names)
    before = scores(runs, model_of(runs[0].plan, inputs.parameters))
    rest = runs[CALIBRATION_RUNS:]
    after = scores(rest, model_of(runs[0].plan, fit.parameters))
    return before, after, fitted


def scores(runs: Sequence[MeasuredRun], model: CostModel) -> ResultRow:
    """Score a cost model on measured runs.

    Figures: absolute relative errors, rank correlation, regret of choosing by prediction, error of
    peak memory.
    """
    measured = [run.measured_s for run in runs]
    predicted = []
    errors = []
    memory_errors = []
    for run in runs:
        prediction = model.predict(run.plan)
        predicted.append(prediction.step_time_s)
        errors.append(abs(prediction.step_time_s / run.measured_s - 1))
        if run.measured_memory_bytes:
            peak = max(prediction.memory_bytes_by_worker.values())
            memory_errors.append(abs(peak / run.measured_memory_bytes - 1))

    chosen = min(range(len(runs)), key=lambda i: predicted[i])
    row: ResultRow = {
        "runs": len(runs),
        "mape": statistics.mean(errors),
        "median": statistics.median(errors),
        "worst": max(errors),
        "spearman": statistics.correlation(_ranks(measured), _ranks(predicted)),
        "regret": measured[chosen] / min(measured),
    }
    if memory_errors:
        row["memory_mape"] = statistics.mean(memory_errors)
    return row


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values have the mean of their ranks."""
    ranks = []
    for value in values:
        smaller = sum(other < value for other in values)
        equal = values.count(value)
        ranks.append(smaller + equal / 2)
    return ranks


# ---- FASOP's measured iteration, part by part ----


def _fasop_rows(folder: Path) -> list[ResultRow]:
    """Return the rows of GPT-2 XL on one A100 node and seven A10 nodes.

    Parts: pipeline, gradient sync by stage, embedding sync, total.
    """
    at = folder / "data" / "fasop"
    trace = json.loads((at / "measured_trace_gpt2xl_8nodes.json").read_text())
    fleet, plan = _fasop_plan(trace)
    config = {
        "model_type": "gpt2",
        "n_layer": 48,
        "n_embd": 1600,
        "n_head": 25,
        "vocab_size": 51200,
        "n_positions": 1024,
    }
    spec = model_spec_from_config("gpt2xl", config, precision="fp16")
    entries = json.loads((at / "profiles.json").read_text())
    profile = ProfileTable(_fasop_profile(entries))
    model = CostModel(
        fleet,
        Workload(spec, 1024, "fp16"),
        Measurements(profile),
        framework_parameters("megatron", CostParameters()),
    )

    prediction = model.predict(plan)
    by_stage = {}
    tied = 0.0
    for event in model.steps.simulate(plan).sync.events:
        seconds = event.end_s - event.start_s
        if event.job.tied:
            tied = max(tied, seconds)
        else:
            by_stage[event.job.members[0]] = seconds
    pairs = {
        "pipeline_s": (prediction.breakdown_s["pipeline"], 0.9203),
        "grad_sync_7_layers_s": (by_stage["a10-0/0"], 0.0556),
        "grad_sync_6_layers_s": (by_stage["a10-2/0"], 0.0466),
        "grad_sync_4_layers_and_embedding_s": (by_stage["a10-6/0"], 0.0531),
        "embedding_sync_s": (tied, trace["embedding_allreduce_ms"] / 1e3),
        "total_s": (prediction.step_time_s, trace["iteration_s"]),
    }
    parts = {}
    for name, (predicted, measured) in pairs.items():
        error = predicted / measured - 1
        parts[name] = {"predicted": predicted, "measured": measured, "error": error}
    return [
        {
            "on": "FASOP: one iteration of GPT-2 XL on 1 A100 and 7 A10 nodes, part by part",
            "fitted": (
                "nothing (given: fp16 gradients, Megatron-LM's two-step embedding sum and fused"
                " sends)"
            ),
            "held_out": "the iteration",
            "parts": parts,
            "worst_part": max(abs(part["error"]) for part in parts.values()),
            "total_error": abs(parts["total_s"]["error"]),
            "reach": {"worst_part": 0.10, "total_error": 0.03},
        }
    ]


def _fasop_plan(trace: ResultRow) -> tuple[Fleet, Plan]:
    def node_type(name: str, gpu: str, gib: int, intra_gbps: float) -> NodeType:
        bytes_per_s = intra_gbps * 1e9 / 8
        return NodeType(name, gpu, 4, gib * 2**30, bytes_per_s, 40e9 / 8)

    a100 = node_type("a100", "A100", 40, 1840)
    a10 = node_type("a10", "A10", 24, 128)
    nodes = [Node("a100-0", a100)]
    for i in range(7):
        nodes.append(Node(f"a10-{i}", a10))
    pipelines = []
    for replica in range(trace["dp"]):
        first = 0
        stages = []
        for node, count in zip(nodes, trace["partition"], strict=True):
            stages.append(Stage(first, count, (f"{node.name}/{replica}",)))
            first += count
        pipelines.append(Pipeline(tuple(stages), 16, 1))
    return Fleet(0, tuple(nodes)), Plan("gpt2xl", 64, 1, 1024, tuple(pipelines))


def _fasop_profile(entries: Sequence[ResultRow]) -> list[Measurement]:
    layers = {"embedding": "embedding", "transformer_layer": "block", "post_process": "head"}
    found = []
    for entry in entries:
        if entry["model"] != "gpt2XL":
            continue
        gpu = entry["gpu"]
        tp = entry["tp"]
        for theirs, layer in layers.items():
            forward_s = entry["fwd_seconds"][theirs]
            found.append(Measurement("gpt2xl", gpu, "fp16", tp, 1024, 1, layer, forward_s))
    return found


# ---- Metis's measured iterations ----


def _metis_rows(folder: Path) -> list[ResultRow]:
    """Return the rows of nine iterations of a 10-layer GPT on one A100 node.

    Measured parts (layers, loss, optimizer, batch) are summed.
    """
    at = folder / "data" / "metis"
    with (at / "measured_iterations_a100.csv").open(newline="") as file:
        measured = list(csv.DictReader(file))
    entries = {}
    for row in measured:
        path = at / f"DeviceType.A100_tp{row['tp']}_bs{row['mbs']}.json"
        entries[int(row["tp"]), int(row["mbs"])] = json.loads(path.read_text())
    rows = list[Measurement]()
    for (tp, size), entry in entries.items():
        rows += _metis_profile(tp, size, entry)
    profile = ProfileTable(rows)
    config = {
        "model_type": "gpt2",
        "n_layer": 8,
        "n_embd": 4096,
        "n_head": 32,
        "vocab_size": 51200,
        "n_positions": 1024,
    }
    spec = model_spec_from_config("gpt3", config, precision="fp16")
    kind = NodeType("a100", "A100-80", 4, 80 * 2**30, 2.3e11, 5e9)
    fleet = Fleet(0, (Node("a100-0", kind),))
    errors = {}
    for row in measured:
        tp = int(row["tp"])
        size = int(row["mbs"])
        batch_s = entries[tp, size]["execution_time"]["batch_generator_time_ms"] / 1e3
        # These profiles time a whole forward and backward at once, so nothing in them is an
        # artefact of single layers.
        parameters = replace(CostParameters(), step_overhead_s=batch_s, launch_exposure=1.0)
        model = CostModel(fleet, Workload(spec, 1024, "fp16"), Measurements(profile), parameters)
        stage = Stage(0, 8, tuple(f"a100-0/{i}" for i in range(tp)))
        plan = Plan("gpt3", size, size, 1024, (Pipeline((stage,), 1, size),))
        measured_s = float(row["measured_total_ms"]) / 1e3
        predicted_s = model.predict(plan).step_time_s
        errors[f"tp{tp} microbatch {size}"] = predicted_s / measured_s - 1
    return [
        {
            "on": "Metis: nine iterations on A100 (one stage, one microbatch)",
            "fitted": "nothing",
            "held_out": "total times; the parts are its profiles",
            "errors": errors,
            "worst": max(abs(e) for e in errors.values()),
            "reach": {"worst": 0.02},
        }
    ]


def _metis_profile(tp: int, size: int, entry: ResultRow) -> list[Measurement]:
    """Return the layer times in seconds of one of Metis's profiles.

    Its times are of forward and backward together and are split 1:2. The time beyond the layers is
    added to the head.
    """
    time = entry["execution_time"]
    total = time["layer_compute_total_ms"]
    rest = time["forward_backward_time_ms"] - sum(total)
    named = {"embedding": total[0], "block": total[1], "head": total[-1] + rest}
    update_ms = time["optimizer_time_ms"] / len(total)
    found = []
    for layer, ms in named.items():
        seconds = (ms / 3e3, 2 * ms / 3e3, update_ms / 1e3)
        found.append(Measurement("gpt3", "A100-80", "fp16", tp, 1024, size, layer, *seconds))
    return found


# ---- HAP's measured all-reduce ----


def _hap_rows(folder: Path) -> list[ResultRow]:
    """Return the rows of an all-reduce over 64 GPUs of eight machines at 10.4 Gbit/s.

    Figures: bytes of the tensor per second, mean over 4 to 256 MB.
    """
    constants = folder / "data" / "hap" / "hap_profile_constants.json"
    entries = json.loads(constants.read_text())["hap"]
    measured = next(entry["all_reduce"] for entry in entries if "V100" in entry["device_flops"])
    kind = NodeType("v100", "V100-16", 8, 16 * 2**30, 1.5e11, 10.4e9 / 8)
    members = [(f"v100-{i // 8}", kind) for i in range(64)]
    sizes = [mb * 1e6 for mb in (4, 16, 64, 256)]
    links = Links(CostParameters())
    predicted = statistics.mean(size / links.all_reduce_s(members, size) for size in sizes)
    return [
        {
            "on": "HAP: all-reduce over 2 machines of 8 V100 and 6 of 8 P100 at 10.4 Gbit/s",
            "fitted": "nothing (not among the sets in view when the defaults were chosen)",
            "held_out": "the measured bandwidth",
            "measured_bytes_per_s": measured,
            "predicted_bytes_per_s": predicted,
            "error": predicted / measured - 1,
            "reach": {},
        }
    ]
