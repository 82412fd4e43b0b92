"""Decisions about the fleet, as pure functions of an observation.

They find what is usable, what is wrong and what has come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from autohet.control.values.actions import Drain
from autohet.control.values.fleet_event import FleetEvent
from autohet.control.values.observation import (
    Loss,
    Notice,
    Observation,
    StartingNode,
    StartState,
)
from autohet.runtime.messages import Phase, WorkerReport
from planner.inputs.fleet import Fleet, node_of

MOST_NAMED = 6
PRICE_CHANGE = 0.01
"""Share by which a price must have changed before another plan is looked for.

A search for less would find nothing that earns a move.
"""
NodePrices = Mapping[str, float | None]
"""USD per hour of each node; None: not known."""
STUCK_S = 180.0
"""Seconds for which an error of a start, such as an image that cannot be pulled, may pass."""
UNSCHEDULABLE_S = 480.0
"""Seconds in which a cluster's own autoscaler brings a machine for a pod without room."""
START_S = 1800.0
"""Seconds for a machine to boot, pull its image and install; Ray itself allows 30 to 60 minutes."""
PATIENCE_S = {
    StartState.REQUESTED: START_S,
    StartState.UNSCHEDULABLE: UNSCHEDULABLE_S,
    StartState.STARTING: START_S,
    StartState.STUCK: STUCK_S,
}
ON_THEIR_WAY = (StartState.REQUESTED, StartState.STARTING)


def usable_nodes(observation: Observation) -> tuple[str, ...]:
    """Return the living nodes that may be planned on.

    Such a node has its agent up, its data prepared, no notice, and on every GPU a process that
    answers.
    """
    return tuple(name for name in sorted(observation.nodes) if _is_usable(observation, name))


def _is_usable(observation: Observation, name: str) -> bool:
    view = observation.nodes[name]
    if not view.may_work:
        return False
    if name in observation.notices or name in observation.left_out:
        return False
    return all(_can_work(observation, worker) for worker in view.workers)


def count_workers(observation: Observation, nodes: Collection[str]) -> int:
    """Return the number of workers on these nodes."""
    return sum(len(observation.nodes[name].workers) for name in nodes)


def _can_work(observation: Observation, worker: str) -> bool:
    report = observation.reports.get(worker)
    if report is None or report.unfit:
        return False
    return worker not in observation.losses


def fleet_of(
    observation: Observation,
    names: Collection[str],
    generation: int,
    slowdowns: Mapping[str, float] | None = None,
) -> Fleet:
    """Return the fleet for the planner.

    slowdowns: factors of nodes that compute more slowly than their type.
    """
    factors = slowdowns or {}
    nodes = []
    for name in sorted(names):
        node = observation.nodes[name].node
        if name in factors:
            slowed = replace(node.node_type, slowdown=factors[name])
            node = replace(node, node_type=slowed)
        nodes.append(node)
    return Fleet(generation=generation, nodes=tuple(nodes))


def prices_of(observation: Observation, names: Collection[str]) -> dict[str, float | None]:
    """Return the present price of each of these nodes that lives."""
    nodes = observation.nodes
    return {name: nodes[name].node_type.usd_per_hour for name in names if name in nodes}


def total_usd_per_hour(prices: NodePrices, names: Collection[str]) -> float:
    """Return the price of these nodes in USD per hour; a node without a price counts as free."""
    return sum(prices.get(name) or 0.0 for name in names)


def is_repriced(before: float | None, now: float | None) -> bool:
    """Return True if a price has changed by more than `PRICE_CHANGE`, or has become known."""
    if before is None or now is None:
        return before != now
    return abs(now - before) > PRICE_CHANGE * max(now, before)


def find_repriced(
    observation: Observation, names: Collection[str], before: NodePrices, must: Collection[str]
) -> FleetEvent | None:
    """Return the nodes whose price has changed clearly since `before`, as one event; else None.

    must: nodes whose price counts however little it has changed.
    """
    now = prices_of(observation, names)
    nodes_by_phrase: dict[str, list[str]] = {}
    for name in sorted(now.keys() & before.keys()):
        has_changed = now[name] != before[name]
        if is_repriced(before[name], now[name]) or (has_changed and name in must):
            phrase = f"{_price_phrase(now[name])} instead of {_price_phrase(before[name])}"
            nodes_by_phrase.setdefault(phrase, []).append(name)
    if not nodes_by_phrase:
        return None

    phrases = []
    for phrase, nodes in sorted(nodes_by_phrase.items()):
        verb = "costs" if len(nodes) == 1 else "cost"
        phrases.append(f"{_first_few(nodes)} {verb} {phrase}")
    changed = sorted(name for nodes in nodes_by_phrase.values() for name in nodes)
    return FleetEvent(
        cause="price",
        nodes=tuple(changed),
        workers=(),
        happened_at=observation.now,
        reason=", ".join(phrases),
    )


