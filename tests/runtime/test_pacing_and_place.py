"""The emulated speed; what a worker exchanges with its neighbours, where stages differ in TP degree
and where they lie on other nodes.
"""

import itertools
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autohet.runtime.parallel.borders import Borders, HiddenStates
from autohet.runtime.parallel.executor import Executor
from autohet.runtime.parallel.message_sums import MODULUS, MessageSums
from autohet.runtime.parallel.place import Place, place_of, redeal
from autohet.runtime.step.pacing import Pace, Pacer
from planner.plans.plan import Pipeline, Plan, Stage


def test_an_action_lasts_as_long_as_its_pace() -> None:
    started = time.perf_counter()
    Pacer(Pace(0.05, 0.0), lambda: False).after_forward(started)
    assert time.perf_counter() - started >= 0.05


def test_an_interrupt_ends_the_sleep() -> None:
    checks = itertools.count()
    Pacer(Pace(3600.0, 0.0), lambda: next(checks) == 2).after_forward(time.perf_counter())
    assert next(checks) == 3


def test_a_slow_action_is_not_made_slower() -> None:
    Pacer(Pace(1.0, 1.0), lambda: pytest.fail("asked, so it was about to sleep")).after_backward(
        time.perf_counter() - 2.0
    )


def two_stages(before: int, after: int, nodes: str) -> dict[str, Place]:
    """Every worker's place in a pipeline of two stages with these TP degrees, each on the node of
    its letter.
    """
    names = (
        [f"{nodes[0]}/{i}" for i in range(before)],
        [f"{nodes[1]}/{before + i}" for i in range(after)],
    )
    stages = tuple(Stage(number, 1, tuple(workers)) for number, workers in enumerate(names))
    plan = Plan("m", 6, 3, 4, (Pipeline(stages, 2, 3),))
    assert place_of(plan, "stranger") is None
    return {name: place for name in plan.workers if (place := place_of(plan, name)) is not None}


@pytest.mark.parametrize("nodes", ["aa", "ab"])
@pytest.mark.parametrize(("before", "after"), itertools.product((1, 2, 4), repeat=2))
def test_each_takes_what_is_sent_to_it(before: int, after: int, nodes: str) -> None:
    places = two_stages(before, after, nodes)
    first, second = list(places)[:before], list(places)[before:]
    forward = [transfer for place in places.values() for transfer in place.transfers_to(+1)]
    backward = [transfer for place in places.values() for transfer in place.transfers_to(-1)]
    assert set(forward) == {places[name].transfer_from(-1) for name in second}
    assert set(backward) == {places[name].transfer_from(+1) for name in first}
    assert [places[name].transfer_from(-1) for name in first] == [None] * before
    assert [places[name].transfer_from(+1) for name in second] == [None] * after
    for transfers, takers in ((forward, second), (backward, first)):
        assert len(transfers) == len(takers)
        for transfer in transfers:
            wanted = (
                (takers.index(transfer.target), len(takers))
                if nodes == "ab" and len(takers) > 1
                else (0, 1)
            )
            assert (transfer.index, transfer.slices) == wanted


class Wire:
    """A group that notes what is sent and received, and gathers `parts`."""

    def __init__(self, parts: list[Tensor] | None = None) -> None:
        self.sent: list[tuple[str, int, Tensor]] = []
        self.received: list[tuple[str, int, int]] = []
        self.parts = parts

    def send(self, tensor: Tensor, to: str, tag: int) -> None:
        self.sent.append((to, tag, tensor.clone()))

    def recv(self, tensor: Tensor, source: str, tag: int) -> None:
        tensor.fill_(7.0)
        self.received.append((source, tag, tensor.numel()))

    def wait_on_stream(self, work: None) -> None: ...

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        assert self.parts is not None, "nothing was to be gathered"
        assert part.tolist() == [7.0] * len(part)
        time.sleep(0.01)
        out.copy_(torch.cat(self.parts).view_as(out))


def first_stage_of(
    before: int, nodes: str, gathered: list[Tensor] | None
) -> tuple[Executor, torch.nn.Linear]:
    """Rank 0 of `before` ranks of a first stage; four ranks follow.

    Its hidden states, [3, 4, 8], are its one layer's values.
    """
    place = two_stages(before, 4, nodes)["a/0"]
    layer = torch.nn.Linear(5, 8)
    wires = [Wire()] * 2, [Wire()] * 2, Wire(gathered)
    borders = Borders(place, *wires, HiddenStates((3, 4, 8), torch.float32, torch.device("cpu")))  # type: ignore[arg-type]
    return Executor(borders, layer), layer


