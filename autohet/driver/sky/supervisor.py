"""Supervisor of one job under SkyPilot: one region trains, and another one if it starves.

Its state is in the storages and in SkyPilot: which clusters exist, where the newest checkpoint is,
and one small record in the first region's storage. So it may be killed and started again. At most
one region has a cluster: before a launch all others are terminated, and a lease in the first
region's storage keeps a second supervisor away.
"""

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeGuard

import msgspec

from autohet.driver.sky.command import SkyCluster, SkyCommand, SkyFailed, SkyJob
from autohet.driver.sky.task_file import Region
from autohet.runtime.state.model_files import prefixes_beside
from planner.inputs.zones import GB, ZoneTable
from recovery.checkpoint.commit import find_newest
from recovery.checkpoint.copy import copy_checkpoint
from recovery.checkpoint.lease import DriverLease, LeaseKeeper, has_living_driver
from recovery.checkpoint.manifest import Manifest
from recovery.documents import DocumentDamaged, decode_json
from recovery.errors import RecoveryError
from recovery.storage.errors import ObjectMissing
from recovery.storage.open import open_storage
from recovery.storage.protocol import Storage

logger = logging.getLogger("autohet")

RECORD = "sky/supervisor.json"
POLL_S = 30.0
LEAST_LAUNCH_S = 600.0
"""Least time that a launch gets, in seconds: a node boots and installs in minutes."""
MOST_ROUNDS = 10
"""Times that every region may starve, with no training between, before the supervisor gives up."""
_ALIVE = frozenset({"INIT", "PENDING", "SETTING_UP", "RUNNING"})
"""States of a job that has not ended."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the supervisor remembers between rounds; times are Unix seconds.

    starved_since_s: None while the region trains. starvations: in a row, without training between.
    failures: of the job in a row, without a newer checkpoint between; `failed_at`: submission of
    the newest of them. usd_of_copies: spent on copies between regions.
    """

    region: str
    starved_since_s: float | None = None
    starvations: int = 0
    failures: int = 0
    failed_at: float = 0.0
    step: int = -1
    usd_of_copies: float = 0.0


@dataclass(frozen=True)
class Limits:
    """Limits of the job: steps to train, patience with a region, failures in a row."""

    steps: int | None
    region_patience_s: float
    max_failures_in_a_row: int


@dataclass(frozen=True)
class Seen:
    """Observation of one round: the region's cluster, its newest job, the newest checkpoint.

    driver_lives: a driver renews its lease in the region's storage.
    """

    now_s: float
    cluster: SkyCluster | None
    job: SkyJob | None
    driver_lives: bool
    step: int


@dataclass(frozen=True)
class SkyDecision:
    """Action of one round, its reason, and the record after it."""

    action: Literal["wait", "launch", "move", "finish", "give_up"]
    reason: str
    record: Record


def decide_round(record: Record, seen: Seen, regions: Sequence[str], limits: Limits) -> SkyDecision:
    """Decide the action of one round: a pure function."""
    status = None if seen.job is None else seen.job.status
    if seen.step > record.step:
        # A newer checkpoint: whatever failed before, the job gets on.
        record = msgspec.structs.replace(record, step=seen.step, failures=0)
    if status == "CANCELLED":
        return SkyDecision("give_up", "the job was cancelled in SkyPilot", record)
    if seen.driver_lives or status in _ALIVE:
        trains = msgspec.structs.replace(record, starved_since_s=None, starvations=0)
        return SkyDecision("wait", f"{record.region} trains", trains)

    is_trained = limits.steps is not None and seen.step >= limits.steps
    if status == "SUCCEEDED" or is_trained:
        return SkyDecision("finish", f"the job has ended with checkpoint {seen.step}", record)
    if _has_failed(seen.job) and seen.job.submitted_at != record.failed_at:
        # A failed job is seen in every round until the next one: count it once.
        record = msgspec.structs.replace(
            record, failed_at=seen.job.submitted_at, failures=record.failures + 1
        )
    if record.failures > limits.max_failures_in_a_row:
        reason = f"the job failed {record.failures} times without a new checkpoint ({status})"
        return SkyDecision("give_up", reason, record)
    return _starving(record, seen, regions, limits)