def _price_phrase(usd: float | None) -> str:
    return "an unknown price" if usd is None else f"{usd:.4g} $/h"


def workers_to_hire(observation: Observation) -> tuple[str, ...]:
    """Return the GPUs of living, staying nodes that have no process yet, or no more."""
    found = []
    for name, view in sorted(observation.nodes.items()):
        if not view.may_work or name in observation.notices:
            continue
        for worker in view.workers:
            if _may_start(observation, worker):
                found.append(worker)
    return tuple(found)


def _may_start(observation: Observation, worker: str) -> bool:
    """Return whether `worker` has no process, and its starts have not failed for good."""
    if worker in observation.reports:
        return False
    loss = observation.losses.get(worker)
    return loss is None or not loss.for_good


def starting_workers(observation: Observation) -> tuple[str, ...]:
    """Return the workers that have no process yet, without those that wait for others' GPUs."""
    workers = workers_to_hire(observation)
    return tuple(worker for worker in workers if node_of(worker) not in observation.busy)


def describe_busy(observation: Observation) -> str:
    """Describe the nodes whose GPUs others use; empty without any."""
    by_user: dict[str, list[str]] = {}
    for name, user in sorted(observation.busy.items()):
        by_user.setdefault(user, []).append(name)
    return "; ".join(f"{user} uses the GPUs of {', '.join(by)}" for user, by in by_user.items())


def preparing_nodes(observation: Observation) -> tuple[str, ...]:
    """Return the living nodes without a notice whose data is not ready yet."""
    found = []
    for name, view in observation.nodes.items():
        if view.preparing and name not in observation.notices:
            found.append(name)
    return tuple(found)


def shortage(num_ready: int, num_needed: int, num_starting: int, num_preparing: int = 0) -> str:
    """Describe what a job that waits for its fleet has, and what it needs.

    `num_preparing`: nodes that prepare the data. The other numbers are workers.
    """
    workers = "worker" if num_ready == 1 else "workers"
    sentence = f"the fleet has {num_ready} {workers}"
    if num_starting:
        sentence += f" ({num_starting} more starting)"
    if num_preparing:
        nodes = "node" if num_preparing == 1 else "nodes"
        sentence += f" and {num_preparing} {nodes} preparing the data"
    return f"{sentence}; the job needs {num_needed}"


def find_unfit(observation: Observation) -> dict[str, str]:
    """Return the workers that can never take part, and why.

    They report so themselves, their node's data is unusable, or they never came up.
    """
    found: dict[str, str] = {}
    for worker, report in observation.reports.items():
        if report.unfit and observation.node_of(worker) in observation.nodes:
            found[worker] = report.error or "it does not say why"

    for view in observation.nodes.values():
        if view.data is not None and view.data.error is not None:
            for worker in view.workers:
                found[worker] = view.data.error

    for worker, loss in observation.losses.items():
        node = observation.node_of(worker)
        if loss.for_good and node in observation.nodes:
            found[worker] = loss.reason
    return found


def find_deaths(observation: Observation, members: Collection[str]) -> FleetEvent | None:
    """Return the members that are gone as one event.

    Their process ended, their node died, or they were silent for too long.
    """
    lost: dict[str, Loss] = {}
    for worker in members:
        if worker in observation.losses:
            lost[worker] = observation.losses[worker]
        elif observation.node_of(worker) not in observation.nodes:
            lost[worker] = Loss(
                worker=worker,
                reason="its node is gone",
                seen_at=observation.now,
                last_heard=observation.now,
            )
    if not lost:
        return None

    by_reason: dict[str, list[str]] = {}
    for worker, loss in sorted(lost.items()):
        by_reason.setdefault(loss.reason, []).append(worker)
    reasons = [f"{named(workers)}: {reason}" for reason, workers in by_reason.items()]
    nodes = observation.nodes_with(lost)
    last_heard = min(loss.last_heard for loss in lost.values())
    return FleetEvent(
        cause="death",
        nodes=tuple(sorted(nodes)),
        workers=tuple(sorted(lost)),
        happened_at=last_heard,
        reason=f"lost {'; '.join(reasons)}",
    )


