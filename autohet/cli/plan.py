"""Command `autohet plan`: chooses a plan for a job on a cluster, or costs given plans.

Documents and JSON: the README's contract.
"""

import argparse
import csv
import gc
import importlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autohet.cli.outputs import check_output
from autohet.driver.sources.instance_types import with_described_types
from autohet.runtime.job import Job
from autohet.runtime.planning import PlanningInputs, planning_inputs
from autohet.runtime.precision import without_incapable_nodes
from planner.cluster import Cluster, Fleet, cluster_from_document
from planner.cluster_documents import read_cluster_yaml
from planner.cost.calibration import Calibration, MeasuredRun, calibrate
from planner.cost.host_memory import document_of
from planner.cost.model import CostModel
from planner.cost.parameters import (
    FRAMEWORKS,
    OURS,
    CostParameters,
    framework_parameters,
    usual_framework,
)
from planner.cost.prediction import Prediction
from planner.cost.trace import chrome_trace
from planner.errors import ConfigError, InfeasibleError
from planner.formats import check_formats
from planner.plan import Plan
from planner.zones import refusal_of

logger = logging.getLogger("autohet")


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Add the command's parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="choose an asymmetric 3D plan for a job on a cluster, or cost given plans",
        description=(
            "Chooses an asymmetric 3D plan for a job on a cluster, compares searches, or costs"
            " given plans. Exit codes: 0 there is a plan, 2 the input is wrong or no plan can meet"
            " it (the message says which limit)."
        ),
    )
    add = parser.add_argument
    add("--job", required=True, metavar="JOB", help="job document (YAML)")
    add("--cluster", required=True, metavar="CLUSTER", help="Ray cluster-launcher YAML")
    add(
        "--profile",
        metavar="TABLE",
        help="measured layer times (CSV or Parquet); default: the bundled measurements",
    )
    add(
        "--links",
        metavar="TABLE",
        help="measured bandwidths (CSV or Parquet); default: labels and catalogue",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--strategy",
        metavar="NAME",
        help=(
            "the search: autohet, metis, fasop, hap, megatron, varuna, exhaustive (default: the"
            " job's, else autohet)"
        ),
    )
    mode.add_argument(
        "--compare",
        type=_names,
        metavar="A,B,...",
        help="several searches, costed by the same model",
    )
    mode.add_argument(
        "--evaluate", nargs="+", metavar="PLAN", help="cost these plans, search nothing"
    )
    add(
        "--calibrate",
        metavar="RUNS",
        help="CSV of measured steps (plan, measured_s) that refine the cost model first",
    )
    add(
        "--framework",
        choices=tuple(FRAMEWORKS),
        help=(
            "whose runs to predict (default: this project's runtime; to --evaluate plans of a job"
            " without data: deepspeed, or where every pipeline is one GPU fsdp or pytorch)"
        ),
    )
    add("--objective", choices=("time", "cost", "pareto"), help="default: the job's, else time")
    add(
        "--max-usd-per-hour",
        type=_positive,
        metavar="X",
        help="bound on the price of the nodes in use",
    )
    add(
        "--time-limit",
        type=_positive,
        metavar="S",
        help=(
            "seconds after which any search ends with its best plan so far, and says what it has"
            " not looked at; a draft in progress is finished, which takes seconds for thousands of"
            " GPUs (default: none; searches have budgets of counts)"
        ),
    )
    add("--out", metavar="PLAN", help="write the plan (JSON)")
    add(
        "--trace-out",
        metavar="FILE",
        help="write the simulated step as a Chrome trace, for Perfetto",
    )
    add("--picture", metavar="FILE", help="draw the plan, or the Pareto front (PNG or SVG)")
    add(
        "--explain",
        action="store_true",
        help=(
            "say why each GPU type is where it is, and what one node more of each would earn (two"
            " further searches a type); of an SPMD program, how every tensor lies over the GPUs"
        ),
    )
    add("--json", action="store_true", help="print one JSON document")
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, not '{text}'")
    return value


