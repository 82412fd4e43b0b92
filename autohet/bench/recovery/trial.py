"""Trial of one policy of one scenario: run by the worker processes, its results summed."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from autohet.bench.recovery.cases import (
    CHECKPOINT_STEP,
    STEP,
    RestoreScenario,
    missing_shards,
    policy_schedule,
)
from autohet.bench.recovery.native import NativeNetwork
from autohet.bench.recovery.surroundings import Task
from autohet.bench.recovery.workers import Result, WorkerProcesses
from planner.inputs.fleet import node_of
from recovery.state.layout import ShardId
from recovery.transfer.links import LinkRates
from recovery.transfer.schedule import TransferSchedule

_NUMBERS = itertools.count()


def requests_of(transfers: TransferSchedule) -> int:
    """Return the number of reads and messages of the busiest worker."""
    most = 0
    for part in transfers.parts.values():
        most = max(most, len(part.fetches) + len(part.messages))
    return most


class Trial:
    """Trial of one policy; make it, run it, then read its results.

    Results are `seconds`, `bytes_by_tier`, `steps_lost`, `verified`, and the limits.
    """

    def __init__(
        self,
        scenario: RestoreScenario,
        policy: str,
        config: PreTrainedConfig,
        links: LinkRates,
        storage: str,
        directory: str,
    ) -> None:
        self.policy = policy
        self._links = links
        before, after, transfers = policy_schedule(policy, scenario, config, links)
        # the other policies restart: nobody gives from memory
        participants = scenario.plan_after.workers
        if policy == "local_first":
            participants = scenario.participants
        reads_disk = policy != "s3_only" and transfers.step != STEP
        workers = (*before.workers, *after.workers)
        self.task = Task(
            name=f"{scenario.name}-{policy}-{next(_NUMBERS)}",
            before=before,
            after=after,
            transfers=transfers,
            participants=participants,
            node_by_worker={worker: node_of(worker) for worker in workers},
            live_step=STEP,
            givers=tuple(worker for worker in scenario.givers if worker in participants),
            disk_step=CHECKPOINT_STEP if reads_disk else None,
            directory=directory,
            storage=storage,
        )
        self.state_bytes = before.num_bytes
        self.limit_s = transfers.lower_bound_s
        self.missing = missing_shards(scenario, before)
        self.missing_bytes = sum(before.shard_bytes(shard) for shard in self.missing)
        self.seconds: dict[str, float | None] = {}
        self.restore_s = 0.0
        self._start_s = 0.0
        """Seconds until processes that start anew have a group."""
        self.bytes_by_tier: dict[str, int] = {}
        self.s3_shards: frozenset[ShardId] = frozenset()
        self.verified = False
        self.bare_s: tuple[float, ...] = ()
        self.cpu_s = 0.0

    @property
    def steps_lost(self) -> int:
        return STEP - self.task.transfers.step

    @property
    def copy_s(self) -> float | None:
        """Seconds that the same bytes took bare, at the same time and places; None: not measured.

        It is the mean of before and after.
        """
        if not any(self.bare_s):
            return None
        return sum(self.bare_s) / len(self.bare_s)

    def run(self, processes: WorkerProcesses, network: NativeNetwork | None = None) -> Trial:
        """Run the trial; block until every worker has reported."""
        if network is None:
            results = processes.run(self.task, self._links)
        else:
            with network.wire(self.task) as wiring:
                results = processes.run(replace(self.task, wiring=wiring), self._links)
        self._take(results, processes.start_s)
        return self

    def add_parts(self, other_parts: dict[str, float | None]) -> None:
        """Take the seconds of the parts of a recovery that this benchmark does not measure."""
        self.seconds = {
            "detect": other_parts["detect"],
            "replan": other_parts["replan"],
            "rebuild": other_parts["rebuild"] if self._keeps_processes else self._start_s,
            "restore": self.restore_s,
            "first_step": other_parts["first_step"],
        }
        measured = [seconds for seconds in self.seconds.values() if seconds is not None]
        self.seconds["total"] = sum(measured)

    @property
    def _keeps_processes(self) -> bool:
        """True if processes that give their state go on; else all start anew."""
        return self.policy == "local_first" and bool(self.task.givers)

    def _take(self, results: list[Result], start_s: float) -> None:
        self.restore_s = max(result.restore_s for result in results)
        self._start_s = start_s + max(result.group_s for result in results)
        total: Counter[str] = Counter(memory=0, disk=0, peer=0, s3=0)
        s3_shards = set[ShardId]()
        for result in results:
            total.update(result.bytes_by_tier)
            s3_shards |= result.s3_shards
        self.bytes_by_tier = dict(total)
        self.s3_shards = frozenset(s3_shards)
        self.verified = all(result.verified for result in results)
        self.cpu_s = sum(result.cpu_s for result in results)

        # one copy before and one after the restore; each is done when its last worker is
        copies = zip(*(result.bare_s for result in results), strict=True)
        self.bare_s = tuple(max(seconds) for seconds in copies)

    def document(self) -> dict[str, Any]:
        """Return the result document with its limits.

        These are the links' (`limit_s`), that of bare copies of the same bytes on this machine
        (`copy_s`), and the ratio to the slower of them.
        """
        bound_s = max(self.limit_s, self.copy_s or 0.0)
        return {
            "seconds": self.seconds,
            "bytes_by_tier": self.bytes_by_tier,
            "steps_lost": self.steps_lost,
            "verified": self.verified,
            "limit_s": self.limit_s,
            "makespan_s": self.task.transfers.makespan_s,
            "requests": requests_of(self.task.transfers),
            "restore_over_limit": self._restore_over(self.limit_s),
            "copy_s": self.copy_s,
            "bare_s": list(self.bare_s),
            "restore_over_bound": self._restore_over(bound_s),
            "workers_cpu_s": self.cpu_s,
        }

    def _restore_over(self, limit_s: float) -> float | None:
        restore_s = self.seconds["restore"]
        if not limit_s or not restore_s:
            return None
        return restore_s / limit_s