@pytest.mark.parametrize(("before", "nodes"), [(1, "aa"), (2, "aa"), (1, "ab"), (2, "ab")])
def test_between_nodes_slices_go_over_the_wire_and_elsewhere_the_whole(
    before: int, nodes: str
) -> None:
    apart = nodes == "ab"
    gathered = [torch.randn(48) for _ in range(2)] if apart and before == 2 else None
    executor, layer = first_stage_of(before, nodes, gathered)
    tokens = torch.randn(2, 3, 4, 5)
    started = time.perf_counter()
    executor.run(lambda m: (tokens[m], torch.zeros(3, 4, dtype=torch.int64)), lambda phase: None)
    took = time.perf_counter() - started
    forward, backward = executor.borders.forward[0], executor.borders.backward[0]
    served = range(4 // before)
    for number, (to, tag, sent) in enumerate(forward.sent):  # type: ignore[attr-defined]
        m, j = divmod(number, len(served))
        whole = layer(tokens[m]).detach().flatten()
        assert (to, tag) == (f"{nodes[1]}/{before + j}", 2 * m)
        assert torch.equal(sent.flatten(), whole[24 * j : 24 * (j + 1)] if apart else whole)
    assert len(forward.sent) == 2 * len(served)  # type: ignore[attr-defined]
    size = 48 if gathered else 96
    assert backward.received == [(f"{nodes[1]}/{before}", tag, size) for tag in (1, 3)]  # type: ignore[attr-defined]
    assert not gathered or took - executor.compute_s >= 0.02, (
        "two gathers of 10 ms were counted as computing"
    )
    gradient = (torch.cat(gathered) if gathered else torch.full((96,), 7.0)).view(12, 8)
    wanted = sum(gradient.T @ tokens[m].view(12, 5) for m in range(2))
    assert torch.allclose(layer.weight.grad, wanted, rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]


def test_what_was_sent_leaves_memory_before_its_gradient_comes() -> None:
    stages = Stage(0, 1, ("a/0",)), Stage(1, 1, ("b/0",))
    place = place_of(Plan("m", 6, 1, 4, (Pipeline(stages, 6, 1, most_in_flight=(4, 1)),)), "a/0")
    assert place is not None
    layer, made, alive = torch.nn.Linear(5, 8), list[StorageWeakRef](), list[int]()

    def stage(x: Tensor) -> Tensor:
        alive.append(sum(not output.expired() for output in made))
        out: Tensor = layer(x)
        made.append(StorageWeakRef(out.untyped_storage()))
        return out

    hidden = HiddenStates((1, 4, 8), torch.float32, torch.device("cpu"))
    executor = Executor(Borders(place, [Wire()] * 2, [Wire()] * 2, None, hidden), stage)  # type: ignore[arg-type, list-item]
    executor.run(
        lambda m: (torch.randn(1, 4, 5), torch.zeros(1, 4, dtype=torch.int64)), lambda phase: None
    )
    assert alive == [0, 1, 2, 2, 2, 2], "only those whose send may be under way"
    assert layer.weight.grad is not None


def test_pipelines_take_consecutive_parts_of_the_batch() -> None:
    pipelines = [
        {
            "num_microbatches": 2,
            "microbatch_sequences": 3,
            "stages": [{"first_layer": 0, "num_layers": 1, "workers": ["a"]}],
        },
        {"num_microbatches": 4, "stages": [{"first_layer": 0, "num_layers": 1, "workers": ["b"]}]},
    ]
    document = {
        "version": 1,
        "model": "m",
        "global_batch_sequences": 10,
        "microbatch_sequences": 1,
        "sequence_length": 4,
        "pipelines": pipelines,
    }
    plan = Plan.from_document(document)
    taken = [
        i
        for name, count in (("a", 2), ("b", 4))
        for m in range(count)
        for i in place_of(plan, name).sequences(m)
    ]  # type: ignore[union-attr]
    assert taken == list(range(10))


@given(
    rows=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=2, max_size=5),
    data=st.data(),
)
def test_what_lost_pipelines_leave_is_dealt_once(
    rows: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Each position is computed once: by its own pipeline, or by one that goes on."""
    pipelines = []
    for number, (count, size) in enumerate(rows):
        stages = (Stage(0, 1, (f"n/{number}",)),)
        last = data.draw(st.integers(0, size - 1))
        pipelines.append(Pipeline(stages, count, size, last_microbatch_sequences=last))
    batch = sum(pipeline.num_sequences for pipeline in pipelines)
    before = Plan("m", batch, 1, 4, tuple(pipelines))
    numbers = st.integers(0, len(pipelines) - 1)
    whole = data.draw(st.lists(numbers, unique=True, min_size=1, max_size=len(rows) - 1))
    shares = [1] * len(whole)
    for _ in range(batch - len(whole)):
        shares[data.draw(st.integers(0, len(whole) - 1))] += 1
    left = []
    for index, share in zip(sorted(whole), shares, strict=True):
        size = pipelines[index].microbatch_sequences
        shared = Pipeline(pipelines[index].stages, -(-share // size), size, (), share % size)
        left.append(shared)
    dealt = redeal(before, replace(before, pipelines=tuple(left)))
    done: list[int] = []
    for pipeline in left:
        place = place_of(before, pipeline.workers[0])
        assert place is not None
        own = place.deal.microbatches
        more = dealt[pipeline.stages].microbatches
        assert all(0 < len(each) <= pipeline.microbatch_sequences for each in more)
        done += [position for each in (*own, *more) for position in each]
    assert sorted(done) == list(range(batch))


@pytest.mark.parametrize("nbytes", [8, 64, 12, 7])
def test_any_flipped_bit_of_a_message_makes_the_borders_differ(nbytes: int) -> None:
    """Wrong: halves of the words are lost; sides, or what was sent and arrived, are mixed up."""
    message = torch.arange(nbytes + 1, dtype=torch.uint8)[1:] * 37
    within_a_word = torch.cat([message[:1], message])[1:]
    other = torch.zeros(16, dtype=torch.float32)
    for bit in range(8 * nbytes):
        ours, theirs = MessageSums(torch.device("cpu")), MessageSums(torch.device("cpu"))
        assert not ours
        changed = message.clone()
        changed[bit // 8] ^= 1 << bit % 8
        for sent, arrived in ((within_a_word, changed), (other, other)):
            ours.add_sent(1, sent)
            theirs.add_arrived(-1, arrived)
        kept = MessageSums(torch.device("cpu"))
        kept.add_all(theirs)
        before, after = kept.differences().tolist(), ours.differences().tolist()
        assert (before[0] + after[1]) % MODULUS
        assert (before[1], after[0]) == (0, 0)
        theirs.clear()
        for sent in (other, message):
            theirs.add_arrived(-1, sent)
        assert (theirs.differences() + ours.differences().flip(0)).tolist() in (
            [MODULUS, 0],
            [0, 0],
        )