def _names(text: str) -> list[str]:
    """Split names at commas; spaces around them do not matter."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(
            f"must be names between commas such as autohet,megatron, not '{text}'"
        )
    return names


@dataclass(frozen=True)
class Session:
    """State of one invocation: its inputs, framework and cost parameters.

    The framework is the one whose runs are predicted. The parameters are those of the cost model
    after calibration.
    """

    args: argparse.Namespace
    job: Job
    inputs: PlanningInputs
    cluster: Cluster
    fleet: Fleet
    framework: str
    parameters: CostParameters
    calibration: Calibration | None
    given: Sequence[tuple[str, Plan]]
    """Plans of `--evaluate`, with their paths."""

    def cost_model(self, plan: Plan | None = None) -> CostModel:
        """Return the model for a plan's own sequence length and model name, else for the job's."""
        length, name = (plan.sequence_length, plan.model) if plan else (None, None)
        return self.inputs.cost_model(
            self.fleet,
            sequence_length=length,
            parameters=self.parameters,
            model=name,
            one_format=self.has_one_format,
        )

    @property
    def has_one_format(self) -> bool:
        """True if stages that name no format compute in the job's precision.

        These are given plans, which are costed as they are, and those of other frameworks.
        """
        return bool(self.given) or self.framework != OURS


def run(args: argparse.Namespace) -> int:
    """Run the command.

    ConfigError is the user's mistake (the caller prints it and exits with 2).
    """
    before = gc.get_threshold()
    gc.set_threshold(
        300_000
    )  # a search makes millions of objects, few of them in circles: a tenth of its time went into looking for these  # noqa: E501
    try:
        return _run(args)
    finally:
        gc.set_threshold(*before)


def _run(args: argparse.Namespace) -> int:
    check_output("--out", args.out)
    check_output("--trace-out", args.trace_out)
    check_output("--picture", args.picture, (".png", ".svg"))
    session = _open(args)
    if args.evaluate:
        document = _evaluate(session)
        chosen: Plan | None = _first_plan(document)
        code = 0
    else:
        document, chosen, code = _search(session)
    document["framework"] = session.framework
    document["cluster_notes"] = list(session.cluster.notes)
    document["training"] = _training(session.inputs)
    if session.calibration is not None:
        document["calibration"] = session.calibration.to_document()
    _write_outputs(session, chosen)
    _print(session, document)
    return code


def _training(inputs: PlanningInputs) -> dict[str, Any]:
    """Describe if `autohet train` can run the job's model, and how activation memory is known."""
    refusal = inputs.training_refusal
    return {
        "can_run": refusal is None,
        "reason": refusal,
        "activation_memory": inputs.activation_memory,
    }


def _open(args: argparse.Namespace) -> Session:
    job = Job.from_yaml(args.job)
    document = with_described_types(read_cluster_yaml(args.cluster))
    cluster = cluster_from_document(document, f"cluster '{args.cluster}'")
    inputs = planning_inputs(job, profile=args.profile, links=args.links, zones=cluster.zones)
    given = tuple((path, read_plan(path)) for path in args.evaluate or ())
    framework = framework_of(args, job, [plan for _, plan in given])
    inputs = replace(inputs, parameters=framework_parameters(framework, inputs.parameters))
    for note in cluster.notes:
        logger.warning("Without effect: %s", note)
    if not args.evaluate:  # given plans are costed as they are
        cluster = without_incapable_nodes(cluster, job, one_format=framework != OURS)
    fleet = inputs.fleet(cluster.fleet())
    parameters = inputs.parameters
    calibration = None
    if args.calibrate:
        calibration = _calibrate(args.calibrate, inputs, fleet)
        parameters = calibration.parameters
    return Session(args, job, inputs, cluster, fleet, framework, parameters, calibration, given)


