"""What is done about nodes and their agents is decided from what was observed, and executed after
it.
"""

from dataclasses import replace

from autohet.control.planning.agent_gc import AgentGc
from autohet.control.values.actions import AskHoldings, HandOver
from autohet.control.values.observation import NodeView, Notice, Observation
from autohet.runtime.messages import AgentEndpoint
from planner.inputs.fleet import Node
from recovery.state.holdings import Source
from recovery.state.layout import Layout
from tests.driver.test_agent_gc import SPECS, B, W, kept, orders, reports
from tests.driver.test_controller import KIND, make, run, trained


def test_a_node_that_is_new_gets_its_agent_in_the_same_round() -> None:
    controller, workforce = make(nodes=1)
    started: list[tuple[str, ...]] = []
    workforce.start_agents = started.append
    workforce.nodes["new"] = NodeView(Node("new", KIND), workforce.now, agent_started=False)
    controller.tick()
    assert started == [("new",)]
    workforce.nodes["new"] = replace(workforce.nodes["new"], agent_started=True)
    controller.tick()
    assert started == [("new",)]


def test_a_node_that_leaves_is_drained_once_and_again_when_its_deadline_moves() -> None:
    controller, workforce = make()
    drained: list[tuple[str, str, float | None]] = []
    workforce.drain = lambda *said: drained.append(said)
    run(controller, trained(controller, 3))
    workforce.notices["small-3"] = Notice("small-3", "EC2", workforce.now, 500.0)
    controller.tick()
    controller.tick()
    assert drained == [("small-3", "EC2", 500.0)]
    workforce.notices["small-3"] = Notice("small-3", "Ray is draining it", workforce.now, 90.0)
    controller.tick()
    controller.tick()
    assert drained[1:] == [("small-3", "Ray is draining it", 90.0)]


def seen_of(now: float, **changes: object) -> Observation:
    nodes = {
        n: NodeView(Node(n, KIND), 0.0, AgentEndpoint(n, "here", 1, "token"))
        for n in ("a", "b", "c")
    }
    return replace(Observation(now, nodes, reports=reports((12, None), (12, None))), **changes)  # type: ignore[arg-type]


def told(agent_gc: AgentGc, seen: Observation) -> list[object]:
    return [
        action for action in agent_gc.decide(seen) if isinstance(action, AskHoldings | HandOver)
    ]


def test_what_a_node_at_risk_alone_keeps_is_handed_over_once_to_nodes_that_are_not() -> None:
    agent_gc = AgentGc()
    agent_gc.begin({w: replace(o, layout=Layout(SPECS, {})) for w, o in orders().items()})
    risk = {"risks": {"c": Notice("c", "rebalance", 1.0, risk=True)}}
    assert told(agent_gc, seen_of(0.0)) == []
    assert told(agent_gc, seen_of(1.0, **risk)) == [AskHoldings()]
    assert told(agent_gc, seen_of(2.0, **risk)) == [], "no agent has answered yet"
    holdings = {"a": [kept("a", "a/0", 11, W)], "c": [kept("c", "b/0", 11, B)]}
    (handed,) = told(agent_gc, seen_of(3.0, holdings=holdings, **risk))
    assert isinstance(handed, HandOver)
    assert dict(handed.parts) == {"c": ((Source("memory", "c", "b/0", 11, 2), (B,)),)}
    assert [endpoint.node for endpoint in handed.to] == ["a", "b"]
    assert told(agent_gc, seen_of(4.0, **risk)) == [], "the risk is not new any more"
    assert told(agent_gc, seen_of(5.0)) == []
    assert told(agent_gc, seen_of(6.0, **risk)) == [AskHoldings()], "it is new again"


def test_a_released_node_ends_once_its_agent_has_said_how_new_its_copies_are() -> None:
    controller, workforce = make()
    ended: list[str] = []
    workforce.end_agent = ended.append
    run(controller, trained(controller, 3))
    leaver = controller.memory.members[0].split("/")[0]
    workforce.warn(leaver, 60)
    run(controller, lambda: leaver in workforce.released)
    run(controller, trained(controller, controller.memory.ledger.committed_steps + 5))
    assert ended == [], "what it keeps is not known to be elsewhere"
    run(controller, lambda: ended == [leaver])
    assert workforce.now >= workforce.notices[leaver].deadline