def survivors(observation: Observation, members: Collection[str]) -> tuple[str, ...]:
    """Return the members whose process answers, on whatever node.

    Members with a notice count as long as they live.
    """
    found = []
    for worker in members:
        node = observation.node_of(worker)
        if observation.answers(worker) and node in observation.nodes:
            found.append(worker)
    return tuple(found)


def at_step(observation: Observation, members: Collection[str], step: int) -> Observation:
    """Return the observation as it will be when all members have the state of `step`."""
    reports = dict(observation.reports)
    for worker in members:
        if worker in reports:
            reports[worker] = replace(reports[worker], step=step, whole=True, broken=None)
    return replace(observation, reports=reports)


def named(workers: Sequence[str]) -> str:
    """Name workers in a sentence: several of one node by the node, and of many the first few."""
    by_node: dict[str, list[str]] = {}
    for worker in workers:
        by_node.setdefault(node_of(worker), []).append(worker)

    names = []
    for node, found in by_node.items():
        if len(found) == 1:
            names.append(found[0])
        else:
            names.append(f"{node} ({len(found)} workers)")
    return _first_few(names)


def _first_few(names: list[str]) -> str:
    if len(names) > MOST_NAMED:
        first = names[: MOST_NAMED - 1]
        names = [*first, f"{len(names) - len(first)} more"]
    return ", ".join(names)


def find_failures(observation: Observation, members: Collection[str]) -> FleetEvent | None:
    """Return the members that stopped by themselves as one event.

    The cause is an error of their own, or a peer that broke off.
    """
    halted = []
    for report in observation.reports_of(members):
        if report.phase is Phase.HALTED or report.phase is Phase.FAILED:
            halted.append(report.worker)
    if not halted:
        return None

    halted.sort()
    errors = []
    for worker in halted:
        report = observation.reports[worker]
        if report.phase is Phase.FAILED:
            errors.append(f"{worker}: {report.error}")
    if errors:
        reason = "; ".join(errors)
    else:
        reason = f"{named(halted)} lost contact with a peer"
    return FleetEvent(
        cause="death", nodes=(), workers=tuple(halted), happened_at=observation.now, reason=reason
    )


def find_deaths_or_failures(
    observation: Observation, members: Collection[str]
) -> FleetEvent | None:
    """Return the deaths of members as one event; without any, those that stopped by themselves."""
    deaths = find_deaths(observation, members)
    if deaths is not None:
        return deaths
    return find_failures(observation, members)


def find_behind(
    observation: Observation, survivors: Collection[str], generation: int, step: int
) -> list[str]:
    """Return the survivors whose state lacks `step` of `generation`, or is in the middle of it.

    Those that have reported that they cannot apply the step are left out. The list is empty if any
    survivor is beyond that step, for then it is an old one.
    """
    behind = []
    for worker in survivors:
        report = observation.reports[worker]
        if report.live_generation != generation:
            continue
        if report.whole and report.step > step + 1:
            return []
        is_prepared = report.prepared_step == step
        is_lacking = report.step == step and (is_prepared or not report.whole)
        if is_lacking and not _cannot_apply(report, generation, step):
            behind.append(report.worker)
    return behind


def _cannot_apply(report: WorkerReport, generation: int, step: int) -> bool:
    """Return True if the worker's roll-forward has failed, or its own update has.

    No worker waits for another's own update.
    """
    rolled = report.rolled
    if rolled is not None and rolled.generation == generation and rolled.step == step:
        return True
    return not report.whole and report.phase is Phase.FAILED


def new_drains(known: Mapping[str, Notice], observation: Observation) -> list[Drain]:
    """Return a drain for each node that leaves, so that the cluster replaces it.

    A node is drained again if its notice differs from the known one.
    """
    drains = []
    for name, notice in observation.notices.items():
        if notice != known.get(name):
            drains.append(Drain(name, notice.source, notice.deadline))
    return drains


QUIET_S = 0.3
TOGETHER_S = 0.6
SHORT_S = 10.0
"""Seconds that decide when notices of one wave are answered together.

The answer begins once none came for QUIET_S, and TOGETHER_S after the first at the latest; at once
where less than SHORT_S is left.
"""


