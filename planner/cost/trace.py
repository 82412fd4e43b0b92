"""Chrome trace of the simulated step (chrome://tracing, Perfetto).

One process a node, one lane a worker.
"""

from collections.abc import Iterator
from typing import Any

from planner.cluster import Fleet
from planner.cost.model import CostModel
from planner.cost.schedule import Timeline, simulate_pipeline
from planner.cost.step_times import Simulation
from planner.plan import Pipeline, Plan

_MICROSECONDS = 1e6


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


def _lanes(plan: Plan, fleet: Fleet) -> dict[str, tuple[int, int]]:
    """Map each worker to (process of its node, lane of its own)."""
    processes: dict[str, int] = {}
    lanes = {}
    for lane, worker in enumerate(plan.workers):
        process = processes.setdefault(fleet.node_of(worker).name, len(processes))
        lanes[worker] = (process, lane)
    return lanes


def _names(plan: Plan, fleet: Fleet, lanes: dict[str, tuple[int, int]]) -> Iterator[dict[str, Any]]:
    for worker in plan.workers:
        node = fleet.node_of(worker)
        pid, tid = lanes[worker]
        label = f"{node.name} ({node.node_type.gpu_type})"
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": tid, "args": {"name": label}}
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": worker}}
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": pid,
            "tid": tid,
            "args": {"sort_index": tid},
        }


def _event(
    name: str, category: str, start_s: float, end_s: float, lane: tuple[int, int], **args: object
) -> dict[str, Any]:
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
    number: int, pipeline: Pipeline, timeline: Timeline, lanes: dict[str, tuple[int, int]]
) -> Iterator[dict[str, Any]]:
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


def _sync_events(
    simulation: Simulation, lanes: dict[str, tuple[int, int]]
) -> Iterator[dict[str, Any]]:
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
