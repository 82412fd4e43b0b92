"""Report of a spot trace under several policies: the document that `autohet simulate` prints.

The one module of this package that the command imports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from autohet.driver.sources.instance_types import with_described_types
from autohet.runtime.job import Job
from autohet.simulate.comparison import compare
from autohet.simulate.dollars.price_file import RecordedPrices, price_sources, read_prices
from autohet.simulate.picture import draw
from autohet.simulate.simulation import BASELINES, POLICIES, Scenario, TraceSimulation, horizon
from autohet.simulate.spot_trace import read_trace
from planner.errors import ConfigError
from planner.inputs.cluster import Cluster, cluster_from_document
from planner.inputs.cluster_documents import read_cluster_yaml


class PriceOptions(Protocol):
    """Options that name prices over time."""

    @property
    def prices(self) -> str | None: ...

    @property
    def prices_from(self) -> str | None: ...


@dataclass(frozen=True)
class TraceOptions:
    """Options of `autohet simulate`: paths of its documents, and what is simulated.

    hours: end of the simulation; None: an hour after the trace's last event. notice_s: warning
    before a node leaves. prices_from: moment of the recorded prices at which the trace begins.
    """

    job: str
    cluster: str
    trace: str
    hours: float | None
    notice_s: float
    policies: str
    baselines: str
    prices: str | None = None
    prices_from: str | None = None
    picture: str | None = None


def report_trace(options: TraceOptions, progress: Callable[[str, float], None]) -> dict[str, Any]:
    """Simulate the trace under each policy and baseline; return the document.

    `progress` is called with a policy and the share of the trace that is done.

    Raises:
        ConfigError: an option or a document is wrong, or the job cannot be planned.
    """
    policies = _names(options.policies, "policy", POLICIES)
    baselines: Sequence[str] = BASELINES
    if options.baselines != "all":
        baselines = ()
        if options.baselines not in ("none", ""):
            baselines = _names(options.baselines, "baseline", BASELINES)

    described = read_cluster_yaml(options.cluster)
    given = _scenario(options, described)
    simulation = TraceSimulation(given)
    scenario = simulation.scenario
    results = []
    for policy in policies:

        def report(share: float, policy: str = policy) -> None:
            progress(policy, share)

        results.append(simulation.run(policy, report))
    others = [simulation.run(name) for name in baselines]

    prices = {}
    sources = price_sources(scenario.cluster, described, scenario.prices)
    for name, source in sources.items():
        steps = simulation.prices.steps(name, scenario.end_s)
        prices[name] = {"source": source, "usd_per_hour": steps}
    document = {
        "simulated": True,
        "trace": options.trace,
        "seconds": scenario.end_s,
        "left_out": sorted(given.kinds.keys() - scenario.kinds.keys()),
        "results": results,
        "baselines": others,
        "comparison": compare(results[0], others),
        "costs": scenario.costs.to_document(),
        "prices": prices,
        "simulator": {
            "searches": simulation.memory.num_searches,
            "fleets": len(simulation.memory.plans),
        },
    }
    if options.picture:
        draw(document, scenario, options.picture)
    return document


def _scenario(options: TraceOptions, described: object) -> Scenario:
    """Build the scenario from the options; `described` is the cluster file's document."""
    if not 0 <= options.notice_s < float("inf"):
        raise ConfigError(
            f"--notice-s is {options.notice_s:g}; it must be a number of seconds, at least 0"
        )
    known = with_described_types(described)
    cluster = cluster_from_document(known, f"cluster '{options.cluster}'")
    trace = read_trace(options.trace, cluster, options.notice_s)
    prices = read_recorded_prices(options, cluster, described)
    job = Job.from_yaml(options.job)
    return Scenario(job, cluster, trace, horizon(trace, options.hours), prices=prices)


def read_recorded_prices(
    options: PriceOptions, cluster: Cluster, described: object
) -> RecordedPrices:
    """Read the prices that a command names; none if it names none."""
    if options.prices_from and not options.prices:
        raise ConfigError("--prices-from needs --prices")
    if not options.prices:
        return RecordedPrices()
    return read_prices(options.prices, cluster, described, _moment(options.prices_from))


def _moment(given: str | None) -> datetime | None:
    try:
        return None if given is None else datetime.fromisoformat(given)
    except ValueError:
        raise ConfigError(
            f"--prices-from is '{given}'; it must be a moment such as 2026-11-24T05:00:00Z"
        ) from None


def _names(given: str, what: str, known: Sequence[str]) -> list[str]:
    names = given.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(f"Unknown {what} '{name}'; choose from {', '.join(known)}.")
    return names
