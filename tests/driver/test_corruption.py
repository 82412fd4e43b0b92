"""What the controller does about workers whose arithmetic is wrong."""

from dataclasses import replace

import pytest

from autohet.driver.loop.value_codec import decode, encode
from autohet.driver.report.page import report_page
from autohet.runtime.messages import AuditCause, AuditMismatch, AuditRecord, Phase
from planner.inputs.fleet import node_of
from tests.driver.test_controller import KIND, causes, make, run, trained
from tests.harness.scripted_workforce import ScriptedWorkforce

EVERY = 5


class AuditedWorkforce(ScriptedWorkforce):
    """Every fifth step has an audit, in which the worker `wrong` differs from `step` 10 on."""

    def __init__(self, cause=AuditCause.ARITHMETIC, is_named=True):
        super().__init__(KIND)
        self.wrong, self.cause, self.is_named = None, cause, is_named

    def _step(self, process):
        report = super()._step(process)
        step = report.step - 1
        if step % EVERY:
            return report
        workers = tuple(sorted(self.processes))
        mismatches = ()
        if step >= 10 and self.wrong in workers:
            named = (self.wrong,) if self.is_named else ()
            mismatches = (AuditMismatch(step, 1, workers, named, self.cause),)
        audit = AuditRecord(workers, mismatches)
        return replace(report, steps=tuple(replace(each, audit=audit) for each in report.steps))


def make_audited(answer="drain", steps=60, **how):
    workforce = AuditedWorkforce(**how)
    controller, _ = make(steps=steps, workforce=workforce, on_corruption=answer)
    run(controller, trained(controller, 3))
    workforce.wrong = controller.memory.members[0]
    return controller, workforce


def events(controller, kind):
    return [event for event in controller.events.records if event["kind"] == kind]


def test_a_worker_that_two_audits_name_is_drained_and_nothing_is_lost():
    """Wrong: one audit is enough; its node is planned on again; the steps in doubt are not said."""
    controller, workforce = make_audited()
    run(controller, lambda: controller.memory.ledger.committed_steps > 11)
    assert events(controller, "notice") == [], "a bit may flip anywhere once"
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    node = node_of(workforce.wrong)
    first, second = events(controller, "audit")
    assert (first["step"], first["named"], first["agreed_step"]) == (
        10,
        (workforce.wrong,),
        {workforce.wrong: 5},
    )
    assert second["reason"].endswith(f"{workforce.wrong} agreed last 10 steps before")
    (notice,) = events(controller, "notice")
    assert (notice["node"], notice["source"], notice["deadline_s"]) == (node, "audit", None)
    assert causes(controller) == ["notice"]
    assert node in workforce.released
    assert node not in {node_of(worker) for worker in controller.memory.members}
    summary = controller.summary()
    assert (summary["steps"], summary["steps_lost"]) == (60, 0)
    said = [event["reason"] for event in events(controller, "decision")]
    assert any(each.startswith(f"Deciding to drain {node}") for each in said)
    log = [{"time": 0.0, **event} for event in controller.events.records]
    assert "in the audit of step 15" in report_page(log, "run")


def test_a_new_machine_of_the_name_is_used():
    controller, workforce = make_audited(steps=300)
    node = node_of(workforce.wrong)
    run(controller, lambda: node in workforce.released)
    del workforce.nodes[node]
    workforce.notices.pop(node, None)
    wrong, workforce.wrong = workforce.wrong, None
    run(controller, lambda: node not in controller.memory.nodes.notices)
    for worker in [each for each in workforce.processes if node_of(each) == node]:
        del workforce.processes[worker]
    workforce.join(node)
    run(controller, lambda: wrong in controller.memory.members)
    assert controller.memory.ledger.audits.wrong == {}
    # It is judged by itself, as the first one was.
    workforce.wrong = wrong
    run(controller, lambda: len(events(controller, "notice")) == 2)


def test_exact_products_are_proof():
    controller, _ = make_audited(cause=AuditCause.PRODUCTS)
    run(controller, lambda: bool(events(controller, "notice")))
    assert controller.memory.ledger.committed_steps <= 12


@pytest.mark.parametrize("cause", [AuditCause.ARITHMETIC, AuditCause.WEIGHTS])
def test_where_nobody_is_named_there_is_an_alarm_and_no_drain(cause):
    """Wrong: one of two that differ is drained; each audit of weeks writes a line."""
    controller, _ = make_audited(cause=cause, is_named=False)
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    assert [event["times"] for event in events(controller, "audit")] == [1, 2, 4, 8]
    assert events(controller, "notice") == []
    assert causes(controller) == []


def test_stop_ends_the_job_with_its_newest_step():
    controller, workforce = make_audited("stop")
    run(controller, lambda: controller.ended)
    assert not controller.ended.ok
    assert f"the arithmetic of {workforce.wrong} is wrong" in controller.ended.reason
    assert workforce.commits == [controller.memory.ledger.committed_steps]


def test_warn_says_so_once_and_goes_on():
    controller, _ = make_audited("warn")
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    said = [event["reason"] for event in events(controller, "decision")]
    assert len([each for each in said if each.startswith("Deciding to go on with")]) == 1
    assert events(controller, "notice") == []


def test_a_card_that_fails_as_its_worker_starts_is_not_planned_on():
    """Wrong: the job fails, as for a mistake of the user's; the node stays beside the others."""
    workforce = AuditedWorkforce()
    hire = workforce.hire

    def hire_one_bad(workers):
        hire(workers)
        process = workforce.processes.get("small-2/0")
        if process is not None:
            process.report = replace(
                process.report,
                phase=Phase.FAILED,
                unfit=True,
                error="its device (cuda:0) computes products of integers to wrong bits",
                has_faulty_device=True,
            )

    workforce.hire = hire_one_bad
    controller, _ = make(steps=30, workforce=workforce)
    run(controller, lambda: controller.ended)
    assert controller.ended.ok
    (notice,) = events(controller, "notice")
    assert (notice["node"], notice["source"]) == ("small-2", "audit")
    assert "small-2" in workforce.released


def test_audits_are_recorded_and_read_back():
    """Observations are recorded for `autohet replay`."""
    mismatch = AuditMismatch(3, 1, ("a", "b"), (), AuditCause.ARITHMETIC)
    record = AuditRecord(("a", "b"), (mismatch,))
    assert decode(encode(record)) == record
