"""A job whose training state is lost before its first checkpoint, and an empty storage beside nodes
that hold steps of the job.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from autohet.control.job_state import Ended, Sourcing, Training
from autohet.control.values.observation import CheckpointState
from autohet.driver.checkpoints.cleaning import Retention
from autohet.driver.checkpoints.durable import Durable, RunFacts
from autohet.driver.checkpoints.fresh import begin_fresh_run
from autohet.driver.job import run as run_module
from autohet.driver.job.job_run import Outcome
from autohet.driver.loop.controller import Controller
from planner.errors import ConfigError
from recovery.checkpoint.journal import begin_fresh, entry_name, read_ancestry
from recovery.checkpoint.lease import DriverLease
from recovery.state.ancestry import Ancestry, Descent
from recovery.state.holdings import Holding, Source
from recovery.storage.open import open_storage
from tests.driver.test_controller import make, run, trained
from tests.driver.test_durable import ticks_until
from tests.harness.fake_job import fake_job
from tests.harness.memory_storage import MemoryStorage
from tests.harness.scripted_workforce import ScriptedWorkforce


@dataclass
class Keeping(ScriptedWorkforce):
    """Agents answer with what `kept` says; the storage may show another one at the next look."""

    kept: dict[str, list[Holding]] = field(default_factory=dict)
    found: CheckpointState | None = None
    looks: int = 0
    silent: bool = False

    def request_inventories(self) -> None:
        self.looks += 1
        self.inventories = None if self.silent else {n: self.kept.get(n, []) for n in self.nodes}
        if self.found is not None:
            self.checkpoint = self.found


def keeping(*steps: tuple[str, int, int], **elastic: Any) -> tuple[Controller, Keeping]:
    """A job on four nodes; `steps`: a node, the step that it keeps and its generation."""
    from planner.inputs.fleet import NodeType

    workforce = Keeping(NodeType("small", "A10G", 1, 24 << 30, 32e9, 3e9))
    controller, _ = make(workforce=workforce, **elastic)
    layout = controller.memory.orders._layout
    whole = layout(controller.memory.planning.ask(_fleet(workforce), None).proposal.plan)
    workforce.kept = {
        node: [Holding(Source("memory", node, f"{node}/0", step, generation), whole.shards)]
        for node, step, generation in steps
    }
    return controller, workforce


def _fleet(workforce: Keeping) -> Any:
    from planner.inputs.fleet import Fleet

    return Fleet(1, tuple(view.node for view in workforce.nodes.values()))


def sentences(controller: Controller, kind: str) -> list[str]:
    return [each["reason"] for each in controller.events.records if each["kind"] == kind]


def whole_fleet_dies(workforce: Any, again: bool = True) -> None:
    for name in list(workforce.nodes):
        workforce.kill(name)
    workforce.inventories = None
    if again:
        for index in range(4):
            workforce.join(f"new-{index}")


@pytest.mark.parametrize("allowed", [True, False])
def test_a_fleet_that_dies_before_the_first_checkpoint_trains_again_from_step_0(
    allowed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    controller, workforce = make(steps=12, restart_from_scratch=allowed)
    run(controller, trained(controller, 5))
    before = controller.memory.ledger.committed_steps
    with caplog.at_level(logging.WARNING, "autohet"):
        whole_fleet_dies(workforce)
        run(controller, lambda: controller.ended)
    if not allowed:
        assert not controller.ended.ok
        assert "elastic.restart_from_scratch" in controller.ended.reason
        return
    assert controller.ended.ok
    (event,) = (e for e in controller.events.records if e["kind"] == "from_scratch")
    assert event["steps_lost"] == before
    assert [r.levelname for r in caplog.records if r.getMessage() == event["reason"]] == ["WARNING"]
    assert controller.summary()["steps_lost"] == before
    assert set(controller.memory.ledger.records) == set(range(12))
    assert workforce.commits == [12]


def test_it_begins_again_as_often_as_that_happens_and_from_a_checkpoint_once_there_is_one() -> None:
    controller, workforce = make(steps=30)
    for _ in range(3):
        run(controller, trained(controller, 3))
        whole_fleet_dies(workforce)
        run(controller, lambda: isinstance(controller.state, Training))
    assert len(sentences(controller, "from_scratch")) == 3
    run(controller, lambda: controller.ended)
    assert controller.ended.ok


def test_a_checkpoint_whose_commit_is_tried_again_is_waited_for_before_anything_is_lost() -> None:
    """All its parts are stored, and the storage refuses the manifest for a while."""
    controller, workforce = make(steps=30)
    run(controller, trained(controller, 5))
    checkpoints = controller.memory.ledger.checkpoints
    checkpoints._complete = {(1, 4)}
    failing = {"error": "refused", "error_step": 4, "error_generation": 1, "is_retried": True}
    workforce.checkpoint = replace(workforce.checkpoint, **failing)
    whole_fleet_dies(workforce)
    run(controller, lambda: isinstance(controller.state, Sourcing) and controller.state.wait)
    for _ in range(200):
        controller.tick()
    assert isinstance(controller.state, Sourcing), "it gave the checkpoint up"
    assert controller.memory.generation == 1, "numbers are not used up while it waits"
    workforce.checkpoint = replace(workforce.checkpoint, is_retried=False)
    run(controller, lambda: isinstance(controller.state, Training))
    assert len(sentences(controller, "from_scratch")) == 1


def test_an_empty_storage_beside_nodes_with_steps_is_waited_for_by_name() -> None:
    controller, workforce = keeping(("small-1", 25, 3), ("small-2", 24, 3))
    run(controller, lambda: isinstance(controller.state, Sourcing) and controller.state.wait)
    for _ in range(300):
        controller.tick()
    assert isinstance(controller.state, Sourcing)
    (said,) = (s for s in sentences(controller, "decision") if "is empty" in s)
    for part in (controller.memory.job.checkpoint_storage, "small-1", "step 25", "--fresh"):
        assert part in said
    assert workforce.looks > 2

    journal = Ancestry().followed_by(Descent(generation=3, parent=None, first_step=0))
    workforce.found = CheckpointState(ancestry=journal)
    run(controller, lambda: controller.ended)
    assert controller.ended == Ended(
        False, controller.ended.reason, may_pass=True, storage_is_back=True
    )


def test_another_storage_at_the_place_of_the_empty_one_is_noticed() -> None:
    controller, workforce = keeping(("small-1", 25, 3))
    run(controller, lambda: isinstance(controller.state, Sourcing) and controller.state.wait)
    workforce.checkpoint = CheckpointState(is_misplaced=True)
    run(controller, lambda: controller.ended)
    assert controller.ended.storage_is_back


def test_the_wait_for_a_storage_ends_when_it_is_told_to_and_after_its_patience() -> None:
    controller, workforce = keeping(("small-1", 25, 3))
    run(controller, lambda: isinstance(controller.state, Sourcing) and controller.state.wait)
    workforce.stop_reason = "SIGTERM"
    run(controller, lambda: controller.ended)
    assert "SIGTERM" in controller.ended.reason

    controller, workforce = keeping(("small-1", 25, 3), wait_for_fleet_s=20)
    run(controller, lambda: controller.ended)
    assert "--fresh" in controller.ended.reason


def test_agents_that_do_not_answer_while_a_storage_is_waited_for_change_nothing() -> None:
    controller, workforce = keeping(("small-1", 25, 3))
    run(controller, lambda: isinstance(controller.state, Sourcing) and controller.state.wait)
    workforce.silent = True
    for _ in range(400):
        controller.tick()
    assert isinstance(controller.state, Sourcing)


def test_steps_of_a_run_that_the_journal_knows_are_gone_on_from_without_a_word() -> None:
    controller, workforce = keeping(("small-1", 25, 3))
    journal = Ancestry().followed_by(Descent(generation=3, parent=None, first_step=0))
    workforce.checkpoint = CheckpointState(ancestry=journal)
    run(controller, trained(controller, 26))
    assert controller.memory.ledger.records.keys() >= {25}
    assert 24 not in controller.memory.ledger.records


def test_a_fresh_run_uses_nothing_that_nodes_hold() -> None:
    storage = MemoryStorage()
    DriverLease(storage).take()
    assert begin_fresh(storage) == 1
    assert begin_fresh(storage) == 2
    assert storage.size(entry_name(1)) is None
    controller, workforce = keeping(("small-1", 25, 1))
    workforce.checkpoint = CheckpointState(ancestry=read_ancestry(storage))
    run(controller, trained(controller, 2))
    assert controller.memory.ledger.records.keys() >= {0, 1}
    assert not sentences(controller, "from_scratch")


def durable_at(root: Path) -> Durable:
    return Durable(open_storage(str(root)), RunFacts("job", {}, {}), Retention(2), lease_s=1.0)


def test_a_file_system_that_is_mounted_again_is_known_to_be_another_storage(
    tmp_path: Path,
) -> None:
    root, away = tmp_path / "storage", tmp_path / "away"
    first = durable_at(root)
    first.take_lease()
    entry = Descent(generation=1, parent=None, first_step=0, driver=first.lease.driver)
    first.claim(entry)
    first.claim_pool.submit(int).result(20)
    first.close()
    root.rename(away)
    root.mkdir()

    second = durable_at(root)
    second.take_lease()
    found = second.load_newest()
    assert not found.ancestry.entries
    # As a mount does it: what the second driver is writing meanwhile goes elsewhere.
    root.rename(tmp_path / "hidden")
    away.rename(root)
    second.refresh()
    ticks_until(second, lambda: second.state().is_misplaced)
    second.close(at_once=True)

    third = durable_at(root)
    third.take_lease()
    assert third.load_newest().ancestry.entries.keys() == {1}
    third.close()


def test_a_run_whose_storage_is_back_takes_it_over_and_starts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcomes = [
        Outcome(False, "empty", {}, may_pass=True, storage_is_back=True),
        Outcome(True, "done", {}),
    ]
    owned = []

    def once(job: Any, machines: Any, files: Any, show: Any, durable: Any) -> Outcome:
        owned.append(durable)
        return outcomes.pop(0)

    @contextmanager
    def take_over(job: Any) -> Iterator[str]:
        yield "taken over"

    monkeypatch.setattr(run_module, "_train_once", once)
    monkeypatch.setattr(run_module, "_take_over", take_over)
    monkeypatch.setattr(run_module, "check_storage", lambda *_: None)
    files: Any = None
    machines: Any = None
    outcome = run_module.train_with(fake_job(), machines, files, lambda *_: None)
    assert outcome.reason == "done"
    assert owned == [None, "taken over"]


@pytest.mark.parametrize("there", ["checkpoint", "driver", "journal"])
def test_fresh_is_refused_where_something_would_be_lost(there: str, tmp_path: Path) -> None:
    root = tmp_path / "storage"
    job = fake_job(checkpoint={"storage": str(root)})
    durable = durable_at(root)
    durable.take_lease()
    storage = durable.storage
    durable.claim(Descent(generation=4, parent=None, first_step=0, driver=durable.lease.driver))
    durable.claim_pool.submit(int).result(20)
    if there == "checkpoint":
        storage.put("step-00000008/manifest.json", b"{}")
    if there != "driver":
        durable.close()
    if there == "journal":
        begin_fresh_run(job)
        assert read_ancestry(storage).entries.keys() == {5}
        return
    with pytest.raises(
        ConfigError, match=f"--fresh: .*{'step 8' if there == 'checkpoint' else there}"
    ):
        begin_fresh_run(job)
    assert read_ancestry(storage).entries.keys() == {4}
    durable.close()
