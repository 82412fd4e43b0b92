"""One policy of one scenario: run by the worker processes, its results added up."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from transformers import PreTrainedConfig

from autohet.bench.recovery.cases import CHECKPOINT_STEP, STEP, Scenario, missing_shards, policy_schedule
from autohet.bench.recovery.workers import Result, Task, WorkerProcesses
from planner.cluster import node_of
from recovery.state.layout import ShardId
from recovery.transfer.links import Links

_NUMBERS = itertools.count()


class Trial:
    """Made, run, then read: `seconds`, `bytes_by_tier`, `steps_lost`, `verified`, and what the limit was."""

    def __init__(
        self, scenario: Scenario, policy: str, config: PreTrainedConfig, links: Links, storage: str, directory: str
    ) -> None:
        self.policy = policy
        self._links = links
        before, after, transfers = policy_schedule(policy, scenario, config, links)
        givers = scenario.givers
        participants = scenario.participants if policy == "local_first" else scenario.plan_after.workers
        self.task = Task(
            name=f"{scenario.name}-{policy}-{next(_NUMBERS)}",
            before=before,
            after=after,
            transfers=transfers,
            participants=participants,
            node_by_worker={worker: node_of(worker) for worker in (*before.workers, *after.workers)},
            live_step=STEP,
            givers=tuple(worker for worker in givers if worker in participants),
            disk_step=None if policy == "s3_only" or transfers.step == STEP else CHECKPOINT_STEP,
            directory=directory,
            storage=storage,
        )
        self.state_bytes = before.num_bytes
        self.limit_s = transfers.lower_bound_s
        self.missing = missing_shards(scenario, before)
        self.missing_bytes = sum(before.shard_bytes(shard) for shard in self.missing)
        self.seconds: dict[str, float | None] = {}
        self.bytes_by_tier: dict[str, int] = {}
        self.s3_shards: frozenset[ShardId] = frozenset()
        self.verified = False

    @property
    def steps_lost(self) -> int:
        return STEP - self.task.transfers.step

    def run(self, processes: WorkerProcesses, other_parts: dict[str, float | None]) -> Trial:
        """Blocks until every worker has reported; `other_parts` are the parts that this benchmark does not measure."""
        self._take(processes.run(self.task, self._links), processes.start_s, other_parts)
        return self

    def _take(self, results: list[Result], start_s: float, other_parts: dict[str, float | None]) -> None:
        restore_s = max(result.restore_s for result in results)
        group_s = max(result.group_s for result in results)
        kept = self.policy == "local_first" and bool(self.task.givers)
        rebuild_s = other_parts["rebuild"] if kept else start_s + group_s
        self.seconds = {
            "detect": other_parts["detect"],
            "replan": other_parts["replan"],
            "rebuild": rebuild_s,
            "restore": restore_s,
            "first_step": other_parts["first_step"],
        }
        self.seconds["total"] = sum(seconds for seconds in self.seconds.values() if seconds is not None)
        total: Counter[str] = Counter(memory=0, disk=0, peer=0, s3=0)
        for result in results:
            total.update(result.bytes_by_tier)
        self.bytes_by_tier = dict(total)
        self.s3_shards = frozenset().union(*(result.s3_shards for result in results))
        self.verified = all(result.verified for result in results)

    def document(self) -> dict[str, Any]:
        """R of the contract, and the limit."""
        return {
            "seconds": self.seconds,
            "bytes_by_tier": self.bytes_by_tier,
            "steps_lost": self.steps_lost,
            "verified": self.verified,
            "limit_s": self.limit_s,
            "restore_over_limit": self.seconds["restore"] / self.limit_s
            if self.limit_s and self.seconds["restore"]
            else None,
        }
