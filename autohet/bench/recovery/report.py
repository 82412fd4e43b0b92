"""`autohet bench recovery`: cost of a change of the fleet under three policies.

Real part: worker processes of this machine run the actual schedule and restore over gloo, node
agents, disk and an S3 server, at links throttled in software to a cloud node's ratios. Simulated
part: published scale.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from autohet.bench.recovery.options import Options, speeds_document
from planner.errors import ConfigError
from planner.inputs.documents import Document
from recovery.transfer.links import LinkRates

if TYPE_CHECKING:
    from autohet.bench.recovery.real import Trials

EMULATED_SCALE = 40.0
FLEET_S = 45.0
"""Seconds that a run on an emulated fleet may be expected to take."""

METHOD = {
    "restore": (
        "measured: real processes, the transfer schedule and restore of `recovery` over gloo,"
        " agents, disk and S3; from the common start until the last worker has its state"
    ),
    "links": (
        "scale 1: a network namespace a node, tc at the card's speed each way, S3 in a namespace of"
        " its own with tc at each node's share; disk and memory are this machine's, measured. Any"
        " other scale: SOFTWARE throttle: each transfer really happens here, then waits until a"
        " link of the stated speed would end it"
    ),
    "copy_s": (
        "scale 1: the same bytes between the same places at the same time, bare: sendfile from host"
        " memory, recv_into new memory, copies of what stays in another tensor, no frames, no"
        " checks; the mean of one run before and one after. `restore_over_bound` is over the slower"
        " of this and the links"
    ),
    "lost_work_s": "steps lost, at --step-s seconds each (stated, not measured)",
    "detect, replan, rebuild, first_step": (
        "measured in a run of autohet train on an EMULATED fleet on this machine (another model): "
        "a death, a notice and an arrival; null with --quick"
    ),
    "baselines": (
        "s3_only and restart_local: detect, replan and first_step as ours; rebuild = a worker"
        " process's start, measured alone, with all its imports and a client of the storage, and"
        " the building of its group; every worker reads its whole state by itself"
    ),
    "a new fleet": (
        "where no process stays (d), rebuild is that of the baselines for ours too: its processes"
        " have to start"
    ),
    "ray_train_elastic": (
        "Ray Train's TorchTrainer with elastic scaling on three real local Ray nodes, the same"
        " model, data parallel; the time without a step is measured, its parts are not; `_tuned`:"
        " elastic_resize_monitor_interval_s 0 and a start timeout of 10 s"
    ),
    "how": (
        "run: all of it was run; restore run: restore and rebuild were run, detect, replan and"
        " first_step are derived (as ours); derived: nothing was run"
    ),
    "steps_lost": (
        "the state stands at step 20, the newest checkpoint (in S3 and on its writers' disks) at"
        " step 16"
    ),
    "ratio_vs_limit": (
        "measured restore over the time that the bytes to move need at the links' speeds (lower"
        " bound over all schedules)"
    ),
    "total": "sum of the measured parts",
}


@dataclass
class Found:
    """What was measured so far."""

    trials: list[tuple[str, Trials]] = field(default_factory=list)
    scenarios: list[Document] = field(default_factory=list)
    """Entries of whole runs and of the simulation."""
    changes: dict[str, Document] = field(default_factory=dict)
    """Changes of the run on an emulated fleet, by cause."""
    facts: Document = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """What was not measured, with the reason."""


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; return exit code 1 if a restore failed or its tensors were wrong.

    What is finished when it is stopped is shown and written all the same; the exit code is 130.
    """
    from autohet.bench.recovery.display import draw, show
    from autohet.driver.loop.stop_signals import unwind_on_sigterm

    options = _options(args)
    found = Found()
    is_stopped = False
    with unwind_on_sigterm():
        try:
            document = benchmark(options, found)
        except KeyboardInterrupt:
            is_stopped = True
            found.left_out.append("the rest: stopped")
            document = _document(options, found)
    if args.out:
        Path(args.out).write_text(json.dumps(document, indent=1) + "\n")
    if args.picture and found.trials:
        draw(document, args.picture)
    if args.json:
        print(json.dumps(document))
    else:
        show(document)
    if is_stopped:
        return 130
    results = [
        r for s in document["scenarios"] if not s["simulated"] for r in s["policies"].values()
    ]
    return int(any(result["verified"] is False for result in results))