def framework_of(args: argparse.Namespace, job: Job, given: Sequence[Plan]) -> str:
    """Return the name of the framework whose runs are predicted.

    If plans are given for a job that this runtime could not train, they are measured runs of the
    framework that usually runs such plans.
    """
    if args.framework is not None:
        return str(args.framework)
    return usual_framework(given) if given and job.data is None else OURS


def _calibrate(path: str, inputs: PlanningInputs, fleet: Fleet) -> Calibration:
    runs = read_runs(path)

    def model_of(plan: Plan, parameters: CostParameters) -> CostModel:
        return inputs.cost_model(
            fleet,
            sequence_length=plan.sequence_length,
            parameters=parameters,
            model=plan.model,
            one_format=True,
        )

    return calibrate(runs, model_of, inputs.parameters)


def read_runs(path: str | Path) -> list[MeasuredRun]:
    """Read measured steps.

    The CSV has `plan` (a path relative to the file), `measured_s` and perhaps
    `measured_memory_bytes`.
    """
    try:
        with Path(path).open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise ConfigError(f"cannot read runs '{path}': {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"runs '{path}' is no CSV text: {error}") from None
    if not rows or "plan" not in rows[0] or "measured_s" not in rows[0]:
        raise ConfigError(
            f"runs '{path}' must be a CSV with the columns plan and measured_s, and at least"
            " one row"
        )
    return [_read_run(row, Path(path), number) for number, row in enumerate(rows, 1)]


def _read_run(row: dict[str, str], path: Path, number: int) -> MeasuredRun:
    def positive(column: str) -> float:
        try:
            value = float(row[column])
        except (TypeError, ValueError):
            value = 0.0
        if not 0 < value < float("inf"):
            raise ConfigError(
                f"'{column}' of row {number} of runs '{path}' must be a positive number, not"
                f" '{row[column]}'"
            )
        return value

    if not row["plan"]:
        raise ConfigError(f"row {number} of runs '{path}' names no plan")
    memory = positive("measured_memory_bytes") if row.get("measured_memory_bytes") else None
    return MeasuredRun(read_plan(path.parent / row["plan"]), positive("measured_s"), memory)


def read_plan(path: str | Path) -> Plan:
    """Read a plan document; ConfigError names the file."""
    try:
        return Plan.from_json(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read plan '{path}': {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"plan '{path}' is not UTF-8 text; it must be a plan document (JSON)"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"plan '{path}': {error}") from None


# ---- --evaluate ----


def _evaluate(session: Session) -> dict[str, Any]:
    results = []
    models: dict[tuple[int, str], CostModel] = {}
    for path, plan in session.given:
        key = (plan.sequence_length, plan.model)
        model = models.setdefault(key, models.get(key) or session.cost_model(plan))
        try:
            prediction = model.predict(plan)
            check_formats(plan, session.fleet, None)
        except ConfigError as error:
            raise type(error)(f"plan '{path}': {error}") from None
        _require_links(model, plan, path)
        results.append(
            {
                "file": path,
                **evaluation_document(plan, prediction),
                "rates": model.layer_times.rates(plan),
                **_host_memory(session, model, plan),
            }
        )
    return results[0] if len(results) == 1 else {"results": results}


def _require_links(model: CostModel, plan: Plan, path: str) -> None:
    """Raise ConfigError if the plan lies in regions between which no traffic is allowed."""
    zones = [model.fleet.node_of(worker).node_type.zone for worker in plan.workers]
    apart = model.links.zones.unconnected(zones)
    if apart is not None:
        raise ConfigError(f"plan '{path}': {refusal_of(apart)}")


def evaluation_document(plan: Plan, prediction: Prediction) -> dict[str, Any]:
    """Return a costed plan as the contract's JSON."""
    worker, share = prediction.tightest_worker
    document: dict[str, Any] = {"strategy": "given", "feasible": prediction.fits}
    if not prediction.fits_devices:
        limit = prediction.memory_limit_bytes_by_worker[worker]
        document["reason"] = (
            f"worker '{worker}' needs {share:.2f} times its {limit / 2**30:.1f} GiB of usable"
            " memory"
        )
    elif prediction.not_offloaded is not None:
        document["reason"] = prediction.not_offloaded
    elif prediction.not_staged is not None:
        document["reason"] = prediction.not_staged
    document["plan"] = plan.to_document()
    document["predicted"] = prediction.to_document()
    document["search"] = {"seconds": 0.0, "plans_evaluated": 1, "lower_bound_s": None, "gap": None}
    document["rejected"] = []
    return document


def _first_plan(document: dict[str, Any]) -> Plan:
    first = document["results"][0] if "results" in document else document
    return Plan.from_document(first["plan"])


# ---- search ----


def _search(session: Session) -> tuple[dict[str, Any], Plan | None, int]:
    """Search for a plan; return (document, best plan, exit code)."""
    from planner.strategies import STRATEGIES

    args = session.args
    job = session.job
    names = args.compare or [args.strategy or job.parallelism.strategy]
    for name in names:
        if name not in STRATEGIES:
            raise ConfigError(f"strategy is '{name}'; known: {', '.join(STRATEGIES)}")
    results = [_searched(session, name) for name in names]
    feasible = [r for r in results if r["feasible"]]
    code = 0 if feasible else 2
    if args.compare:
        document: dict[str, Any] = {"results": results}
    else:
        document = results[0]
    if args.objective == "pareto" and not args.compare and "front" in document:
        document = {
            "front": document["front"],
            "strategy": names[0],
            "search": document["search"],
            "choice": document["choice"],
        }
        return (
            document,
            Plan.from_document(document["front"][0]["plan"]) if document["front"] else None,
            code,
        )
    money = (args.objective or job.parallelism.objective) == "cost"
    key = "usd_per_million_tokens" if money else "step_time_s"
    best = min(feasible, key=lambda r: r["predicted"][key], default=None)
    return document, Plan.from_document(best["plan"]) if best else None, code


def _searched(session: Session, name: str) -> dict[str, Any]:
    """Search with one strategy and return its answer as a document.

    An infeasible strategy is an answer too in a document, and in a comparison of strategies; else
    it is an error.
    """
    from planner.strategies import plan_with

    args = session.args
    request = _request(session)
    try:
        answer = plan_with(name, request)
        document = answer_document(answer) | _host_memory(session, request.cost, answer.plan)
        document["rates"] = request.cost.layer_times.rates(answer.plan)
        document |= _formats(request.cost, answer)
        return document | ({} if args.compare else _told(request, answer, explained=args.explain))
    except ConfigError as error:
        if args.compare or (args.json and isinstance(error, InfeasibleError)):
            return _no_plan(name, str(error))
        raise


def _told(request: Any, answer: Any, *, explained: bool) -> dict[str, Any]:
    """Return the parts of a plan's document besides its prediction: robustness and explanation."""
    from planner.robustness import robustness
    from planner.spmd.fleet import explain_program

    if answer.plan.spmd is not None:
        return explain_program(request.cost, answer.plan, by_tensor=explained)
    document = {
        "robustness": robustness(request.cost, answer.plan, answer.candidates).to_document()
    }
    if explained:
        from planner.explain import explain

        document["explanation"] = explain(request, answer).to_document()
    return document


def _formats(cost: CostModel, answer: Any) -> dict[str, Any]:
    """Return the formats of GPU types that do not compute in the job's precision, and their gain.

    The document is empty if all types compute in it. The gain is null where no plan without the
    types that lack its units was searched.
    """
    if not cost.formats:
        return {}
    types = {node.node_type.gpu_type for node in cost.fleet.nodes}
    document: dict[str, Any] = {
        "formats": {gpu: compute for gpu, compute in cost.formats.items() if gpu in types}
    }
    without = answer.without_formats
    keys = ("step_time_s", "usd_per_hour", "usd_per_million_tokens")
    document["without_formats"] = without and {key: getattr(without, key) for key in keys}
    return document


def _host_memory(session: Session, cost: CostModel, plan: Plan) -> dict[str, Any]:
    """Return the plan's need of its nodes' host memory, and sentences on shortages.

    The document is empty if the need is not known.
    """
    return document_of(cost.memory_of.host_memory(plan, session.inputs.kept))


def _no_plan(name: str, reason: str) -> dict[str, Any]:
    absent: dict[str, Any] = dict.fromkeys(("plan", "predicted", "search"))
    return absent | {"strategy": name, "feasible": False, "reason": reason, "rejected": []}


def _request(session: Session) -> Any:
    from planner.strategies import Request

    args = session.args
    job = session.job
    wishes = job.parallelism
    objective = args.objective or wishes.objective
    return Request(
        session.fleet,
        session.inputs.spec,
        session.cost_model(),
        job.training.global_batch_sequences,
        job.training.sequence_length,
        microbatch_sequences=wishes.microbatch_sequences,
        max_tp_degree=wishes.max_tp_degree,
        max_stages=wishes.max_pipeline_stages,
        min_node_disjoint_holders=_wanted_holders(session),
        objective=objective,
        max_usd_per_hour=args.max_usd_per_hour or wishes.max_usd_per_hour,
        max_zones=wishes.max_zones,
        max_transfer_share=wishes.max_transfer_share if objective == "time" else None,
        bound=session.cluster.bound,
        time_limit_s=args.time_limit or wishes.search_time_limit_s,
        clock=time.monotonic,
        deadline_s=time.monotonic() + args.time_limit if args.time_limit else math.inf,
        spmd=wishes.spmd,
    )


def _wanted_holders(session: Session) -> int:
    """Return the number of nodes that must hold each layer, by the same rule as in training."""
    wishes = session.job.parallelism
    nodes = len(session.fleet.nodes)
    wanted = max(wishes.redundancy, wishes.min_pipelines)
    if wanted > nodes:
        key = "redundancy" if wishes.redundancy == wanted else "min_pipelines"
        raise InfeasibleError(
            f"parallelism.{key} is {wanted}: each layer must lie on as many nodes, but the cluster"
            f" has {nodes}, {wanted - nodes} too few; add nodes or lower it"
        )
    return wanted


def answer_document(answer: Any) -> dict[str, Any]:
    """Return a strategy's answer as the contract's JSON."""
    document = {
        "strategy": answer.strategy,
        "feasible": True,
        "plan": answer.plan.to_document(),
        "predicted": answer.prediction.to_document(),
        "search": answer.search.to_document(),
        "rejected": [{"what": item.what, "why": item.why} for item in answer.rejected],
        "idle": [{"workers": list(item.workers), "why": item.why} for item in answer.idle],
        "choice": answer.choice,
    }
    if answer.front:
        document["front"] = [answer_document(member) for member in answer.front]
    return document


# ---- outputs ----


def _write_outputs(session: Session, plan: Plan | None) -> None:
    args = session.args
    if plan is None:
        return
    if args.out:
        _write(args.out, plan.to_json() + "\n")
    if args.trace_out and plan.spmd is not None:
        raise ConfigError(
            "--trace-out shows pipelines, and the plan is one SPMD program; see it with --explain"
        )
    if args.trace_out:
        trace = chrome_trace(plan, session.cost_model(plan))
        _write(args.trace_out, json.dumps(trace))


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write '{path}': {error.strerror}") from None


def _print(session: Session, document: dict[str, Any]) -> None:
    if session.args.picture:
        _shown_by("plan_picture", "draw")(document, session.fleet, session.args.picture)
    if session.args.json:
        json.dump(document, sys.stdout)
        print()
        return
    _shown_by("plan_display", "show")(document, session.fleet)


def _shown_by(module: str, name: str) -> Callable[..., None]:
    """Import a module that only output for people needs; return its function."""
    function: Callable[..., None] = getattr(importlib.import_module(f"autohet.cli.{module}"), name)
    return function
