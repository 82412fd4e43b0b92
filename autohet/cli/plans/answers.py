"""Answers of `autohet plan`: given plans costed, or searches, as the contract's JSON."""

import math
import time
from typing import Any

from autohet.cli.plans.inputs import Session
from planner.cost.memory.host_memory import document_of
from planner.cost.model import CostModel
from planner.cost.prediction import Prediction
from planner.errors import ConfigError, InfeasibleError
from planner.inputs.documents import Document
from planner.inputs.zones import refusal_of
from planner.plans.formats import check_formats
from planner.plans.plan import Plan

# ---- --evaluate ----


def evaluate_given(session: Session) -> Document:
    """Cost the given plans; return the document of one, or of all."""
    results = []
    models: dict[tuple[int, str], CostModel] = {}
    for path, plan in session.given:
        key = (plan.sequence_length, plan.model)
        if key not in models:
            models[key] = session.cost_model(plan)
        model = models[key]
        try:
            prediction = model.predict(plan)
            check_formats(plan, session.fleet, None)
        except ConfigError as error:
            raise type(error)(f"plan '{path}': {error}") from None
        zones = [model.fleet.node_of(worker).node_type.zone for worker in plan.workers]
        apart = model.links.zones.first_unconnected(zones)
        if apart is not None:
            raise ConfigError(f"plan '{path}': {refusal_of(apart)}")
        document = {"file": path, **evaluation_document(plan, prediction)}
        document["rates"] = model.layer_times.rates(plan)
        document |= _host_memory(session, model, plan)
        results.append(document)
    if len(results) == 1:
        return results[0]
    return {"results": results}


def evaluation_document(plan: Plan, prediction: Prediction) -> Document:
    """Return a costed plan as the contract's JSON."""
    worker, share = prediction.tightest_worker
    document: Document = {"strategy": "given", "feasible": prediction.fits}
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


def first_plan(document: Document) -> Plan:
    """Return the first of the plans that a document of `evaluate_given` has."""
    first = document["results"][0] if "results" in document else document
    return Plan.from_document(first["plan"])


# ---- search ----


def search_plan(session: Session) -> tuple[Document, Plan | None, int]:
    """Search for a plan; return (document, best plan, exit code)."""
    from planner.strategies import STRATEGIES

    args = session.args
    job = session.job
    names = args.compare or [args.strategy or job.parallelism.strategy]
    for name in names:
        if name not in STRATEGIES:
            raise ConfigError(f"strategy is '{name}'; known: {', '.join(STRATEGIES)}")
    results = [_searched(session, name) for name in names]
    feasible = [result for result in results if result["feasible"]]
    code = 0 if feasible else 2

    document = {"results": results} if args.compare else results[0]
    if args.objective == "pareto" and not args.compare and "front" in document:
        front = document["front"]
        document = {
            "front": front,
            "strategy": names[0],
            "search": document["search"],
            "choice": document["choice"],
        }
        # Fastest first.
        return document, _plan_of(front[0] if front else None), code

    objective = args.objective or job.parallelism.objective
    key = "usd_per_million_tokens" if objective == "cost" else "step_time_s"
    best = min(feasible, key=lambda result: result["predicted"][key], default=None)
    return document, _plan_of(best), code


def _plan_of(result: Document | None) -> Plan | None:
    if result is None:
        return None
    return Plan.from_document(result["plan"])


def _searched(session: Session, name: str) -> Document:
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
        if not args.compare:
            document |= _told(request, answer, explained=args.explain)
        return document
    except ConfigError as error:
        is_answer = args.json and isinstance(error, InfeasibleError)
        if args.compare or is_answer:
            absent: Document = dict.fromkeys(("plan", "predicted", "search"))
            return absent | {
                "strategy": name,
                "feasible": False,
                "reason": str(error),
                "rejected": [],
            }
        raise


def _told(request: Any, answer: Any, *, explained: bool) -> Document:
    """Return the parts of a plan's document besides its prediction: robustness and explanation."""
    from planner.answers.robustness import robustness

    if answer.plan.spmd is not None:
        cost: CostModel = request.cost
        return cost.programs.explain(answer.plan, by_tensor=explained)
    found = robustness(request.cost, answer.plan, answer.candidates)
    document = {"robustness": found.to_document()}
    if explained:
        from planner.answers.explain import explain

        document["explanation"] = explain(request, answer).to_document()
    return document


def _formats(cost: CostModel, answer: Any) -> Document:
    """Return the formats of GPU types that do not compute in the job's precision, and their gain.

    The document is empty if all types compute in it. The gain is null where no plan without the
    types that lack its units was searched.
    """
    if not cost.formats:
        return {}
    types = cost.fleet.gpu_types
    formats = {gpu: compute for gpu, compute in cost.formats.items() if gpu in types}

    gain = None
    without = answer.without_formats
    if without is not None:
        gain = {
            "step_time_s": without.step_time_s,
            "usd_per_hour": without.usd_per_hour,
            "usd_per_million_tokens": without.usd_per_million_tokens,
        }
    return {"formats": formats, "without_formats": gain}


def _host_memory(session: Session, cost: CostModel, plan: Plan) -> Document:
    """Return the plan's need of its nodes' host memory, and sentences on shortages.

    The document is empty if the need is not known.
    """
    return document_of(cost.memory_of.host_memory(plan, session.inputs.kept))


def _request(session: Session) -> Any:
    from planner.strategies import Request

    args = session.args
    job = session.job
    wishes = job.parallelism
    objective = args.objective or wishes.objective
    max_transfer_share = wishes.max_transfer_share if objective == "time" else None
    cost = session.cost_model()
    min_holders = _wanted_holders(session)
    # Read last: the limit is the search's, not that of what is prepared for it.
    deadline_s = math.inf
    if args.time_limit:
        deadline_s = time.monotonic() + args.time_limit
    return Request(
        session.fleet,
        session.inputs.spec,
        cost,
        job.training.global_batch_sequences,
        job.training.sequence_length,
        microbatch_sequences=wishes.microbatch_sequences,
        max_tp_degree=wishes.max_tp_degree,
        max_stages=wishes.max_pipeline_stages,
        min_node_disjoint_holders=min_holders,
        objective=objective,
        max_usd_per_hour=args.max_usd_per_hour or wishes.max_usd_per_hour,
        max_zones=wishes.max_zones,
        max_transfer_share=max_transfer_share,
        bound=session.cluster.bound,
        time_limit_s=args.time_limit or wishes.search_time_limit_s,
        clock=time.monotonic,
        deadline_s=deadline_s,
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


def answer_document(answer: Any) -> Document:
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
