"""Quote: the price of a job by a deadline, and how likely it is, from many simulated runs.

Each draw is a run of the real controller along another stretch of the given histories, which wrap
around. What no history tells is assumed, and said.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from autohet.control.planning.fleet_choice import Offer, Terms, by_price
from autohet.control.planning.goal import GoalTerms
from autohet.control.planning.outlook import SPOT_PRIOR_S
from autohet.driver.job.goals import check_budget, deadline_s
from autohet.driver.sources.instance_types import with_described_types
from autohet.driver.sources.spot_prices import USUAL_S
from autohet.runtime.job import Job
from autohet.runtime.process.background import run_in_background
from autohet.simulate.dollars.price_file import RecordedPrices, price_sources
from autohet.simulate.dollars.prices import PriceHistory, PriceRow
from autohet.simulate.remembered_planning import RememberedPlanning
from autohet.simulate.simulation import Scenario, TraceSimulation
from autohet.simulate.spot_trace import TraceEvent, from_counts, in_order, read_trace
from autohet.simulate.trace_report import read_recorded_prices
from planner.errors import ConfigError
from planner.inputs.cluster import Cluster, cluster_from_document
from planner.inputs.cluster_documents import read_cluster_yaml
from planner.inputs.documents import Document
from planner.inputs.fleet import NodeType

HOUR_S = 3600.0
AWAY_S = 600.0
"""Assumed mean time, in seconds, until a spot node without a trace is there again."""
LATE = 1.5
"""Ratio to the deadline at which a draw that has not ended is given up."""
WARM_DRAWS = 4
"""Draws before the others, which share their searches."""
INTERVAL = 0.9
Events = Sequence[TraceEvent]
TraceCounts = Mapping[tuple[float, str], int]


@dataclass(frozen=True)
class QuoteOptions:
    """Options of `autohet quote`; paths are of its documents.

    by: deadline; usd: budget; None: the job's own, or none. traces: each draw is along one of them.
    """

    job: str
    cluster: str
    by: str | None
    usd: float | None
    traces: Sequence[str]
    prices: str | None
    prices_from: str | None
    notice_s: float
    draws: int


@dataclass(frozen=True)
class Draw:
    """Result of one simulated run. hours: until its end. why: what it ended for."""

    hours: float
    usd: float
    steps: int
    is_trained: bool
    why: str


@dataclass(frozen=True)
class QuoteMarket:
    """Histories that draws are taken from.

    traces: numbers of nodes by (second, type), and the seconds after which each begins again.
    """

    kinds: Mapping[str, NodeType]
    traces: Sequence[tuple[TraceCounts, float]]
    notice_s: float
    prices: RecordedPrices

    @property
    def prices_s(self) -> float:
        """Seconds after which the prices begin again."""
        return max([HOUR_S, *(at for at, _, _ in self.prices.rows)])

    @property
    def untold(self) -> list[str]:
        """Spot types of which no trace tells."""
        told = {name for counts, _ in self.traces for _, name in counts}
        return [name for name, kind in self.kinds.items() if kind.spot and name not in told]

    def draw(self, number: int, end_s: float) -> tuple[Events, RecordedPrices]:
        """Return the history of one draw: the same for the same number."""
        chance = random.Random(number)
        share = chance.random()
        rows: dict[tuple[float, str], int] = {
            (0.0, name): kind.max_nodes for name, kind in self.kinds.items() if not kind.spot
        }
        begin_s = share * self.prices_s
        if self.traces:
            counts, period_s = self.traces[number % len(self.traces)]
            begin_s = share * period_s
            rows |= _wrap(counts, period_s, begin_s, end_s)
        events = [*from_counts(dict(sorted(rows.items())), self.notice_s)]
        for name in self.untold:
            events += _assumed_lives(self.kinds[name], chance, end_s, self.notice_s)
        history = PriceHistory(self.kinds, self.prices.rows)
        found: list[PriceRow] = []
        for name in history.given:
            steps = {(at, name): usd for at, usd in history.steps(name, self.prices_s)}
            for (at, _), usd in _wrap(steps, self.prices_s, begin_s, end_s, -USUAL_S).items():
                found.append((at, name, usd))
        return in_order(events), replace(self.prices, rows=found)


def _wrap(
    history: Mapping[tuple[float, str], Any],
    period_s: float,
    begin_s: float,
    end_s: float,
    since_s: float = 0.0,
) -> dict[tuple[float, str], Any]:
    """Return the values of a history from `begin_s` on, which begins again after each period.

    since_s: first second of these, of which 0 is `begin_s`.
    """
    begin_s %= period_s
    found = {}
    for turn in range(-1, math.ceil((begin_s + end_s) / period_s)):
        for (at, name), value in sorted(history.items()):
            second = at + turn * period_s - begin_s
            if second < end_s:
                # The last value until the beginning is that of the beginning.
                found[max(since_s, second), name] = value
    return found


def _assumed_lives(
    kind: NodeType, chance: random.Random, end_s: float, notice_s: float
) -> Iterator[TraceEvent]:
    """Yield lives of spot nodes that are drawn: exponential, as the controller assumes at first."""
    for index in range(kind.max_nodes):
        at = 0.0 if chance.random() < SPOT_PRIOR_S / (SPOT_PRIOR_S + AWAY_S) else AWAY_S
        life = 0
        while at < end_s:
            name = f"{kind.name}-{index}-{life}"
            gone_s = at + chance.expovariate(1 / SPOT_PRIOR_S)
            yield TraceEvent(at, "arrival", name, kind.name)
            if notice_s > 0:
                yield TraceEvent(max(at, gone_s - notice_s), "notice", name, kind.name, gone_s)
            yield TraceEvent(gone_s, "death", name, kind.name, gone_s)
            at = gone_s + chance.expovariate(1 / AWAY_S)
            life += 1


@dataclass(frozen=True)
class Draws:
    """Some draws of a simulation, to be made in this process or another."""

    simulation: TraceSimulation
    market: QuoteMarket
    numbers: Sequence[int]


def make_draws(asked: Draws) -> list[Draw]:
    found = []
    for number in asked.numbers:
        events, prices = asked.market.draw(number, asked.simulation.scenario.end_s)
        found.append(run_draw(asked.simulation.along(events, prices)))
    return found


def run_draw(simulation: TraceSimulation) -> Draw:
    """Run the job of a simulation along its trace until it ends."""
    controller, workforce, _ = simulation.replay(simulation.scenario.trace)
    ended = controller.ended
    return Draw(
        workforce.now / 3600.0,
        workforce.machines.bill.usd,
        controller.memory.ledger.committed_steps,
        ended is not None and ended.ok,
        "not trained in time" if ended is None else ended.reason.partition(":")[0],
    )


def report_quote(options: QuoteOptions, progress: Callable[[float], None]) -> Document:
    """Return the document of `autohet quote`. progress: called with the share that is done.

    Raises:
        ConfigError: a document or an option is wrong, the deadline has passed, or the budget is
        below what the cheapest fleet needs.
    """
    if options.draws < 1:
        raise ConfigError(f"--draws is {options.draws}; it must be at least 1")
    job = _job_of(options)
    by_s = deadline_s(job, time.time())
    described = read_cluster_yaml(options.cluster)
    known = with_described_types(described)
    cluster = cluster_from_document(known, f"cluster '{options.cluster}'")
    goal = GoalTerms(by_s, job.elastic.budget_usd)
    simulation = TraceSimulation(Scenario(job, cluster, (), HOUR_S), goal=goal)
    cluster = simulation.scenario.cluster
    prices = read_recorded_prices(options, cluster, described)
    market = QuoteMarket(
        simulation.scenario.kinds, _traces(options, cluster), options.notice_s, prices
    )
    simulation = simulation.along((), prices)
    front = _front(simulation, market.prices_s)
    check_budget(job, cluster, front[0] if front else None)
    simulation.scenario = replace(simulation.scenario, end_s=_end_s(by_s, job, front))

    # Half of the draws are made in another process where there is a second processor.
    warm = range(min(WARM_DRAWS, options.draws))
    found = make_draws(Draws(simulation, market, warm))
    middle = (len(warm) + options.draws) // 2
    others = Draws(simulation, market, range(middle, options.draws))
    call = run_in_background(make_draws, others)
    for each in range(len(warm), middle):
        found += make_draws(Draws(simulation, market, [each]))
        progress(len(found) / middle)
    draws = found + (call() or make_draws(others))
    sources = price_sources(cluster, described, prices)
    return _document(job, by_s, draws) | {
        "fleets": [_fleet_document(job, offer) for offer in front],
        "assumptions": _assumptions(cluster, market, sources),
        "prices": sources,
        "simulator": {"searches": simulation.memory.num_searches},
    }


def _job_of(options: QuoteOptions) -> Job:
    """Return the job with the deadline and the budget that it is quoted for."""
    job = Job.from_yaml(options.job)
    elastic = replace(
        job.elastic,
        deadline=options.by or job.elastic.deadline,
        budget_usd=job.elastic.budget_usd if options.usd is None else options.usd,
    )
    if not elastic.has_goal:
        raise ConfigError(
            "there is nothing to quote for: give --by or --usd, or set elastic.deadline or"
            " elastic.budget_usd in the job"
        )
    if job.training.steps is None:
        raise ConfigError(
            f"job '{job.name}' does not say how many steps it trains, which its price depends on;"
            " set training.steps"
        )
    return replace(job, elastic=elastic)


def _traces(options: QuoteOptions, cluster: Cluster) -> Sequence[tuple[TraceCounts, float]]:
    """Return the numbers of nodes by (second, type) in each trace, and its length in seconds."""
    found: list[tuple[TraceCounts, float]] = []
    for path in options.traces:
        counts: dict[tuple[float, str], int] = {}
        alive: Counter[str] = Counter()
        events = read_trace(path, cluster, 0.0)
        for event in events:
            if event.kind != "notice":
                alive[event.node_type] += 1 if event.kind == "arrival" else -1
                counts[event.time_s, event.node_type] = alive[event.node_type]
        found.append((counts, max(HOUR_S, events[-1].time_s if events else 0.0)))
    return found


def _front(simulation: TraceSimulation, prices_s: float) -> list[Offer]:
    """Return the fleets that none beats in price and time, by price, at the lowest prices.

    Raises:
        ConfigError: no fleet can train the job.
    """
    simulation.require_plan()
    market = simulation.market(())
    planning = RememberedPlanning(simulation.inputs, simulation.memory, simulation.scenario.costs)
    speeds = planning.fleet_speeds(market.cluster, [market.counts])
    kinds = {kind.name: kind for kind in market.cluster.node_types}
    lowest = tuple(simulation.prices.cheapest(kinds, prices_s).values())
    cluster = replace(market.cluster, node_types=lowest)
    terms = Terms.of(simulation.job, replace(market, cluster=cluster))
    front: list[Offer] = []
    for offer in sorted(terms.offers(speeds), key=by_price):
        if not front or offer.step_s < front[-1].step_s:
            front.append(offer)
    return front


def _end_s(by_s: float | None, job: Job, front: Sequence[Offer]) -> float:
    """Return the second at which a draw that has not ended is given up."""
    if by_s is not None:
        return LATE * by_s + HOUR_S
    slowest_s = max((offer.step_s for offer in front), default=0.0)
    return 24 * HOUR_S + 4 * slowest_s * (job.training.steps or 0)


# the document
# ------------------------------------------------------------------------------


def median_and_bounds(values: Sequence[float]) -> dict[str, float] | None:
    """Return the median of drawn values, and bounds between which another draw lies in 9 of 10.

    They are order statistics, so that no distribution is assumed; None without values.
    """
    if not values:
        return None
    ordered = sorted(values)
    beyond = (1.0 - INTERVAL) / 2 * (len(ordered) + 1)
    low = max(0, math.floor(beyond) - 1)
    return {"median": median(ordered), "low": ordered[low], "high": ordered[-1 - low]}


def likelihood(number: int, draws: int) -> float:
    """Return the probability of what `number` of the draws have shown (Jeffreys' prior)."""
    return (number + 0.5) / (draws + 1)


def _document(job: Job, by_s: float | None, draws: Sequence[Draw]) -> Document:
    budget = job.elastic.budget_usd or math.inf
    by_hours = math.inf if by_s is None else by_s / HOUR_S
    trained = [draw for draw in draws if draw.is_trained]
    in_time = [draw for draw in trained if draw.hours <= by_hours]
    kept = [draw for draw in in_time if draw.usd <= budget]
    return {
        "simulated": True,
        "job": job.name,
        "steps": job.training.steps,
        "by_hours": None if by_s is None else by_hours,
        "budget_usd": job.elastic.budget_usd,
        "draws": len(draws),
        "probability": likelihood(len(kept), len(draws)),
        "probability_in_time": likelihood(len(in_time), len(draws)),
        "usd": median_and_bounds([draw.usd for draw in draws]),
        "hours": median_and_bounds([draw.hours for draw in trained]),
        "reasons": list(_reasons(draws, by_hours)),
        "runs": [asdict(draw) for draw in draws],
    }


def _reasons(draws: Sequence[Draw], by_hours: float) -> Iterator[str]:
    """Yield a sentence for each way in which draws fail, with their number."""
    number = len(draws)
    late = [draw.hours - by_hours for draw in draws if draw.is_trained and draw.hours > by_hours]
    if late:
        yield (
            f"{len(late)} of {number} draws train the last step after the deadline, by up to"
            f" {max(late):.1f} h"
        )
    for why in sorted({draw.why for draw in draws if not draw.is_trained}):
        steps = [draw.steps for draw in draws if not draw.is_trained and draw.why == why]
        yield (
            f"{len(steps)} of {number} draws end untrained ({why}), after {min(steps):,} to"
            f" {max(steps):,} steps"
        )


def _fleet_document(job: Job, offer: Offer) -> Document:
    """Return what a fleet takes for the whole job if nothing disturbs it."""
    steps = job.training.steps or 0
    return {
        "nodes": dict(offer.counts),
        "hours": steps * offer.step_s / HOUR_S,
        "usd": steps * offer.usd_a_step,
        "usd_per_hour": offer.usd_per_hour,
    }


def _assumptions(cluster: Cluster, market: QuoteMarket, sources: Mapping[str, str]) -> list[str]:
    """Return what is assumed for want of a history, each with the option that replaces it."""
    found = []
    if market.untold:
        found.append(
            f"No trace tells of {', '.join(market.untold)}: a spot node is assumed to live"
            f" {SPOT_PRIOR_S / HOUR_S:.1f} h and to be away {AWAY_S / 60:.0f} min in the mean;"
            " pass --trace."
        )
    steady = [kind.name for kind in cluster.node_types if not kind.spot]
    if steady:
        found.append(f"On-demand nodes are assumed to be there at all times: {', '.join(steady)}.")
    for kind in cluster.node_types:
        if kind.spot and kind.name not in market.prices.sources:
            found.append(f"Price of {kind.name}: {sources[kind.name]}; pass --prices.")
    return found
