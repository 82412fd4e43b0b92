"""What agents may forget and when a leaving node may go: from orders and reports alone."""

from dataclasses import replace

from autohet.control.planning.agent_gc import AgentGc, DepartingNode, settled_age
from autohet.runtime.messages import GenerationOrder, Phase, WorkerReport
from planner.plans.plan import Pipeline, Plan, Stage
from recovery.state.ancestry import Ancestry, Descent
from recovery.state.holdings import Holding, Source
from recovery.state.layout import Layout, ShardId, TensorSpec

PLAN = Plan("tiny", 4, 1, 16, (Pipeline((Stage(0, 1, ("a/0",)), Stage(1, 1, ("b/0",))), 4, 1),))


def orders(generation=2, *, start=10, replicates=True):
    order = GenerationOrder(
        generation,
        PLAN,
        Layout({}, {}),
        start,
        40,
        "here",
        1,
        PLAN.workers,
        None,
        {},
        frozenset(),
        replicates=replicates,
        ancestry=Ancestry().followed_by(
            Descent(generation=1, parent=None, first_step=0),
            Descent(generation=2, parent=1, first_step=start),
        ),
    )
    return dict.fromkeys(PLAN.workers, order)


def reports(a, b, generation=2, **more):
    made = {}
    for worker, (snapshot, replicated) in (("a/0", a), ("b/0", b)):
        steps = {"snapshot_step": snapshot, "replicated_step": replicated}
        made[worker] = WorkerReport(
            worker, 1, generation, Phase.TRAINING, 12, generation, **steps, **more
        )
    return made


def test_a_generation_is_settled_once_every_worker_has_ended_a_round():
    assert settled_age({}, {}) is None
    assert settled_age(orders(), reports((12, None), (12, 11))) is None
    assert settled_age(orders(), reports((12, 11), (13, 12))) == (2, 11)
    assert settled_age(orders(), reports((12, 11), (13, 12), generation=1)) is None, "not begun yet"


def test_without_rounds_it_is_settled_by_snapshots():
    assert settled_age(orders(replicates=False), reports((12, None), (None, None))) is None
    assert settled_age(orders(replicates=False), reports((12, None), (11, None))) == (2, 11)


def test_agents_are_told_once_a_generation_and_once_a_durable_step():
    agent_gc = AgentGc()
    assert agent_gc.prune({}, (1, 5)) is None, "nobody works yet"
    agent_gc.begin(orders())
    assert agent_gc.prune(reports((12, None), (12, None)), None) is None
    told = agent_gc.prune(reports((12, 11), (12, 11)), (1, 5))
    assert told is not None
    assert (told.memory_before, told.disk_before, told.living) == (
        (2, 11),
        5,
        frozenset(PLAN.workers),
    )
    assert agent_gc.prune(reports((13, 12), (13, 12)), (1, 5)) is None
    later = agent_gc.prune(reports((13, 12), (13, 12)), (2, 20))
    assert later is not None
    assert (later.memory_before, later.disk_before) == ((2, 20), 20)
    agent_gc.begin(orders(3))
    unsettled = agent_gc.prune(reports((13, 12), (13, 12)), (2, 20))
    assert unsettled is not None
    assert unsettled.memory_before == (2, 20), "no restore goes back behind a durable step"
    assert agent_gc.prune(reports((13, 12), (13, 12)), (2, 20)) is None


def leaving(**departing):
    agent_gc = AgentGc()
    agent_gc.begin(orders())
    agent_gc.leaving["c"] = replace(DepartingNode(2, until=100.0, refuses_copies=True), **departing)
    return agent_gc


def test_a_leaving_node_stays_until_newer_copies_are_complete_elsewhere():
    agent_gc = leaving(newest_copy=(2, 12))
    assert agent_gc.find_unneeded(reports((13, 12), (13, 12)), None, 1.0) == [], (
        "the copies of 12 may be on it"
    )
    assert agent_gc.find_unneeded(reports((14, 13), (14, 13)), None, 1.0) == ["c"]


def test_a_leaving_node_goes_when_a_durable_step_covers_it_or_its_time_has_come():
    never = reports((None, None), (None, None))
    assert leaving().find_unneeded(never, (2, 9), 1.0) == []
    assert leaving().find_unneeded(never, (2, 10), 1.0) == ["c"]
    assert leaving(newest_copy=(2, 12)).find_unneeded(never, (2, 11), 1.0) == []
    assert leaving(newest_copy=(2, 12)).find_unneeded(never, (2, 12), 1.0) == ["c"]
    assert leaving().find_unneeded(never, None, 99.0) == []
    assert leaving().find_unneeded(never, None, 100.0) == ["c"]


def test_before_its_agent_has_answered_nothing_is_known_of_its_copies():
    assert (
        leaving(refuses_copies=False).find_unneeded(reports((13, 12), (13, 12)), (2, 50), 1.0) == []
    )


W, B = ShardId("param/w", 0), ShardId("param/b", 0)
SPECS = {shard.tensor: TensorSpec(shard.tensor, (4,), "float32") for shard in (W, B)}


def kept(node, name, step, *shards, generation=2, kind="memory"):
    return Holding(Source(kind, node, name, step, generation), frozenset(shards))


def test_state_is_stranded_when_a_member_has_lost_its_own_and_nobody_trains():
    agent_gc = AgentGc()
    agent_gc.begin(orders())
    halted = {w: replace(r, phase=Phase.HALTED) for w, r in reports((12, 11), (12, 11)).items()}
    assert not AgentGc().is_stranded({})
    assert not agent_gc.is_stranded(halted), "live state is everywhere: a restore brings it away"
    assert agent_gc.is_stranded({"a/0": halted["a/0"]})
    assert agent_gc.is_stranded(halted | {"b/0": WorkerReport("b/0", 2, 0, Phase.IDLE, 0, None)}), (
        "hired again, empty"
    )
    assert not agent_gc.is_stranded({"a/0": replace(halted["a/0"], phase=Phase.RESTORING)})


def test_what_only_leaving_nodes_keep_of_the_newest_whole_step_is_precious():
    agent_gc = AgentGc()
    changed = {w: replace(o, layout=Layout(SPECS, {})) for w, o in orders().items()}
    agent_gc.begin(changed)
    holdings = [
        kept("a", "a/0", 12, W),
        kept("a", "a/0", 11, W),
        kept("b", "a/0", 11, W),
        kept("c", "b/0", 11, B),
        kept("c", "b/0", 11, B, kind="disk"),
        kept("d", "x/0", 14, W, B, generation=1),
    ]
    assert agent_gc.only_copies(holdings, {"c"}) == {
        "c": ((Source("memory", "c", "b/0", 11, 2), (B,)),)
    }
    assert agent_gc.only_copies(holdings, {"a"}) == {}, "12 is not whole, and 11 is on b, too"
    assert set(agent_gc.only_copies(holdings, {"a", "b", "c"})) == {"a", "c"}, "each shard once"
    assert agent_gc.only_copies([], {"c"}) == {}
