"""Command `autohet plan`: chooses a plan for a job on a cluster, or costs given plans.

Documents and JSON: the README's contract.
"""

import argparse
import gc
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autohet.cli.plans.answers import evaluate_given, first_plan, search_plan
from autohet.cli.plans.inputs import Session, open_session
from autohet.cli.plans.options import add_options as add_options
from autohet.cli.plans.options import check_output
from autohet.control.planning.buying import nodes_of
from autohet.runtime.facts.fact_store import recall
from planner.cost.parameters import OURS
from planner.cost.trace import chrome_trace
from planner.errors import ConfigError
from planner.inputs.documents import Document, refuse_unwritable
from planner.plans.plan import Plan

DESCRIPTION = (
    "Chooses an asymmetric 3D plan for a job on a cluster, compares searches, or costs"
    " given plans. Exit codes: 0 there is a plan, 2 the input is wrong or no plan can meet"
    " it (the message says which limit)."
)


@dataclass(frozen=True)
class _Launch:
    """Document of `planned_launch`; None where Ray launches nothing."""

    document: Document | None


def run(args: argparse.Namespace) -> int:
    """Run the command.

    ConfigError is the user's mistake (the caller prints it and exits with 2).
    """
    # A search makes millions of objects, few of them in circles: with the default threshold a
    # tenth of its time goes into looking for these.
    before = gc.get_threshold()
    gc.set_threshold(300_000)
    try:
        return _run(args)
    finally:
        gc.set_threshold(*before)


def _run(args: argparse.Namespace) -> int:
    check_output("--out", args.out)
    check_output("--trace-out", args.trace_out)
    check_output("--picture", args.picture, (".png", ".svg"))
    session = open_session(args)
    if args.evaluate:
        document = evaluate_given(session)
        chosen: Plan | None = first_plan(document)
        code = 0
    else:
        document, chosen, code = search_plan(session)
        document["launch"] = _launch(session, chosen)

    document["framework"] = session.framework
    document["cluster_notes"] = list(session.cluster.notes)
    refusal = session.inputs.training_refusal
    document["training"] = {
        "can_run": refusal is None,
        "reason": refusal,
        "activation_memory": session.inputs.activation_memory,
    }
    if session.calibration is not None:
        document["calibration"] = session.calibration.to_document()

    _write_outputs(session, chosen)
    _print(session, document)
    return code


def _launch(session: Session, plan: Plan | None) -> Document | None:
    """Describe what Ray launches for the plan; None where `autohet train` would ask for nothing.

    Raises:
        ConfigError: no request names the plan's nodes, so `autohet train` would refuse them.
    """
    if plan is None or session.framework != OURS:
        return None
    best = nodes_of(plan, session.fleet)
    facts = {
        "job": repr(session.job),
        "cluster": repr(session.cluster),
        "document": session.document,
        "nodes": best,
    }

    def derive() -> _Launch:
        # Ray takes a second to import, which a plan that nobody launches need not wait for.
        scaling = importlib.import_module("autohet.driver.ray.requests.scaling")
        return _Launch(scaling.planned_launch(session.job, session.cluster, session.document, best))

    return recall(_Launch, facts, derive).document


def _write_outputs(session: Session, plan: Plan | None) -> None:
    args = session.args
    if plan is None:
        return
    if args.out:
        with refuse_unwritable(args.out):
            Path(args.out).write_text(plan.to_json() + "\n")
    if not args.trace_out:
        return
    if plan.spmd is not None:
        raise ConfigError(
            "--trace-out shows pipelines, and the plan is one SPMD program; see it with --explain"
        )
    trace = chrome_trace(plan, session.cost_model(plan))
    with refuse_unwritable(args.trace_out):
        Path(args.trace_out).write_text(json.dumps(trace))


def _print(session: Session, document: Document) -> None:
    if session.args.picture:
        _shown_by("picture", "draw")(document, session.fleet, session.args.picture)
    if session.args.json:
        json.dump(document, sys.stdout)
        print()
        return
    _shown_by("display", "show")(document, session.fleet)


def _shown_by(module: str, name: str) -> Callable[..., None]:
    """Import a module that only output for people needs; return its function."""
    imported = importlib.import_module(f"autohet.cli.plans.{module}")
    function: Callable[..., None] = getattr(imported, name)
    return function
