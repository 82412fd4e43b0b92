"""What a ledger keeps when one generation follows another."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autohet.control.ledger.ledger import Ledger
from autohet.control.ledger.run_summary import ledger_summary
from autohet.control.values.change import Change
from autohet.control.values.effects import Decision, Round
from autohet.control.values.observation import CheckpointState, Observation
from autohet.runtime.messages import Phase, StateTransfer, StepRecord, WorkerReport
from tests.driver.test_agent_gc import orders, reports
from tests.harness.fake_job import fake_job


def test_steps_that_come_with_the_news_of_readiness_are_kept() -> None:
    ledger = Ledger(fake_job())
    record = StepRecord(16, 1.0, 1.0, 64, 0.01, 2, 10.0)
    report = WorkerReport("a/0", 1, 2, Phase.TRAINING, 17, 2, steps=(record,))
    Round().collect(ledger.record(Observation(10.0, {}, reports={"a/0": report}), 2))
    change = Change("notice", ("b",), 9.0, 9.0, 16, None, restore_step=16)
    Round().collect(ledger.begin_generation(2, change))
    assert ledger.committed_steps == 17


def test_a_vote_that_came_before_the_news_of_readiness_can_roll_the_others_forward() -> None:
    ledger = Ledger(fake_job())
    older = WorkerReport("b/0", 1, 3, Phase.BUILDING, 18, 2, vote=(17, "of generation 2"))
    seer = WorkerReport("a/0", 1, 3, Phase.TRAINING, 17, 3, vote=(16, "of generation 3"))
    Round().collect(ledger.record(Observation(10.0, {}, reports={"a/0": seer, "b/0": older}), 3))
    assert ledger.newest_vote() == (3, (16, "of generation 3"))


def test_a_step_that_only_a_snapshot_proves_keeps_its_place_among_the_losses() -> None:
    ledger = Ledger(fake_job())
    steps = (StepRecord(0, 3.0, 1.0, 64, 0.01, 1, 10.0), StepRecord(1, 2.0, 1.0, 64, 0.01, 1, 10.0))
    report = WorkerReport("a/0", 1, 1, Phase.TRAINING, 2, 1, steps=steps)
    Round().collect(ledger.record(Observation(10.0, {}, reports={"a/0": report}), 1))
    Round().collect(
        ledger.begin_generation(2, Change("death", ("a",), 10.0, 10.0, 2, None, restore_step=3))
    )
    assert ledger.committed_steps == 3
    summary = ledger_summary(ledger, [], None)
    assert (summary["steps"], summary["losses"], summary["final_loss"]) == (
        3,
        [3.0, 2.0, None],
        2.0,
    )


def test_a_snapshot_is_told_once_every_worker_has_it_and_its_copies() -> None:
    decided = Round()
    ledger = Ledger(fake_job())
    ledger.orders = orders()
    for a, b in (
        ((12, None), (12, 11)),
        ((12, 11), (13, 12)),
        ((13, 11), (13, 12)),
        ((14, 13), (14, 13)),
    ):
        decided.collect(ledger.record(Observation(10.0, {}, reports=reports(a, b)), 2))
    ledger.orders = orders(3, start=12)  # gone back
    decided.collect(
        ledger.record(Observation(11.0, {}, reports=reports((12, 12), (12, 12), generation=3)), 3)
    )
    told = [each.document() for each in decided.events if isinstance(each, Decision)]
    assert [(e["generation"], e["step"]) for e in told if e["kind"] == "snapshot"] == [
        (2, 11),
        (2, 13),
        (3, 12),
    ]


def test_what_was_copied_is_told_once_with_the_next_snapshot_or_checkpoint_and_by_node() -> None:
    decided = Round()
    ledger = Ledger(fake_job())

    def told() -> list[list[dict[str, Any]]]:
        return [
            each.fields["transfers"]
            for each in decided.events
            if isinstance(each, Decision) and each.kind == "transfers"
        ]

    ledger.orders = orders()
    upload, spill = (
        StateTransfer("s3", "a/0", 2, 10, 700, 3.0, 0.5),
        StateTransfer("disk", "a/0", 2, 10, 50, 1.0),
    )
    copies = (
        StateTransfer("peer", "a/0", 2, 11, 300, 1.0, 1.5),
        StateTransfer("peer", "a/1", 2, 11, 200, 0.5, 0.25),
    )
    found = reports((12, 11), (12, None))
    decided.collect(
        ledger.record(Observation(10.0, {}, reports=with_transfers(found, upload, copies[0])), 2)
    )
    assert told() == [], "not every worker has the snapshot"
    decided.collect(
        ledger.record(
            Observation(
                11.0, {}, reports=with_transfers(reports((12, 11), (12, 11)), spill, copies[1])
            ),
            2,
        )
    )
    decided.collect(ledger.record(Observation(12.0, {}, reports=reports((13, 12), (13, 12))), 2))
    assert told() == [
        [
            {
                "tier": "s3",
                "source": "a/0",
                "step": 10,
                "bytes": 700,
                "seconds": 3.0,
                "ended_ago_s": 1.5,
            },
            {
                "tier": "peer",
                "source": "a",
                "step": 11,
                "bytes": 500,
                "seconds": 3.25,
                "ended_ago_s": 0.25,
            },
            {
                "tier": "disk",
                "source": "a/0",
                "step": 10,
                "bytes": 50,
                "seconds": 1.0,
                "ended_ago_s": 0.0,
            },
        ]
    ]
    handed_over = StateTransfer("peer", "b", 2, 12, 40, 2.0)
    decided.collect(ledger.record(Observation(13.0, {}, reports={}, transfers=(handed_over,)), 2))
    committed = CheckpointState(step=12, uri="there", committed=((12, "there"),))
    decided.collect(ledger.record(Observation(14.0, {}, reports={}, checkpoint=committed), 2))
    assert told()[1:] == [
        [
            {
                "tier": "peer",
                "source": "b",
                "step": 12,
                "bytes": 40,
                "seconds": 2.0,
                "ended_ago_s": 1.0,
            }
        ]
    ]
    decided.collect(ledger.record(Observation(15.0, {}, reports={}, transfers=(handed_over,)), 2))
    decided.collect(ledger.checkpoints.log_transfers(2))
    assert len(told()) == 3


def with_transfers(
    found: dict[str, WorkerReport], *transfers: StateTransfer
) -> dict[str, WorkerReport]:
    worker = min(found)
    return found | {worker: replace(found[worker], transfers=transfers)}


def test_the_longest_upload_counts_from_its_step_until_all_parts_are_written() -> None:
    ledger = Ledger(fake_job(checkpoint={"every_steps": 10}))
    ledger.orders = orders()

    def take(now: float, step: int, written: Mapping[str, int]) -> None:
        record = StepRecord(step - 1, 1.0, 1.0, 64, 0.01, 2, now)
        said = reports((step, None), (step, None))
        receipts = {worker: ((2, of, ("written",)),) for worker, of in written.items()}
        said = {
            w: replace(r, steps=(record,), receipts=receipts.get(w, ())) for w, r in said.items()
        }
        Round().collect(ledger.record(Observation(now, {}, reports=said), 2))

    writers = reports((1, None), (1, None))  # of a layout without workers one part is all
    take(50.0, 20, {})
    take(53.0, 21, {})
    assert ledger.checkpoints.upload_s is None
    take(54.0, 22, dict.fromkeys(writers, 20))
    assert ledger.checkpoints.upload_s == 4.0
    take(60.0, 30, {})
    take(62.0, 31, dict.fromkeys(writers, 30))
    assert ledger.checkpoints.upload_s == 4.0


def test_what_a_node_lacks_is_an_event_once_for_each_node() -> None:
    decided = Round()
    ledger = Ledger(fake_job())
    short = WorkerReport("a/0", 1, 1, Phase.TRAINING, 2, 1, memory_shortage="64 MB")
    enough = WorkerReport("b/0", 1, 1, Phase.TRAINING, 2, 1)
    for now in (10.0, 11.0):
        seen = Observation(now, {}, reports={"a/0": short, "b/0": enough})
        decided.collect(ledger.record(seen, 1))
    other = replace(short, memory_shortage="32 MB", compile_fallback="too many sizes")
    neighbour = replace(short, worker="a/1")
    for now in (12.0, 13.0):
        seen = Observation(now, {}, reports={"a/0": other, "a/1": neighbour})
        decided.collect(ledger.record(seen, 1))
    told = [each for each in decided.events if isinstance(each, Decision)]
    assert [(each.kind, each.sentence) for each in told] == [
        ("memory_shortage", "a: 64 MB"),
        ("memory_shortage", "a: 32 MB"),
        ("compile_fallback", "a: too many sizes"),
    ]
