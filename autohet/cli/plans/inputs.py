"""Inputs of `autohet plan`: documents, given plans, measured runs, and the cost model of them."""

import argparse
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autohet.driver.sources.instance_types import with_described_types
from autohet.runtime.facts.planning import PlanningInputs, planning_inputs
from autohet.runtime.job import Job
from autohet.runtime.step.precision import without_incapable_nodes
from planner.cost.layers.calibration import Calibration, MeasuredRun, calibrate
from planner.cost.model import CostModel
from planner.cost.parameters import (
    OURS,
    CostParameters,
    framework_parameters,
    usual_framework,
)
from planner.errors import ConfigError
from planner.inputs.cluster import Cluster, cluster_from_document
from planner.inputs.cluster_documents import read_cluster_yaml
from planner.inputs.documents import parse_csv, parse_number, read_mapping, read_text
from planner.inputs.fleet import Fleet
from planner.plans.plan import Plan

logger = logging.getLogger("autohet")


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
    document: Mapping[str, Any] = field(default_factory=dict)
    """The cluster file's document."""

    def cost_model(self, plan: Plan | None = None) -> CostModel:
        """Return the model for a plan's own sequence length and model name, else for the job's."""
        return self.inputs.cost_model(
            self.fleet,
            sequence_length=None if plan is None else plan.sequence_length,
            parameters=self.parameters,
            model=None if plan is None else plan.model,
            # Given plans are costed as they are, and other frameworks have one format.
            one_format=bool(self.given) or self.framework != OURS,
        )


def open_session(args: argparse.Namespace) -> Session:
    """Read all that the options name.

    Raises:
        ConfigError: names what cannot be read or used.
    """
    job = Job.from_yaml(args.job)
    document = with_described_types(
        read_mapping(read_cluster_yaml(args.cluster), f"cluster '{args.cluster}'")
    )
    cluster = cluster_from_document(document, f"cluster '{args.cluster}'")
    inputs = planning_inputs(job, profile=args.profile, links=args.links, zones=cluster.zones)

    given = [(path, read_plan(path)) for path in args.evaluate or ()]
    framework = framework_of(args, job, [plan for _, plan in given])
    inputs = replace(inputs, parameters=framework_parameters(framework, inputs.parameters))
    for note in cluster.notes:
        logger.warning("Without effect: %s", note)
    if not args.evaluate:
        # Given plans are costed as they are, on whatever nodes they name.
        cluster = without_incapable_nodes(cluster, job, one_format=framework != OURS)

    fleet = inputs.fleet(cluster.fleet())
    parameters = inputs.parameters
    calibration = None
    if args.calibrate:
        calibration = _calibrate(args.calibrate, inputs, fleet)
        parameters = calibration.parameters
    return Session(
        args, job, inputs, cluster, fleet, framework, parameters, calibration, given, document
    )


def framework_of(args: argparse.Namespace, job: Job, given: Sequence[Plan]) -> str:
    """Return the name of the framework whose runs are predicted.

    If plans are given for a job that this runtime could not train, they are measured runs of the
    framework that usually runs such plans.
    """
    if args.framework is not None:
        return str(args.framework)
    if given and job.data is None:
        return usual_framework(given)
    return OURS


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
    columns, rows = parse_csv(read_text(path, "runs"), f"runs '{path}'")
    if not rows or not {"plan", "measured_s"} <= set(columns):
        raise ConfigError(
            f"runs '{path}' must be a CSV with the columns plan and measured_s, and at least"
            " one row"
        )
    return [_read_run(row, Path(path), number) for number, row in enumerate(rows, 1)]


def _read_run(row: dict[str, str], path: Path, number: int) -> MeasuredRun:
    def positive(column: str) -> float:
        value = parse_number(row[column])
        if not 0 < value < float("inf"):
            raise ConfigError(
                f"'{column}' of row {number} of runs '{path}' must be a positive number, not"
                f" '{row[column]}'"
            )
        return value

    if not row["plan"]:
        raise ConfigError(f"row {number} of runs '{path}' names no plan")
    memory_bytes = None
    if row.get("measured_memory_bytes"):
        memory_bytes = positive("measured_memory_bytes")
    plan = read_plan(path.parent / row["plan"])
    return MeasuredRun(plan, positive("measured_s"), memory_bytes)


def read_plan(path: str | Path) -> Plan:
    """Read a plan document; ConfigError names the file."""
    text = read_text(path, "plan")
    try:
        return Plan.from_json(text)
    except ConfigError as error:
        raise ConfigError(f"plan '{path}': {error}") from None
