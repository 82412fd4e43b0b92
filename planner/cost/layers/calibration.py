"""Calibration: refine the cost model's parameters from a few measured steps.

One stated procedure serves every cluster.

Maximum a posteriori: measured steps scatter log-normally around the prediction (MEASURED_SPREAD),
and each parameter around its default (SPREADS: log-normal; stage_overhead_s normal, in seconds). So
with few runs a parameter moves only as far as the runs insist, and a parameter that they do not
touch stays where it was. Peak memory, if it was measured, fits two more in the same way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from planner.arrays import Floats
from planner.cost.model import CostModel
from planner.cost.parameters import CostParameters
from planner.errors import ConfigError
from planner.plans.plan import Plan

ModelOf = Callable[[Plan, CostParameters], CostModel]
"""Makes the cost model of a plan (its length, its precision) with some parameters."""
MEASURED_SPREAD = 0.04
SPREADS = {
    "launch_exposure": 0.1,
    "launch_s": 0.5,
    "backward_ratio": 0.15,
    "launch_backward_ratio": 0.5,
    "efficiency_intra": 0.2,
    "efficiency_inter": 0.2,
    "all_reduce_efficiency": 0.2,
    "optimizer_bytes_per_parameter": 0.25,
}
STAGE_OVERHEAD_SPREAD_S = 2e-3
MEMORY_SPREADS = {"context_bytes": 0.7, "activation_scale": 0.15}


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """Plan with the seconds of one measured step.

    measured_memory_bytes: largest bytes of a worker, if known.
    """

    plan: Plan
    measured_s: float
    measured_memory_bytes: float | None = None


@dataclass(frozen=True)
class Calibration:
    """Fitted parameters and their errors.

    The errors are mean absolute relative errors over the fitted runs, before and after.
    """

    parameters: CostParameters
    defaults: CostParameters
    num_runs: int
    error_before: float
    error_after: float

    def to_document(self) -> dict[str, Any]:
        """Return the answer's `calibration`: default and fitted value of each moved parameter."""
        moved = {}
        for field in fields(CostParameters):
            default = getattr(self.defaults, field.name)
            fitted = getattr(self.parameters, field.name)
            if fitted != default:
                moved[field.name] = {"default": default, "fitted": fitted}
        return {
            "runs": self.num_runs,
            "mean_error_before": self.error_before,
            "mean_error_after": self.error_after,
            "parameters": moved,
        }


def calibrate(
    runs: Sequence[MeasuredRun],
    model_of: ModelOf,
    defaults: CostParameters,
) -> Calibration:
    """Fit `defaults` to the runs."""
    if not runs:
        raise ConfigError("no runs to calibrate with")
    times = [run.measured_s for run in runs]
    predict_times = partial(_predict_s, runs, model_of)
    parameters = _fit(defaults, SPREADS, len(SPREADS) + 1, times, predict_times)

    known = [run for run in runs if run.measured_memory_bytes]
    if known:
        peaks = [run.measured_memory_bytes or 1.0 for run in known]
        predict_peaks = partial(_predict_peaks, known, model_of)
        size = len(MEMORY_SPREADS)
        parameters = _fit(parameters, MEMORY_SPREADS, size, peaks, predict_peaks)
    return Calibration(
        parameters=parameters,
        defaults=defaults,
        num_runs=len(runs),
        error_before=_mean_error(runs, model_of, defaults),
        error_after=_mean_error(runs, model_of, parameters),
    )


def _predict_s(
    runs: Sequence[MeasuredRun],
    model_of: ModelOf,
    parameters: CostParameters,
) -> Floats:
    """Predicted seconds; a few models, one for each sequence length, serve all runs."""
    models: dict[int, CostModel] = {}
    seconds = []
    for run in runs:
        length = run.plan.sequence_length
        if length not in models:
            models[length] = model_of(run.plan, parameters)
        simulation = models[length].steps.simulate(run.plan)
        seconds.append(simulation.step_time_s)
    return np.array(seconds)


def _mean_error(
    runs: Sequence[MeasuredRun],
    model_of: ModelOf,
    parameters: CostParameters,
) -> float:
    measured = np.array([run.measured_s for run in runs])
    predicted = _predict_s(runs, model_of, parameters)
    return float(np.abs(predicted / measured - 1).mean())


def move(defaults: CostParameters, spreads: dict[str, float], steps: Floats) -> CostParameters:
    """Multiply each named parameter of `defaults` by exp(step * spread).

    A last step beyond them moves stage_overhead_s.
    """
    values = {}
    # a last step may be that of stage_overhead_s
    for (name, spread), step in zip(spreads.items(), steps, strict=False):
        factor = np.exp(step * spread)
        values[name] = float(getattr(defaults, name) * factor)

    # it is zero by default, which no factor moves, and no time is negative
    if len(steps) > len(spreads):
        overhead_s = defaults.stage_overhead_s + steps[-1] * STAGE_OVERHEAD_SPREAD_S
        values["stage_overhead_s"] = float(max(0.0, overhead_s))
    return replace(defaults, **values)  # type: ignore[arg-type]


def _predict_peaks(
    runs: Sequence[MeasuredRun],
    model_of: ModelOf,
    parameters: CostParameters,
) -> Floats:
    """Predicted bytes of the fullest worker of each run."""
    peaks = []
    for run in runs:
        memory = model_of(run.plan, parameters).memory_of
        peaks.append(max(memory.by_worker(run.plan).values()))
    return np.array(peaks)


def _fit(
    defaults: CostParameters,
    spreads: dict[str, float],
    size: int,
    measured: Sequence[float],
    predict: Callable[[CostParameters], Floats],
) -> CostParameters:
    """Move `defaults` by `size` steps (see `move`), so that predictions come near `measured`."""
    # its import takes a fifth of a second, which a command without runs does not wait for
    from scipy.optimize import least_squares

    log_measured = np.log(measured)

    def residuals(steps: Floats) -> Floats:
        predicted = predict(move(defaults, spreads, steps))
        errors = (np.log(predicted) - log_measured) / MEASURED_SPREAD
        return np.concatenate([_soften(errors), steps])

    # Levenberg-Marquardt; residuals are smooth but for the few places where links fill up
    found = least_squares(
        residuals, np.zeros(size), method="lm", diff_step=1e-3, ftol=1e-6, max_nfev=500
    )
    return move(defaults, spreads, found.x)


def _soften(residuals: Floats) -> Floats:
    """Apply the pseudo-Huber loss, so that one odd run cannot dominate.

    Its square is r^2 for small residuals and grows like |r| for large ones.
    """
    loss = 2 * (np.sqrt(1 + residuals**2) - 1)
    signed: Floats = np.sign(residuals) * np.sqrt(loss)
    return signed
