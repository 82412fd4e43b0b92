"""From a plan and what is known of the fleet to orders: who copies what, from where each shard
comes, what is avoided.
"""

from dataclasses import replace

import pytest

from autohet.control.planning.orders import OrderBuilder
from autohet.control.planning.proposals import PlanProposal
from autohet.control.values.observation import CheckpointState, NodeView, Notice, Observation
from autohet.runtime.facts.layout import layout_builder, layout_of_plan
from autohet.runtime.messages import (
    AgentEndpoint,
    InterruptedRestore,
    Phase,
    RestoreRecord,
    WorkerReport,
    split_orders,
)
from autohet.runtime.models.config import load_config
from planner.inputs.fleet import Node, NodeType
from planner.plans.plan import Pipeline, Plan, Stage
from recovery.errors import NotRestorable
from recovery.state.holdings import Holding, Source
from tests.harness.fake_job import fake_job

KIND = NodeType("small", "A10G", 1, 24 << 30, 32e9, 4e8)
A, B, C = "a/0", "b/0", "c/0"
STEP = 7


def make_book(**checkpoint):
    job = fake_job(checkpoint=checkpoint)
    return OrderBuilder(job, layout_builder(load_config(job.model, job.training)))


def plan_of(*pipelines):
    """Each pipeline as its stages' (layers, worker)."""
    made = []
    for stages in pipelines:
        first, cut = 0, []
        for count, worker in stages:
            cut.append(Stage(first, count, (worker,)))
            first += count
        made.append(Pipeline(tuple(cut), 8 // len(pipelines), 1))
    return PlanProposal(Plan("tiny", 8, 1, 16, tuple(made)), None, None)


ONE = plan_of([(2, A), (2, B)])
TWO = plan_of([(4, A)], [(4, B)])


def observe(*names, reports=(), notices=(), inventories=None, now=100.0, checkpoint=None):
    nodes = {
        name: NodeView(Node(name, KIND), 0.0, AgentEndpoint(name, name, 1, "token"))
        for name in names
    }
    return Observation(
        now,
        nodes,
        {n.node: n for n in notices},
        {r.worker: r for r in reports},
        {},
        inventories,
        checkpoint or CheckpointState(),
    )


def standing(worker, generation=1, step=STEP, **more):
    return WorkerReport(worker, 1, generation, Phase.HALTED, step, generation, **more)


def begin(book, proposal, *names, **seen):
    """Generation 1 of a plan, begun and confirmed."""
    orders = book.write(1, proposal, observe(*names, **seen), ()).orders
    book.confirm()
    return orders


def sources(book, worker):
    """Where a worker gets what it lacks: (kind, node, name) -> number of shards."""
    part = book.schedule.parts[worker]
    found = {}
    for fetch in (*part.fetches, *part.message_fallbacks):
        first = fetch.sources[0]
        key = (first.kind, first.node, first.name)
        found[key] = found.get(key, 0) + len(fetch.shards)
    return found


@pytest.mark.parametrize(
    ("zones", "wanted", "peers"),
    [
        (("x", "x", "y"), "any", {"b", "c"}),
        (("x", "x", "y"), "same", {"b"}),
        (("x", "x", "y"), "other", {"c"}),
        (("x", "y", "y"), "same", set()),
    ],
)
def test_copies_go_to_the_zone_that_the_job_wants(zones, wanted, peers):
    """Of node a, which alone holds the model; b and c take no part."""
    book = make_book(replicate_zone=wanted, replicate_usd_per_hour=1.0)
    names = [f"us-east-1{zone}" for zone in zones]
    seen = zoned(zip(("a", "b", "c"), names, strict=True))
    written = book.write(1, plan_of([(4, A)]), seen, ())
    found = written.orders[A].replication_targets
    assert {target.peers[0] for target in found} <= peers
    assert bool(found) == bool(peers) == written.orders[A].replicates
    if wanted == "any":
        assert {target.peers for target in found} == {("b",)}, "c would cost money"
    if not peers:
        (said,) = written.replication.sentences()
        assert "what a alone hold" in said
        assert "replicate_zone: same" in said


def test_copies_to_another_zone_cost_no_more_than_the_job_pays():
    """A round's price over the time between two rounds; without a price of the nodes and without
    the key none are made, and the run says so.
    """
    prices = {}
    for usd in (0.0001, 0.01, None):
        book = make_book(replicate_usd_per_hour=usd, replicate_zone="other")
        seen = zoned((("a", "us-east-1a"), ("b", "us-east-1b")))
        written = book.write(1, plan_of([(4, A)]), seen, ())
        traffic, spacing = written.replication.traffic, written.replication.spacing
        prices[usd] = spacing.every_steps
        if usd is None:
            assert not written.orders[A].replicates
            assert not written.orders[A].replication_targets
            assert "have no price" in spacing.why
            continue
        assert traffic.bytes_by_zones == {("us-east-1a", "us-east-1b"): traffic.num_bytes}
        assert written.orders[A].replicate_every_steps == spacing.every_steps
        paid = traffic.usd(book.zones) * 3600 / spacing.every_steps
        assert paid == pytest.approx(spacing.usd_per_hour)
        assert paid <= usd
        assert traffic.usd(book.zones) * 3600 / (spacing.every_steps - 1) > usd
    assert prices[0.0001] > prices[0.01] > 1


def zoned(zone_by_node):
    """An observation of nodes without prices in these zones."""
    nodes = {
        name: NodeView(
            Node(name, replace(KIND, zone=zone)), 0.0, AgentEndpoint(name, name, 1, "token")
        )
        for name, zone in zone_by_node
    }
    return Observation(100.0, nodes, {}, {}, {}, None, CheckpointState())


def test_what_one_node_alone_holds_is_copied_to_another_that_stays():
    orders = begin(make_book(), ONE, "a", "b", "c", notices=[Notice("c", "test", 0.0, 60.0)])
    layout = orders[A].layout
    shared = layout.shards_by_worker[A] & layout.shards_by_worker[B]
    assert not shared
    for worker, peer in ((A, "b"), (B, "a")):
        assert {target.peers for target in orders[worker].replication_targets} == {(peer, "c")}
        assert {
            s for target in orders[worker].replication_targets for s in target.shards
        } == layout.shards_by_worker[worker]
        assert orders[worker].replicates
        assert orders[worker].replicate_bytes_per_s == pytest.approx(1e8), (
            "a quarter of the node's network"
        )


def test_what_is_sent_once_and_each_worker_s_own_part_are_its_order():
    orders = begin(make_book(), ONE, "a", "b", "c", notices=[Notice("c", "test", 0.0, 60.0)])
    paced = {
        worker: replace(order, pace=worker, replicate_bytes_per_s=len(worker) + number)
        for number, (worker, order) in enumerate(orders.items())
    }
    common, own = split_orders(paced)
    assert {worker: replace(common, **each) for worker, each in own.items()} == paced


def test_nobody_copies_what_lies_on_two_nodes_or_where_the_job_does_not_want_it():
    assert not any(
        order.replication_targets or order.replicates
        for order in begin(make_book(), TWO, "a", "b").values()
    )
    off = begin(make_book(replicate_every_steps=0), ONE, "a", "b")
    assert not any(order.replication_targets or order.replicates for order in off.values())


def test_a_copy_that_proved_bad_is_not_asked_again_while_there_is_another():
    book = make_book()
    begin(book, TWO, "a", "b")
    layout = layout_of_plan(TWO.plan, load_config(book.job.model))
    held = {
        name: [Holding(Source("memory", name, "x/0", STEP, 1), layout.shards)]
        for name in ("a", "b")
    }
    new = plan_of([(4, C)])
    first = book.write(2, new, observe("a", "b", "c", inventories=held), ())
    assert {node for _, node, _ in sources(first, C)} == {"a", "b"}
    bad = tuple((held["b"][0].source, shard) for shard in layout.shards)
    failed = WorkerReport(
        C, 1, 2, Phase.FAILED, 0, None, broken=InterruptedRestore(STEP, 2, bad=bad)
    )
    again = book.write(3, new, observe("a", "b", "c", reports=[failed], inventories=held), (C,))
    assert {node for _, node, _ in sources(again, C)} == {"a"}
    later = book.write(4, new, observe("a", "b", "c", inventories=held), (C,))
    assert {node for _, node, _ in sources(later, C)} == {"a"}, (
        "remembered without being told again"
    )
    alone = book.write(5, new, observe("a", "b", "c", inventories={"b": held["b"]}), (C,))
    assert {node for _, node, _ in sources(alone, C)} == {"b"}, "better than nothing"


@pytest.mark.parametrize("ended", ["whole", "broken off"])
def test_a_node_that_was_overtaken_gives_hardly_anything_that_others_have(ended):
    """At a later step, too, and whoever asks: it is the node that is ill, not its copy.

    One that comes under its name is well.
    """

    def share_of_b(book):
        gives = {"a": 0, "b": 0}
        for fetch in book.schedule.parts[C].fetches:
            gives[fetch.sources[0].node] += sum(layout.shard_bytes(shard) for shard in fetch.shards)
        return gives["b"] / sum(gives.values())

    book = make_book()
    begin(book, TWO, "a", "b")
    layout = layout_of_plan(TWO.plan, load_config(book.job.model))
    if ended == "whole":
        record = RestoreRecord({}, 0.0, 1.0, slow={"b": 3e6})
        told = WorkerReport(C, 1, 2, Phase.TRAINING, STEP, 2, restore=record)
    else:
        told = WorkerReport(
            C, 1, 2, Phase.HALTED, 0, None, broken=InterruptedRestore(STEP, 2, slow={"b": 3e6})
        )
    held = {
        name: [Holding(Source("memory", name, "x/0", STEP + 9, 1), layout.shards)]
        for name in ("a", "b")
    }
    new = plan_of([(4, C)])
    first = book.write(2, new, observe("a", "b", "c", inventories=held), ())
    assert share_of_b(first) > 0.3
    after = book.write(3, new, observe("a", "b", "c", reports=[told], inventories=held), ())
    assert share_of_b(after) < 0.02
    alone = book.write(4, new, observe("a", "b", "c", inventories={"b": held["b"]}), ())
    assert share_of_b(alone) == 1.0
    seen = observe("a", "b", "c", reports=[told], inventories=held)
    another = replace(seen, nodes=seen.nodes | {"b": replace(seen.nodes["b"], joined_at=90.0)})
    assert share_of_b(book.write(5, new, another, ())) > 0.3


def test_a_bad_copy_of_the_newest_step_is_worse_than_a_good_one_of_the_step_before():
    book = make_book()
    begin(book, TWO, "a", "b")
    layout = layout_of_plan(TWO.plan, load_config(book.job.model))
    new, old = (
        Holding(Source("memory", "a", "x/0", step, 1), layout.shards) for step in (STEP, STEP - 1)
    )
    shard = min(layout.shards)
    failed = WorkerReport(
        C,
        1,
        1,
        Phase.FAILED,
        0,
        None,
        broken=InterruptedRestore(STEP, 1, bad=((new.source, shard),)),
    )
    seen = observe("a", "c", reports=[failed], inventories={"a": [new, old]})
    assert book.write(2, plan_of([(4, C)]), seen, (C,)).start_step == STEP - 1


@pytest.mark.parametrize("ended", ["whole", "broken off"])
def test_a_relay_whose_copy_proved_bad_is_known_by_what_it_holds_then(ended):
    """The schedule that names it as a source knows no generation yet: the state is of the one that
    is being restored.
    """
    book = make_book()
    begin(book, TWO, "a", "b")
    layout = layout_of_plan(TWO.plan, load_config(book.job.model))
    shard, relay = min(layout.shards), Source("worker", "b", B, STEP)
    held = {"a": [Holding(Source("memory", "a", "x/0", STEP, 1), layout.shards)]}
    whole = plan_of([(4, A)], [(4, B)], [(4, C)])
    book.write(2, whole, observe("a", "b", "c", inventories=held), ())
    relays = replace(standing(B, 2), live_generation=None)
    if ended == "whole":
        relays = standing(B, 2, restore=RestoreRecord({}, 0.0, 1.0))
    else:
        relays = replace(relays, step=0, broken=InterruptedRestore(STEP, 2, arrived=layout.shards))
    told = standing(C, 2, restore=RestoreRecord({}, 0.0, 1.0, bad=((relay, shard),)))
    seen = observe("a", "b", "c", reports=[relays, told], inventories=held)
    again = book.write(3, whole, seen, (B, C))
    kept = set(again.schedule.parts[B].keep)
    assert shard not in kept
    assert kept == layout.shards - {shard}


def test_what_a_broken_restore_had_brought_is_used_when_its_source_is_gone():
    """B left too early: it had sent all that it alone held to A, which was waiting for the
    others.
    """
    book = make_book(replicate_every_steps=0)
    orders = begin(book, ONE, "a", "b")
    layout = orders[A].layout
    leaving = observe(
        "a", "b", reports=[standing(A), standing(B)], notices=[Notice("b", "test", 99.0, 101.0)]
    )
    book.write(2, plan_of([(4, A)]), leaving, (A, B))
    broken = replace(
        standing(A),
        generation=2,
        broken=InterruptedRestore(STEP, 2, arrived=layout.shards_by_worker[B]),
    )
    gone = observe("a", reports=[broken])
    assert not book.needs_inventories(plan_of([(4, A)]).plan, gone, (A,))
    again = book.write(3, plan_of([(4, A)]), gone, (A,))
    assert again.start_step == STEP
    assert set(again.schedule.parts[A].keep) == layout.shards, "nothing moves again"
    half = replace(
        broken,
        broken=InterruptedRestore(
            STEP, 2, arrived=frozenset(sorted(layout.shards_by_worker[B])[1:])
        ),
    )
    with pytest.raises(NotRestorable):
        book.write(4, plan_of([(4, A)]), observe("a", reports=[half]), (A,))


def test_when_time_is_short_a_leaver_gives_only_what_nobody_else_has():
    book = make_book(replicate_every_steps=0)
    begin(book, TWO, "a", "b")
    layout = layout_of_plan(TWO.plan, load_config(book.job.model))
    reports, new = [standing(A), standing(B)], plan_of([(4, A)], [(4, C)])
    plenty = observe("a", "b", "c", reports=reports, notices=[Notice("b", "test", 99.0, 10_000.0)])
    shares = sources(book.write(2, new, plenty, (A, B)), C)
    assert set(shares) == {("worker", "a", A), ("worker", "b", B)}, "both links are used"
    short = observe("a", "b", "c", reports=reports, notices=[Notice("b", "test", 99.0, 100.0)])
    assert set(sources(book.write(3, new, short, (A, B)), C)) == {("worker", "a", A)}
    alone = book.write(4, plan_of([(4, C)]), replace(short, reports={B: standing(B)}), (B,))
    assert sources(alone, C) == {("worker", "b", B): len(layout.shards)}


def test_a_node_with_a_faster_card_gives_more():
    book = make_book()
    begin(book, TWO, "a", "b")
    layout = layout_of_plan(TWO.plan, load_config(book.job.model))
    held = {
        name: [Holding(Source("memory", name, "x/0", STEP, 1), layout.shards)]
        for name in ("a", "b")
    }
    seen = observe("a", "b", "c", inventories=held)
    fast = replace(
        seen.nodes["a"].node,
        node_type=replace(KIND, inter_node_bytes_per_s=10 * KIND.inter_node_bytes_per_s),
    )
    receiver = replace(
        seen.nodes["c"].node,
        node_type=replace(KIND, inter_node_bytes_per_s=100 * KIND.inter_node_bytes_per_s),
    )
    nodes = dict(seen.nodes) | {
        "a": replace(seen.nodes["a"], node=fast),
        "c": replace(seen.nodes["c"], node=receiver),
    }
    written = book.write(2, plan_of([(4, C)]), replace(seen, nodes=nodes), (C,))
    given = dict.fromkeys(("a", "b"), 0)
    for fetch in written.schedule.parts[C].fetches:
        given[fetch.sources[0].node] += sum(layout.shard_bytes(shard) for shard in fetch.shards)
    assert given["a"] > 5 * given["b"] > 0
