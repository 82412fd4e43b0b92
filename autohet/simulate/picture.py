"""Picture of `autohet simulate` (PNG or SVG).

It shows GPUs alive and in use, tokens, prices and dollars over time. SIMULATED.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autohet.runtime.process.figures import figure_class, save_figure
from autohet.simulate.dollars.prices import PriceHistory
from autohet.simulate.simulation import Scenario
from planner.inputs.documents import Json
from planner.inputs.fleet import NodeType

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
CurvePoints = tuple[list[float], list[float]]


def draw(document: Json, scenario: Scenario, path: str | Path) -> None:
    """Write the picture; ConfigError if it cannot be drawn or written."""
    figure = figure_class()(figsize=(11, 11), layout="constrained")
    fleet, speed, done, price, dollars = figure.subplots(5, 1, sharex=True)
    figure.suptitle(f"SIMULATED: {document['trace']}")
    every_result = [*document["results"], *document["baselines"]]
    results = [result for result in every_result if result["tokens"]]
    _draw_fleet(fleet, scenario, results[:1])

    training = scenario.job.training
    tokens = training.global_batch_sequences * training.sequence_length
    for index, result in enumerate(results):
        style = {
            "color": COLOURS[index % len(COLOURS)],
            "label": result["policy"],
            "linewidth": 2.0 if index == 0 else 1.0,
        }
        speed.plot(*_rate(result["stretches"], tokens), **style)
        done.plot(*_total(result["stretches"], tokens), **style)
    prices = PriceHistory(scenario.kinds, scenario.prices.rows)
    for kind, colour in _coloured_kinds(scenario):
        steps = prices.steps(kind.name, scenario.end_s)
        _, last_usd = steps[-1]
        steps.append((scenario.end_s, last_usd))
        hours = [at / 3600 for at, _ in steps]
        usd_per_gpu = [usd / kind.num_gpus for _, usd in steps]
        label = f"{kind.name} price"
        price.plot(hours, usd_per_gpu, color=colour, drawstyle="steps-post", label=label)
    price.legend(loc="lower left", fontsize="small")
    dollars.plot(*_usd_per_hour(scenario, prices), color=COLOURS[0], drawstyle="steps-post")

    labels = (
        "GPUs",
        "tokens a second",
        "million tokens",
        "USD a GPU-hour",
        "USD an hour, all nodes",
    )
    for axis, label in zip((fleet, speed, done, price, dollars), labels, strict=True):
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    done.legend(loc="upper left", fontsize="small")
    dollars.set_xlabel("hours")
    save_figure(figure, path)


def _coloured_kinds(scenario: Scenario) -> list[tuple[NodeType, str]]:
    """Return the node types with GPUs, each with its colour in all panels."""
    with_gpus = [kind for kind in scenario.cluster.node_types if kind.num_gpus]
    found = []
    for number, kind in enumerate(with_gpus, 1):
        # The first colour is that of AutoHet's own result.
        found.append((kind, COLOURS[number % len(COLOURS)]))
    return found


def _draw_fleet(axis: Any, scenario: Scenario, results: Sequence[Json]) -> None:
    for kind, colour in _coloured_kinds(scenario):
        times, gpus = _alive(scenario, kind.name, kind.num_gpus)
        label = f"{kind.name} alive"
        axis.plot(times, gpus, label=label, color=colour, drawstyle="steps-post")

    for result in results:
        times = []
        gpus = []
        for stretch in result["stretches"]:
            times += [stretch["begin_s"] / 3600, _end(stretch) / 3600]
            gpus += [float(stretch["num_gpus"])] * 2
        axis.plot(times, gpus, label=f"{result['policy']} in use", color=COLOURS[0], linewidth=2.0)
    axis.legend(loc="lower left", fontsize="small")


def _end(stretch: Json) -> float:
    return float(stretch["begin_s"] + stretch["num_steps"] * stretch["step_s"])


def _alive(scenario: Scenario, node_type: str, num_gpus: int) -> CurvePoints:
    times = [0.0]
    gpus = [0.0]
    alive = 0
    for event in scenario.trace:
        if event.node_type != node_type or event.time_s > scenario.end_s:
            continue
        if event.kind == "notice":
            continue
        if event.kind == "arrival":
            alive += num_gpus
        else:
            alive -= num_gpus
        times.append(event.time_s / 3600)
        gpus.append(float(alive))

    times.append(scenario.end_s / 3600)
    gpus.append(float(alive))
    return times, gpus


def _rate(stretches: Sequence[Json], tokens: int) -> CurvePoints:
    """Return tokens a second over time.

    They are zero between stretches, while the job waits or changes.
    """
    times = [0.0]
    rates = [0.0]
    for stretch in stretches:
        begin = stretch["begin_s"] / 3600
        end = _end(stretch) / 3600
        rate = tokens / stretch["step_s"]
        # Two points at each end: the curve has vertical edges.
        times += [begin, begin, end, end]
        rates += [0.0, rate, rate, 0.0]
    return times, rates


def _total(stretches: Sequence[Json], tokens: int) -> CurvePoints:
    times = [0.0]
    totals = [0.0]
    for stretch in stretches:
        times += [stretch["begin_s"] / 3600, _end(stretch) / 3600]
        before = totals[-1]
        after = before + stretch["num_steps"] * tokens / 1e6
        totals += [before, after]
    return times, totals


def _usd_per_hour(scenario: Scenario, prices: PriceHistory) -> CurvePoints:
    """Return the price of all living nodes, in dollars an hour, at each change."""
    moments = {0.0, scenario.end_s}
    moments.update(event.time_s for event in scenario.trace)
    for kind in scenario.kinds:
        moments.update(at for at, _ in prices.steps(kind, scenario.end_s))

    changes = deque(event for event in scenario.trace if event.kind != "notice")
    alive: Counter[str] = Counter()
    times = []
    totals = []
    for at in sorted(moments):
        if at > scenario.end_s:
            break
        while changes and changes[0].time_s <= at:
            event = changes.popleft()
            alive[event.node_type] += 1 if event.kind == "arrival" else -1
        amounts = [number * prices.usd_per_hour(kind, at) for kind, number in alive.items()]
        times.append(at / 3600)
        totals.append(sum(amounts))
    return times, totals