def _has_failed(job: SkyJob | None) -> TypeGuard[SkyJob]:
    return job is not None and job.status.startswith("FAILED")


def _starving(record: Record, seen: Seen, regions: Sequence[str], limits: Limits) -> SkyDecision:
    """Decide for a region in which nothing trains."""
    since = seen.now_s if record.starved_since_s is None else record.starved_since_s
    record = msgspec.structs.replace(record, starved_since_s=since)
    if seen.now_s - since >= limits.region_patience_s:
        # It has starved for too long: move to the next region, or give up.
        num_starved = record.starvations + 1
        if num_starved >= MOST_ROUNDS * len(regions):
            return SkyDecision("give_up", f"every region starved {MOST_ROUNDS} times", record)

        assert record.starved_since_s is not None
        starved_s = seen.now_s - record.starved_since_s
        following = regions[(regions.index(record.region) + 1) % len(regions)]
        moved = msgspec.structs.replace(
            record, region=following, starved_since_s=seen.now_s, starvations=num_starved
        )
        reason = (
            f"{record.region} has trained nothing for {starved_s:.0f} s"
            f" (elastic.region_patience_s is {limits.region_patience_s:.0f})"
        )
        return SkyDecision("move", reason, moved)

    cluster = seen.cluster
    if cluster is not None and cluster.is_launching:
        return SkyDecision("wait", f"a launch in {record.region} is in flight", record)
    if cluster is not None and cluster.status == "UP" and seen.job is None:
        return SkyDecision("wait", f"the cluster in {record.region} does not answer", record)
    return SkyDecision("launch", f"nothing trains in {record.region}", record)


@dataclass(frozen=True)
class LaunchableRegions:
    """Regions where a job may be launched, in order of preference.

    tasks: task file of each region. zones: links between zones, with their price.
    """

    regions: Sequence[Region]
    tasks: Mapping[str, Path]
    zones: ZoneTable