def find_leavers(observation: Observation, members: Collection[str]) -> FleetEvent | None:
    """Return the nodes of members that have a notice, as one event.

    None while more notices of the same wave may come.
    """
    nodes = observation.nodes_with(members) & observation.nodes.keys()
    notices = {name: notice for name, notice in observation.notices.items() if name in nodes}
    if not notices:
        return None
    if _more_may_come(notices.values(), observation.now):
        return None

    workers = [worker for worker in members if observation.node_of(worker) in notices]
    first = min(notices.values(), key=_urgency)
    if first.deadline is None:
        when = "with no deadline named"
    else:
        left_s = max(0.0, first.deadline - observation.now)
        when = f"in {left_s:.0f} s"
    names = sorted(notices)
    verb = "leaves" if len(names) == 1 else "leave"
    return FleetEvent(
        cause="notice",
        nodes=tuple(names),
        workers=tuple(sorted(workers)),
        happened_at=first.seen_at,
        reason=f"{', '.join(names)} {verb} {when} ({first.source})",
    )


def _urgency(notice: Notice) -> tuple[bool, float, str]:
    """Return a key that sorts notices by deadline; those without one come last."""
    return notice.deadline is None, notice.deadline or 0.0, notice.node


def _more_may_come(notices: Collection[Notice], now: float) -> bool:
    """Return True while more notices of the same wave may come, and there is time to wait."""
    for notice in notices:
        if notice.deadline is not None and notice.deadline - now < SHORT_S:
            return False
    seen_at = [notice.seen_at for notice in notices]
    is_quiet = now - max(seen_at) >= QUIET_S
    is_late = now - min(seen_at) >= TOGETHER_S
    return not is_quiet and not is_late


def find_arrivals(
    observation: Observation, planned: frozenset[str], declined: frozenset[str]
) -> tuple[str, ...]:
    """Return the usable nodes that the present plan was not made for."""
    new = sorted(observation.nodes.keys() - planned - declined)
    return tuple(name for name in new if _is_usable(observation, name))


def starting_until(
    observation: Observation, planned: Collection[str], start_s: float
) -> float | None:
    """Return the time until which nodes that came are waited for while their processes start.

    None where no process starts. start_s: limit on the time since a node came.
    """
    starting = observation.nodes_with(starting_workers(observation)) - set(planned)
    limits = [observation.nodes[name].joined_at + start_s for name in starting]
    return max([limit for limit in limits if observation.now < limit], default=None)


# Nodes that were requested and have not joined
# --------------------------------------------------------------------------------------
# A pod without room, a machine that boots or pulls its image, and a refused launch are three
# things. Only a refusal, or a start that takes longer than its patience, is a reason to request
# other nodes.


def is_overdue(node: StartingNode, now: float, patience: float) -> bool:
    """Return True if the node has been in its state for longer than that should take."""
    return now - node.since >= patience * PATIENCE_S[node.state]


def overdue_causes(seen: Observation, patience: float) -> dict[str, str]:
    """Return the types that have an overdue node, each with the reason as a cause in a sentence."""
    causes: dict[str, str] = {}
    for node in _starting(seen):
        if not is_overdue(node, seen.now, patience):
            continue
        minutes = (seen.now - node.since) / 60
        detail = f" ({node.why})" if node.why else ""
        if node.state is StartState.UNSCHEDULABLE:
            cause = f"Kubernetes has had no room for {node.name} for {minutes:.0f} minutes{detail}"
        elif node.state is StartState.STUCK:
            cause = f"{node.name} cannot start{detail}"
        else:
            cause = f"{node.name} has been starting for {minutes:.0f} minutes{detail}"
        causes.setdefault(node.node_type, cause)
    return causes


def on_their_way(seen: Observation, patience: float) -> list[StartingNode]:
    """Return the nodes that are about to join: requested or starting, and not overdue.

    A node that has joined since the autoscaler was polled is not counted twice.
    """
    if seen.launches is None:
        return []
    joined: Counter[str] = Counter()
    for view in seen.nodes.values():
        if view.joined_at > seen.launches.polled_at:
            joined[view.node_type.name] += 1

    found = []
    for node in seen.launches.starting:
        if node.state not in ON_THEIR_WAY or is_overdue(node, seen.now, patience):
            continue
        if joined[node.node_type]:
            joined[node.node_type] -= 1
        else:
            found.append(node)
    return found


def describe_starting(seen: Observation) -> str:
    """Describe the nodes that have not joined yet, by type and state; empty without any."""
    counts: Counter[tuple[str, str]] = Counter()
    for node in _starting(seen):
        counts[node.node_type, node.state.value] += 1
    return ", ".join(f"{number} {kind} {state}" for (kind, state), number in sorted(counts.items()))


def _starting(seen: Observation) -> Iterable[StartingNode]:
    return () if seen.launches is None else seen.launches.starting
