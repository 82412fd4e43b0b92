"""Chrome trace of the simulated step (chrome://tracing, Perfetto).

One process a node, one lane a worker.
"""

from collections.abc import Iterator
from typing import Any

from planner.cost.model import CostModel
from planner.cost.schedule import Timeline, simulate_pipeline
from planner.cost.step_times import Simulation
from planner.inputs.fleet import Fleet
from planner.plans.plan import Pipeline, Plan

_MICROSECONDS = 1e6
_Event = dict[str, Any]
_Lane = tuple[int, int]  # process of a node, lane of a worker


def chrome_trace(plan: Plan, cost: CostModel) -> dict[str, Any]:
    """Return the trace document.

    It has complete events ("X", microseconds) for forwards, backwards, all-reduces and updates.
    """
    lanes = _lanes(plan, cost.fleet)
    events = list(_names(plan, cost.fleet, lanes))
    for number, pipeline in enumerate(plan.pipelines):
        times = cost.steps.pipeline_times(plan, pipeline)
        timeline = simulate_pipeline(times, pipeline.num_microbatches)
        events += _pipeline_events(number, pipeline, timeline, lanes)
    events += _sync_events(cost.steps.simulate(plan), lanes)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _lanes(plan: Plan, fleet: Fleet) -> dict[str, _Lane]:
    """Map each worker to (process of its node, lane of its own)."""
    processes: dict[str, int] = {}
    lanes = {}
    for lane, worker in enumerate(plan.workers):
        process = processes.setdefault(fleet.node_of(worker).name, len(processes))
        lanes[worker] = (process, lane)
    return lanes


def _names(plan: Plan, fleet: Fleet, lanes: dict[str, _Lane]) -> Iterator[_Event]:
    for worker in plan.workers:
        node = fleet.node_of(worker)
        pid, tid = lanes[worker]
        label = f"{node.name} ({node.node_type.gpu_type})"
        facts = (
            ("process_name", {"name": label}),
            ("thread_name", {"name": worker}),
            ("thread_sort_index", {"sort_index": tid}),
        )
        for name, args in facts:
            yield {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _event(
    name: str, category: str, start_s: float, end_s: float, lane: _Lane, **args: object
) -> _Event:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "ts": start_s * _MICROSECONDS,
        "dur": max(0.0, end_s - start_s) * _MICROSECONDS,
        "pid": lane[0],
        "tid": lane[1],
        "args": args,
    }


def _pipeline_events(
    number: int, pipeline: Pipeline, timeline: Timeline, lanes: dict[str, _Lane]
) -> Iterator[_Event]:
    tables = (
        ("F", "forward", timeline.forward_start_s, timeline.forward_end_s),
        ("B", "backward", timeline.backward_start_s, timeline.backward_end_s),
    )
    for index, stage in enumerate(pipeline.stages):
        place = {"pipeline": number, "stage": index}
        for letter, category, starts, ends in tables:
            for m in range(pipeline.num_microbatches):
                start = float(starts[index, m])
                end = float(ends[index, m])
                for worker in stage.workers:
                    yield _event(f"{letter}{m}", category, start, end, lanes[worker], **place)


def _sync_events(simulation: Simulation, lanes: dict[str, _Lane]) -> Iterator[_Event]:
    """Yield events of all-reduces and updates.

    All-reduces run side by side, but a worker's lane shows them one after the other, each for as
    long as it takes of its link. Time for which a worker's NIC and its link inside the node are
    full together is shown once. `ended_s`: end of the whole all-reduce.
    """
    sync = simulation.sync
    drawn = dict[str, float]()
    for event in sync.events:
        name = "tied embedding all-reduce" if event.job.tied else "gradient all-reduce"
        facts = {
            "bytes": int(event.job.num_bytes),
            "members": len(event.job.members),
            "ended_s": event.end_s,
        }
        for worker, (begin, until) in event.spans.items():
            start = max(begin, drawn.get(worker, 0.0))
            end = max(until, start)
            drawn[worker] = end
            yield _event(name, "sync", start, end, lanes[worker], **facts)
    for worker, start in sync.update_start_s.items():
        end = start + sync.update_s[worker]
        yield _event("optimizer", "update", start, end, lanes[worker])
