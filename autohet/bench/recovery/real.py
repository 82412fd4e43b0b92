"""Measured part of the recovery benchmark: every scenario and policy.

Restores run over the links of this machine or over throttled ones.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autohet.bench.recovery.cases import (
    POLICIES,
    SCENARIOS,
    config_of_size,
)
from autohet.bench.recovery.native import native_network
from autohet.bench.recovery.options import Options, speeds_document
from autohet.bench.recovery.storage import commit_known_checkpoint, object_storage
from autohet.bench.recovery.trial import Trial
from autohet.bench.recovery.workers import WorkerProcesses

NUM_PROCESSES = 4
PROBE_BYTES = 256 << 20

Facts = dict[str, Any]
Trials = Mapping[str, Trial]
"""Trials of one scenario by policy."""


STORAGE = "an S3 protocol server of this benchmark on this machine (sendfile from host memory)"
NATIVE_STORAGE = f"{STORAGE}, in its own namespace, each node's share of it by tc (HTB)"


def measure_scenarios(
    options: Options, facts: Facts, is_time: Callable[[str], bool]
) -> Iterator[tuple[str, Trials]]:
    """Measure the scenarios between network namespaces (scale 1), or over throttled links.

    Yields each scenario's name and trials when they are done. facts: gets what is known of the
    run. is_time: tells whether the measurement of that name may begin.
    """
    config = config_of_size(options.state_bytes)
    links = options.links
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="autohet-bench-"))
        network = None
        host = "127.0.0.1"
        if options.scale == 1.0:
            disk, memory = local_speeds(Path(directory))
            links = replace(links, disk_bytes_per_s=disk, memory_bytes_per_s=memory)
            facts |= {"durable_storage": NATIVE_STORAGE, "links_used": speeds_document(links)}
            network, uri = stack.enter_context(native_network(NUM_PROCESSES, links))
            host = network.head
            durable = network.durable
        else:
            facts["durable_storage"] = STORAGE
            durable = f"{directory}/durable"
            os.mkdir(durable)
            uri = stack.enter_context(object_storage(durable))

        processes = stack.enter_context(closing(WorkerProcesses(NUM_PROCESSES, uri, host)))
        facts["process_start_s"] = processes.start_s
        commit_known_checkpoint(f"{durable}/job", config)
        for name in options.scenarios:
            if not is_time(f"scenario {name}"):
                continue
            scenario = SCENARIOS[name]
            trials = {}
            for policy in POLICIES:
                print(f"bench recovery: scenario {name}, {policy}", file=sys.stderr, flush=True)
                trial = Trial(scenario, policy, config, links, uri, f"{directory}/nodes")
                trials[policy] = trial.run(processes, network)
            yield name, trials


def local_speeds(directory: Path) -> tuple[float, float]:
    """Return the bytes per second of this machine's disk and memory.

    Each is copied into new memory by one thread. The disk is measured as a restore meets it:
    written shortly before, so from the page cache.
    """
    path, written = directory / "probe", torch.zeros(PROBE_BYTES, dtype=torch.uint8)
    path.write_bytes(written.numpy().data)

    def from_file() -> None:
        with path.open("rb", buffering=0) as file:
            memory = torch.empty(PROBE_BYTES, dtype=torch.uint8).numpy().data
            got = 0
            while got < PROBE_BYTES:
                got += file.readinto(memory[got:]) or PROBE_BYTES

    found = _speed(from_file), _speed(lambda: written.clone())
    path.unlink()
    return found


def _speed(action: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return PROBE_BYTES / min(seconds)


def scenario_document(
    name: str, trials: Trials, step_s: float, parts: Mapping[str, dict[str, float | None]]
) -> dict[str, Any]:
    """Return one entry of `scenarios`; ratios are relative to ours.

    Lost steps are charged at `step_s` seconds each. parts: seconds of the parts of a recovery that
    are not measured here, by cause.
    """
    scenario = SCENARIOS[name]
    for trial in trials.values():
        trial.add_parts(parts[scenario.cause])
    ours = trials["local_first"]
    s3 = trials["s3_only"]
    # Parts that were not measured are never free: then the restores alone are compared.
    counted = "restore" if None in ours.seconds.values() else "total"
    policies = {policy: trial.document() for policy, trial in trials.items()}
    for policy, trial in trials.items():
        policies[policy]["how"] = "run" if policy == "local_first" else "restore run"
        policies[policy]["lost_work_s"] = trial.steps_lost * step_s
        policies[policy]["total_with_lost_work_s"] = (
            trial.seconds["total"] or 0.0
        ) + trial.steps_lost * step_s
    charged = (
        policies["s3_only"]["total_with_lost_work_s"],
        policies["local_first"]["total_with_lost_work_s"],
    )
    return {
        "scenario": name,
        "what": scenario.what,
        "cause": scenario.cause,
        "state_bytes": ours.state_bytes,
        "simulated": False,
        "plan_before": scenario.plan_before.to_document(),
        "plan_after": scenario.plan_after.to_document(),
        "policies": policies,
        "ratio_vs_s3_only": quotient(s3.seconds[counted], ours.seconds[counted]),
        "ratio_counts": counted,
        "restore_ratio_vs_s3_only": quotient(s3.seconds["restore"], ours.seconds["restore"]),
        "ratio_with_lost_work_vs_s3_only": quotient(*charged) if counted == "total" else None,
        "ratio_vs_limit": quotient(ours.seconds["restore"], ours.limit_s),
        "ratio_vs_bound": policies["local_first"]["restore_over_bound"],
        "missing_bytes": ours.missing_bytes,
        "s3_shards_are_the_missing": ours.s3_shards == ours.missing,
    }


def quotient(numerator: float | None, denominator: float | None) -> float | None:
    """Return numerator / denominator; None if there is nothing to compare with."""
    return numerator / denominator if numerator is not None and denominator else None
