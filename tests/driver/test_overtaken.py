"""One reconfiguration overtakes another: what it cost is told of the one that trains, and nothing
is forgotten.
"""

from dataclasses import replace

from autohet.control.job_state import Building, Quiescing, Sourcing, Waiting
from autohet.runtime.messages import Phase
from planner.inputs.fleet import node_of
from tests.driver.test_controller import KIND, causes, make, run, trained
from tests.harness.faulty_workforce import FaultyWorkforce


def make_faulty(steps=60, nodes=4, **elastic):
    workforce = FaultyWorkforce(KIND)
    return make(steps, nodes=nodes, workforce=workforce, step_timeout_s=6, **elastic)


def quiescing(controller):
    return lambda: isinstance(controller.state, Quiescing)


def building(controller):
    return lambda: isinstance(controller.state, Building)


def test_a_death_while_a_notice_is_being_served_is_timed_from_the_death():
    controller, workforce = make_faulty()
    run(controller, trained(controller, 5))
    workforce.warn("small-3", 30)
    workforce.deafen("small-2/0")
    run(controller, quiescing(controller))
    run(controller, lambda: workforce.now > controller.state.change.detected_at + 1)
    workforce.kill("small-1")
    run(controller, lambda: bool(causes(controller)))
    (change,) = controller.summary()["reconfigurations"]
    assert change["cause"] == "death"
    assert change["seconds"]["detect"] >= 0
    assert change["seconds"]["total"] < 6, "not from the notice on, which cost nobody a step"


def test_orders_that_a_death_has_overtaken_while_their_generation_was_claimed_are_not_sent(
    monkeypatch,
):
    """The leaver is in no plan any more, and yet a newcomer was to get a part of its state from
    it.
    """
    controller, workforce = make(nodes=2)
    run(controller, trained(controller, 5))
    leaver = controller.memory.members[0].split("/")[0]
    claim = workforce.claim_generation
    monkeypatch.setattr(workforce, "claim_generation", lambda entry: None)
    workforce.warn(leaver, 60)
    workforce.join("small-9")
    run(
        controller,
        lambda: isinstance(controller.state, Sourcing) and controller.state.book is not None,
    )
    assert f"{leaver}/0" in controller.state.book.orders
    assert f"{leaver}/0" not in controller.state.proposal.plan.workers
    workforce.kill(leaver)
    monkeypatch.setattr(workforce, "claim_generation", claim)
    workforce.checkpoint = replace(workforce.checkpoint, claimed=controller.memory.generation)
    run(
        controller, lambda: controller.ended
    )  # who is not there cannot take orders: a KeyError of this workforce
    assert controller.ended.ok


def test_a_death_in_an_arrivals_build_counts_the_time_from_which_all_stood():
    controller, workforce = make_faulty(nodes=3)
    run(controller, trained(controller, 5))
    workforce.builds = 20
    workforce.join("small-9")
    run(controller, building(controller))
    run(controller, lambda: workforce.now > controller.state.change.begun_at + 1)
    workforce.kill("small-1")
    run(controller, lambda: bool(causes(controller)))
    (change,) = controller.summary()["reconfigurations"]
    assert (change["cause"], change["attempts"]) == ("death", 1)
    assert all(part >= 0 for part in change["seconds"].values())
    assert change["seconds"]["total"] > 3, "two builds of two seconds, and the wait between"


def test_steps_that_were_run_after_a_notice_are_lost_too_when_all_die():
    controller, workforce = make_faulty()
    run(controller, trained(controller, 15))
    workforce.warn("small-3", 30)
    run(controller, quiescing(controller))
    told = controller.memory.ledger.committed_steps
    run(controller, building(controller))
    done = controller.memory.ledger.committed_steps
    assert done > told
    for name in list(workforce.nodes):
        workforce.kill(name)
    for index in range(4, 8):
        workforce.join(f"small-{index}")
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    assert controller.summary()["steps_lost"] == done - 10


def test_steps_of_a_first_generation_whose_readiness_nobody_saw_are_kept():
    controller, workforce = make_faulty(nodes=2)
    workforce.speed, workforce.builds = 3, 1
    run(controller, building(controller))
    workforce.kill_agent("small-1")  # whose worker goes on
    controller.tick()
    done = controller.memory.ledger.committed_steps
    assert done > 0
    assert isinstance(controller.state, Quiescing)
    workforce.join("small-2")
    run(controller, building(controller))
    assert controller.state.change.restore_step == done


def test_steps_that_were_run_before_a_wait_are_lost_too_when_all_die_in_it():
    controller, workforce = make_faulty(nodes=2, min_workers=2)
    run(controller, trained(controller, 15))
    workforce.storage = "no upload"
    workforce.warn("small-1", None)
    run(controller, lambda: isinstance(controller.state, Waiting))
    done = controller.memory.ledger.committed_steps
    for name in ("small-0", "small-1"):
        workforce.kill(name)
    for name in ("small-2", "small-3"):
        workforce.join(name)
    run(controller, lambda: bool(causes(controller)))
    assert controller.summary()["steps_lost"] == done - 10


def test_survivors_of_a_death_prepare_the_plan_without_the_dead_while_one_still_stops():
    """Wrong: the groups are built once all stand, or a round after all are interrupted, or by
    another plan or number than begins.
    """
    controller, workforce = make_faulty()
    controller.memory.prepares = controller.memory.prepares_at_death = True
    run(controller, trained(controller, 5))
    prepared = []
    prepare = workforce.prepare
    workforce.prepare = lambda orders: (prepared.append(orders), prepare(orders))
    interrupted = []
    interrupt = workforce.interrupt
    workforce.interrupt = lambda workers, number, **how: (
        interrupted.append(workers),
        interrupt(workers, number, **how),
    )
    late, victim = controller.memory.members[0], node_of(controller.memory.members[-1])
    workforce.deafen(late)
    workforce.kill(victim)
    run(controller, lambda: bool(interrupted))
    assert prepared
    assert isinstance(controller.state, Quiescing)
    assert workforce.processes[late].report.phase is Phase.TRAINING
    workforce.thaw()
    run(controller, trained(controller, 8))
    (orders,) = prepared[:1]
    order = orders[late]
    assert victim not in {node_of(worker) for worker in order.plan.workers}
    assert controller.memory.plans[1][:2] == (order.generation, order.plan)
