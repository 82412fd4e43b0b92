"""The 1F1B simulation against an independent evaluation of its dependency graph, and against the
closed forms.
"""

from itertools import pairwise

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost.schedule import PipelineTimes, ends_of_stages, pipeline_bound_s, simulate_pipeline


@st.composite
def pipelines(draw):
    stages, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    seconds = st.floats(0.01, 5.0, allow_nan=False)
    lists = [
        tuple(draw(st.lists(seconds, min_size=n, max_size=n)))
        for n in (stages, stages, stages - 1, stages - 1)
    ]
    more = draw(st.lists(st.integers(1, 3), min_size=stages - 1, max_size=stages - 1))
    in_flight = draw(st.sampled_from([(), tuple(np.cumsum([1, *more])[::-1].tolist())]))
    return PipelineTimes(
        *lists, draw(st.sampled_from(["both", "receiver", "none"])), in_flight
    ), microbatches


def longest_paths(times, microbatches):
    """Ends of all work by the longest path through a graph of (kind, stage, microbatch), built
    without the simulator.

    An edge u -> v of weight w says: v starts at least w after u ends.
    """
    stages = len(times.forward_s)
    occupied_receiver, occupied_sender = times.transfers != "none", times.transfers == "both"
    graph, orders = networkx.DiGraph(), []

    def length(node):
        kind, s, _ = node
        return (times.forward_s if kind == "F" else times.backward_s)[s]

    def transfer(s, kind):
        """Seconds of the transfer into stage s."""
        if kind == "F":
            return times.send_forward_s[s - 1] if s > 0 else 0.0
        return times.send_backward_s[s] if s < stages - 1 else 0.0

    def sent(node):
        """Seconds of the transfer that follows a node."""
        kind, s, _ = node
        if kind == "F":
            return times.send_forward_s[s] if s < stages - 1 else 0.0
        return times.send_backward_s[s - 1] if s > 0 else 0.0

    for s in range(stages):
        most = times.most_in_flight[s] if times.most_in_flight else stages - s
        warmup = min(most - 1, microbatches)
        forwards = [("F", s, m) for m in range(microbatches)]
        backwards = [("B", s, m) for m in range(microbatches)]
        order = forwards[:warmup]
        for f, b in zip(forwards[warmup:], backwards, strict=False):
            order += [f, b]
        order += backwards[microbatches - warmup :]
        for node in order:
            graph.add_node(node)
        for before, after in pairwise(order):
            wait = sent(before) if occupied_sender else 0.0
            graph.add_edge(
                before, after, w=wait + (transfer(s, after[0]) if occupied_receiver else 0.0)
            )
        for m in range(microbatches):
            if s > 0:
                _edge(graph, ("F", s - 1, m), ("F", s, m), transfer(s, "F"))
            _edge(
                graph,
                ("F", s, m),
                ("B", s, m),
                transfer(s, "B") if occupied_receiver and s < stages - 1 else 0.0,
            )
            if s < stages - 1:
                _edge(graph, ("B", s + 1, m), ("B", s, m), transfer(s, "B"))
        orders.append(order)
    if times.transfers == "none":
        for order in orders:
            _one_after_the_other(graph, [node for node in order if sent(node)], sent)
    ends = {}
    for node in networkx.topological_sort(graph):
        starts = [ends[u] + d["w"] for u, _, d in graph.in_edges(node, data=True)]
        ends[node] = max(starts, default=0.0) + length(node)
    return ends


def _one_after_the_other(graph, senders, sent):
    """What a stage sends leaves in the order of its work: a message of its own waits for all those
    before it that are still under way.
    """
    for i, node in enumerate(senders):
        waited = 0.0
        for before in reversed(senders[:i]):
            waited += sent(before)
            for after in [v for v in graph.successors(node) if v[1] != node[1]]:
                _edge(graph, before, after, waited + sent(node))


def _edge(graph, u, v, w):
    if graph.has_edge(u, v):
        w = max(w, graph.edges[u, v]["w"])
    graph.add_edge(u, v, w=w)


@settings(max_examples=60)
@given(pipelines())
def test_the_simulation_is_the_longest_path_of_the_dependencies(case):
    times, microbatches = case
    timeline, expected = simulate_pipeline(times, microbatches), longest_paths(times, microbatches)
    for (kind, s, m), end in expected.items():
        table = timeline.forward_end_s if kind == "F" else timeline.backward_end_s
        assert table[s, m] == pytest.approx(end, rel=1e-9)
    assert list(ends_of_stages(times, microbatches)) == timeline.backward_end_s.max(axis=1).tolist()


@settings(max_examples=60)
@given(pipelines())
def test_the_bound_is_a_bound(case):
    times, microbatches = case
    assert pipeline_bound_s(times, microbatches) <= simulate_pipeline(
        times, microbatches
    ).total_s * (1 + 1e-9)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 5), (2, 1), (4, 8), (8, 3)])
def test_equal_stages_without_transfers_take_the_textbook_time(stages, microbatches):
    times = PipelineTimes(
        (1.0,) * stages, (2.0,) * stages, (0.0,) * (stages - 1), (0.0,) * (stages - 1)
    )
    expected = (microbatches + stages - 1) * 3.0
    assert simulate_pipeline(times, microbatches).total_s == pytest.approx(expected)
    assert pipeline_bound_s(times, microbatches) == pytest.approx(expected)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_no_more_microbatches_in_flight_than_the_depth_left(stage):
    timeline = simulate_pipeline(
        PipelineTimes((1.0,) * 4, (2.0,) * 4, (0.1,) * 3, (0.2,) * 3, "both"), 9
    )
    forwards = [(start, 1) for start in timeline.forward_start_s[stage]]
    backwards = [(end, -1) for end in timeline.backward_end_s[stage]]
    flying, most = 0, 0
    for _, change in sorted([*forwards, *backwards]):
        flying += change
        most = max(most, flying)
    assert most == 4 - stage
    assert flying == 0