def _options(args: argparse.Namespace) -> Options:
    from autohet.bench.recovery.cases import SCENARIOS
    from autohet.emulate.namespaces import why_no_namespaces

    chosen = tuple(args.scenarios.split(",")) if args.scenarios else tuple(SCENARIOS)
    unknown = [name for name in chosen if name not in SCENARIOS]
    if unknown:
        raise ConfigError(f"Unknown scenario '{unknown[0]}'; choose from {', '.join(SCENARIOS)}.")
    for name in ("state_mb", "scale", "network_gbps", "s3_gbytes_per_s", "step_s", "minutes"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be above 0"
            )
    cloud = LinkRates(
        network_bytes_per_s=args.network_gbps * 1e9 / 8, s3_bytes_per_s=args.s3_gbytes_per_s * 1e9
    )
    # By default the links of this machine, if nodes can have networks of their own.
    why = why_no_namespaces() if args.scale in (None, 1.0) else None
    if args.scale is not None and why is not None:
        raise ConfigError(
            f"--scale 1 needs network namespaces for its nodes: {why}; a larger --scale emulates"
            " links in software"
        )
    if why is not None:
        _say(f"links are EMULATED, a cloud node's divided by {EMULATED_SCALE:g}: {why}")
    scale = args.scale or (1.0 if why is None else EMULATED_SCALE)
    return Options(
        args.state_mb * 1e6,
        cloud,
        scale,
        args.step_s,
        chosen,
        args.quick,
        not args.no_simulation,
        args.minutes,
    )


def benchmark(options: Options, found: Found) -> Document:
    """Run the benchmark, restores first; return the whole document.

    The module and METHOD say what is measured where. found: gets each result when it is there.
    """
    from autohet.bench.recovery.real import measure_scenarios

    ends_at = time.monotonic() + 60 * options.minutes
    found.facts["load_before"] = os.getloadavg()[0]

    def is_time(what: str, expected_s: float = 0.0) -> bool:
        if time.monotonic() + expected_s < ends_at:
            return True
        found.left_out.append(f"{what}: no time left of --minutes {options.minutes:g}")
        return False

    for name, trials in measure_scenarios(options, found.facts, is_time):
        found.trials.append((name, trials))
        seconds = [f"{policy} {trial.restore_s:.2f}" for policy, trial in trials.items()]
        _say(f"scenario {name}, seconds of the restore: {', '.join(seconds)}")
    if not options.quick:
        _measure_fleets(found, is_time)
    if options.simulate:
        from autohet.bench.recovery.simulated import simulated_scenarios

        found.scenarios += simulated_scenarios()
    return _document(options, found)


def _document(options: Options, found: Found) -> Document:
    """Return the document of what was measured so far."""
    from autohet.bench.recovery.emulated_fleet import parts_of
    from autohet.bench.recovery.real import scenario_document

    facts = dict(found.facts)
    load_before = facts.pop("load_before", 0.0)
    parts = parts_of(found.changes)
    restores = [scenario_document(*each, options.step_s, parts) for each in found.trials]
    return {
        "scenarios": restores + found.scenarios,
        "method": METHOD,
        "links_bytes_per_s": speeds_document(options.links),
        "links_scale": _describe(options.cloud, options.scale),
        "scale": options.scale,
        "step_s": options.step_s,
        "measured_parts": parts,
        "left_out": found.left_out,
        **facts,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load_average_1min": {"before": load_before, "after": os.getloadavg()[0]},
    }


def _describe(links: LinkRates, scale: float) -> str:
    parts = {
        "NVMe": links.disk_bytes_per_s,
        "S3": links.s3_bytes_per_s,
        "memory": links.memory_bytes_per_s,
    }
    rates = ", ".join(f"{name} {rate / 1e9:g} GB/s" for name, rate in parts.items())
    if scale == 1.0:
        network = f"{links.network_bytes_per_s * 8 / 1e9:g} Gb/s"
        return (
            f"at their own speed between network namespaces (network {network}, S3"
            f" {links.s3_bytes_per_s / 1e9:g} GB/s a node)"
        )
    return (
        f"a cloud node's (network {links.network_bytes_per_s * 8 / 1e9:g} Gb/s, {rates}), EMULATED:"
        f" divided by {scale:g}"
    )


def _measure_fleets(found: Found, is_time: Callable[[str, float], bool]) -> None:
    """Measure whole recoveries: ours on an emulated fleet, and Ray Train's elastic trainer."""
    from autohet.bench.recovery.emulated_fleet import fleet_scenarios, measure_changes

    if not is_time("a run on an emulated fleet", FLEET_S):
        return
    try:
        _say("a run on an emulated fleet, with a notice, a death and an arrival")
        found.changes |= measure_changes()
        for scenario in fleet_scenarios(found.changes, is_time):
            found.scenarios.append(scenario)
            totals = [
                f"{policy} {result['seconds']['total']:.2f}"
                for policy, result in scenario["policies"].items()
            ]
            _say(f"{scenario['scenario']}, seconds without a step: {', '.join(totals)}")
    except (ConfigError, RuntimeError, OSError) as error:
        found.left_out.append(f"runs on whole fleets: {error}")
        _say(f"not measured: {error}")


def _say(what: str) -> None:
    print(f"bench recovery: {what}", file=sys.stderr, flush=True)