class Supervisor:
    """Owner of one job's clusters under SkyPilot, from start to end.

    `run` blocks until the job ends.
    """

    def __init__(
        self,
        job: str,
        launchable: LaunchableRegions,
        limits: Limits,
        *,
        sky: SkyCommand,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._job = job
        regions = launchable.regions
        self._regions = {region.name: region for region in regions}
        self._tasks = launchable.tasks
        self._zones = launchable.zones
        self._limits = limits
        self._sky = sky
        self._clock = clock
        self._storages = {region.name: open_storage(region.storage) for region in regions}
        self._first = regions[0].name

    def run(self) -> SkyDecision:
        """Supervise until the job ends or is given up; then no cluster is left.

        Raises:
            LeaseHeld: another supervisor of this job is alive.
        """
        with closing(open_storage(f"{self._regions[self._first].storage}/sky")) as storage:
            lease = DriverLease(storage)
            lease.take()
            keeper = LeaseKeeper(lease, lambda: None)
            try:
                return self._supervise()
            finally:
                keeper.close()
                lease.release()

    def close(self) -> None:
        for storage in self._storages.values():
            storage.close()

    def _supervise(self) -> SkyDecision:
        while True:
            try:
                ended = self.round()
            except (SkyFailed, RecoveryError) as error:
                logger.warning("This round fails and is repeated: %s", error)
                ended = None
            if ended is not None:
                return ended
            time.sleep(POLL_S)

    def round(self) -> SkyDecision | None:
        """Look once and act once; return the decision if it was the last one."""
        record = self._read_record()
        seen = self._look(record.region)
        decision = decide_round(record, seen, tuple(self._regions), self._limits)
        if decision.action in ("finish", "give_up"):
            self.end_clusters(but=None)
            self._write_record(decision.record)
            logger.info("Ending, since %s", decision.reason)
            return decision
        # First the record: a supervisor that dies in a launch goes on with the same region.
        self._write_record(decision.record)
        if decision.action in ("launch", "move"):
            logger.info("Going to %s, since %s", decision.record.region, decision.reason)
            self._launch(decision.record)
        return None

    def cluster_of(self, region: str) -> str:
        """Name of a region's cluster, as SkyPilot allows it."""
        return re.sub(r"[^a-zA-Z0-9-]+", "-", f"autohet-{self._job}-{region}").strip("-")

    def _look(self, region: str) -> Seen:
        name = self.cluster_of(region)
        cluster = self._sky.clusters().get(name)
        newest = self._newest()
        step = -1
        if newest is not None:
            _, manifest = newest
            step = manifest.step

        now_s = self._clock()
        if cluster is None:
            return Seen(now_s, None, None, False, step)
        job = self._sky.newest_job(name) if cluster.status == "UP" else None
        return Seen(now_s, cluster, job, has_living_driver(self._storages[region]), step)

    def _newest(self) -> tuple[str, Manifest] | None:
        """Return the region and manifest of the newest checkpoint of all storages.

        Generations rise from region to region, since each copy takes the journal along.
        """
        held = []
        for name, storage in self._storages.items():
            manifest = self._newest_in(storage)
            if manifest is not None:
                held.append((name, manifest))
        return max(held, key=lambda each: (each[1].generation, each[1].step), default=None)

    def _newest_in(self, storage: Storage) -> Manifest | None:
        newest = find_newest(storage, whole=True)
        if newest.manifest is None:
            # Checkpoints that cannot be read must not count as none: the job would start anew.
            newest.require_undamaged()
        return newest.manifest

    def _launch(self, record: Record) -> None:
        """Make `record.region` the only one that trains, from the newest checkpoint."""
        region = record.region
        self.end_clusters(but=region)
        self._bring_checkpoint(record)
        left_s = self._limits.region_patience_s
        if record.starved_since_s is not None:
            left_s -= self._clock() - record.starved_since_s
        timeout_s = max(LEAST_LAUNCH_S, left_s)
        try:
            self._sky.launch(self.cluster_of(region), self._tasks[region], timeout_s)
        except SkyFailed as error:
            # No capacity, for instance: the next round sees that nothing trains, and decides.
            logger.warning("Nothing is launched in %s: %s", region, error)

    def end_clusters(self, but: str | None) -> None:
        """Terminate this job's clusters in all other regions.

        Raises:
            SkyFailed: one of them is still there.
        """
        mine = {self.cluster_of(name) for name in self._regions if name != but}
        for name in sorted(mine & self._sky.clusters().keys()):
            logger.info("Terminating cluster %s", name)
            self._sky.down(name)
        left = sorted(mine & self._sky.clusters().keys())
        if left:
            raise SkyFailed(f"cluster {left[0]} is still there after sky down")

    def _bring_checkpoint(self, record: Record) -> None:
        """Copy the newest checkpoint to the region's storage if it is elsewhere; say its price."""
        newest = self._newest()
        if newest is None:
            return
        origin, manifest = newest
        source = self._regions[origin]
        target = self._regions[record.region]
        if source.storage.rstrip("/") == target.storage.rstrip("/"):
            return
        held = self._newest_in(self._storages[target.name])
        if held is not None and _place(held) == _place(manifest):
            return
        usd = self._zones.usd(manifest.num_bytes, source.name, target.name)
        logger.info(
            "Copying step %d from %s to %s: %.2f GB, %.2f $",
            manifest.step,
            source.name,
            target.name,
            manifest.num_bytes / GB,
            usd,
        )
        copy_checkpoint(
            self._storages[source.name],
            self._storages[target.name],
            manifest.step,
            beside=prefixes_beside,
        )
        paid = msgspec.structs.replace(record, usd_of_copies=record.usd_of_copies + usd)
        self._write_record(paid)

    def _read_record(self) -> Record:
        """Return the record; without one, that of the region whose checkpoint is newest."""
        try:
            record = decode_json(self._storages[self._first].get(RECORD), Record)
            if record.region in self._regions:
                return record
        except (ObjectMissing, DocumentDamaged):
            pass
        newest = self._newest()
        if newest is None:
            return Record(region=self._first)
        region, _ = newest
        return Record(region=region)

    def _write_record(self, record: Record) -> None:
        self._storages[self._first].put(RECORD, msgspec.json.encode(record))


def _place(manifest: Manifest) -> tuple[int, int]:
    return manifest.generation, manifest.step
