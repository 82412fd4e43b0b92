"""Model of a restore's time with few physical parameters, fitted to measured restores.

It is judged on scenarios that it was not fitted to.

    seconds = setup + per_request * requests of the busiest worker + max(makespan of the schedule,
    work * bare copy of the same bytes)

The makespan is that of the schedule's busiest line at the links' speeds. The bare copy is the time
that the machine took for the same bytes without the product at that time (0 if memory is far faster
than the links). `work` is the cost of a byte through the product over that of a bare one: checks,
threads, its second copy of small shards.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean
from typing import Any

from autohet.bench.recovery.simulated import PER_REQUEST_S, SETUP_S

SETUPS_S = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
PER_REQUESTS_S = (0.0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02)
WORK = tuple(0.8 + 0.05 * step for step in range(33))


@dataclass(frozen=True)
class MeasuredRestore:
    """Measurements of one restore."""

    scenario: str
    policy: str
    makespan_s: float
    copy_s: float
    requests: int
    restore_s: float


@dataclass(frozen=True)
class RestoreModel:
    """See the module; seconds, and a ratio."""

    setup_s: float
    per_request_s: float
    work: float

    def seconds(self, makespan_s: float, requests: int, copy_s: float = 0.0) -> float:
        moving_s = max(makespan_s, self.work * copy_s)
        return self.setup_s + self.per_request_s * requests + moving_s

    def error(self, case: MeasuredRestore) -> float:
        """Return predicted over measured seconds, less one."""
        predicted_s = self.seconds(case.makespan_s, case.requests, case.copy_s)
        return predicted_s / case.restore_s - 1

    def to_document(self) -> dict[str, float]:
        return {
            "setup_s": self.setup_s,
            "per_request_s": self.per_request_s,
            "work": self.work,
        }


FITTED = RestoreModel(SETUP_S, PER_REQUEST_S, work=1.0)
"""Model fitted to the recorded cases (`scripts/benchmarks/results/restore_cases.json`).

Their links are so slow that `work` shows nowhere. If two cores drive links of 10 Gb/s, the model is
22% short in the mean (`recovery_native.json`): there `work` is 1.3.
"""


def cases_of(document: dict[str, Any]) -> list[MeasuredRestore]:
    """Return the measured restores in a document of `autohet bench recovery`.

    Only restores by this repository count, since the model describes those.
    """
    cases = []
    for entry in document["scenarios"]:
        if entry["simulated"]:
            continue
        for policy, result in entry["policies"].items():
            is_ours = "makespan_s" in result and policy != "dcp_cache"
            if is_ours and result["verified"]:
                cases.append(_case(entry["scenario"], policy, result))
    return cases


def _case(scenario: str, policy: str, result: dict[str, Any]) -> MeasuredRestore:
    return MeasuredRestore(
        scenario=scenario,
        policy=policy,
        makespan_s=result["makespan_s"],
        copy_s=result["copy_s"] or 0.0,
        requests=result["requests"],
        restore_s=result["seconds"]["restore"],
    )


def fit(cases: Sequence[MeasuredRestore]) -> RestoreModel:
    """Return the grid's parameters with the least mean relative error.

    No more than three parameters, from at least as many cases.
    """
    assert len(cases) >= 3, f"{len(cases)} cases for three parameters"

    def mean_error(model: RestoreModel) -> float:
        return mean(abs(model.error(case)) for case in cases)

    models = [RestoreModel(*values) for values in product(SETUPS_S, PER_REQUESTS_S, WORK)]
    return min(models, key=mean_error)


def held_out(cases: Sequence[MeasuredRestore], scenarios: Collection[str]) -> dict[str, Any]:
    """Fit to all other scenarios and predict these.

    Returns the parameters, the errors of these scenarios, and the mean and the worst of their
    absolute values.
    """
    fitted_to = [case for case in cases if case.scenario not in scenarios]
    model = fit(fitted_to)
    errors = {}
    for case in cases:
        if case.scenario in scenarios:
            errors[f"{case.scenario} {case.policy}"] = model.error(case)

    absolute = [abs(error) for error in errors.values()]
    return {
        "fitted_to": sorted({case.scenario for case in fitted_to}),
        "parameters": model.to_document(),
        "held_out_errors": errors,
        "mean_abs_error": mean(absolute),
        "worst_abs_error": max(absolute),
    }


def cross_validated(cases: Sequence[MeasuredRestore]) -> dict[str, Any]:
    """Fit with each scenario held out in turn, and fit one model to all cases.

    The simulation of larger models uses the model of all cases.
    """
    folds = {}
    errors = []
    for name in sorted({case.scenario for case in cases}):
        fold = held_out(cases, {name})
        folds[name] = fold
        errors += [abs(error) for error in fold["held_out_errors"].values()]
    return {
        "parameters": fit(cases).to_document(),
        "folds": folds,
        "mean_abs_error": mean(errors),
        "worst_abs_error": max(errors),
        "num_cases": len(cases),
    }
