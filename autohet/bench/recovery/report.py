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
from pathlib import Path
from typing import Any

from autohet.bench.recovery.options import Options, speeds_document
from planner.errors import ConfigError
from recovery.transfer.links import LinkRates

EMULATED_SCALE = 40.0

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


def run(args: argparse.Namespace) -> int:
    """Run the benchmark; return exit code 1 if a restore failed or its tensors were wrong."""
    from autohet.bench.recovery.display import draw, show
    from autohet.driver.loop.stop_signals import unwind_on_sigterm

    with unwind_on_sigterm():
        document = benchmark(_options(args))
    if args.out:
        Path(args.out).write_text(json.dumps(document, indent=1) + "\n")
    if args.picture:
        draw(document, args.picture)
    if args.json:
        print(json.dumps(document))
    else:
        show(document)
    results = [
        r for s in document["scenarios"] if not s["simulated"] for r in s["policies"].values()
    ]
    return int(any(result["verified"] is False for result in results))


def _options(args: argparse.Namespace) -> Options:
    from autohet.bench.recovery.cases import SCENARIOS

    chosen = tuple(args.scenarios.split(",")) if args.scenarios else tuple(SCENARIOS)
    unknown = [name for name in chosen if name not in SCENARIOS]
    if unknown:
        raise ConfigError(f"Unknown scenario '{unknown[0]}'; choose from {', '.join(SCENARIOS)}.")
    for name in ("state_mb", "scale", "network_gbps", "s3_gbytes_per_s", "step_s"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            raise ConfigError(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be above 0"
            )
    cloud = LinkRates(
        network_bytes_per_s=args.network_gbps * 1e9 / 8, s3_bytes_per_s=args.s3_gbytes_per_s * 1e9
    )
    scale = _scale(args.scale)
    return Options(
        args.state_mb * 1e6, cloud, scale, args.step_s, chosen, args.quick, not args.no_simulation
    )


def _scale(given: float | None) -> float:
    """Return the divisor of a cloud node's links: `given`, or a default.

    The default is 1, the links of this machine, if nodes can have networks of their own; else the
    emulation's, which is printed. Raises ConfigError if `given` is 1 and they cannot.
    """
    from autohet.emulate.namespaces import why_no_namespaces

    why = why_no_namespaces() if given in (None, 1.0) else None
    if given is not None and why is not None:
        raise ConfigError(
            f"--scale 1 needs network namespaces for its nodes: {why}; a larger --scale emulates"
            " links in software"
        )
    if why is not None:
        _say(f"links are EMULATED, a cloud node's divided by {EMULATED_SCALE:g}: {why}")
    return given or (1.0 if why is None else EMULATED_SCALE)


def benchmark(options: Options) -> dict[str, Any]:
    """Run the benchmark; return the whole document.

    The module and METHOD say what is measured where.
    """
    from autohet.bench.recovery.real import measure_scenarios

    load_before = os.getloadavg()[0]
    fleet, other_parts = _fleet(options)
    scenarios, facts = measure_scenarios(options, other_parts)
    scenarios += fleet
    if options.simulate:
        from autohet.bench.recovery.simulated import simulated_scenarios

        scenarios += simulated_scenarios()
    return {
        "scenarios": scenarios,
        "method": METHOD,
        "links_bytes_per_s": speeds_document(options.links),
        "links_scale": _describe(options.cloud, options.scale),
        "scale": options.scale,
        "step_s": options.step_s,
        "measured_parts": other_parts,
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


def _fleet(options: Options) -> tuple[list[dict[str, Any]], dict[str, dict[str, float | None]]]:
    """Return whole recoveries as scenarios, and the seconds of other parts by cause.

    The other parts are detect, replan, rebuild and first step.
    """
    from autohet.bench.recovery.emulated_fleet import fleet_scenarios, measure_changes, parts_of

    changes: dict[str, dict[str, Any]] = {}
    scenarios: list[dict[str, Any]] = []
    if not options.quick:
        try:
            _say("a run on an emulated fleet, with a notice, a death and an arrival")
            changes = measure_changes()
            _say("Ray Train's elastic trainer, the same model, a death and a notice")
            scenarios = fleet_scenarios(changes)
        except (ConfigError, RuntimeError, OSError) as error:
            _say(f"not measured: {error}")
    return scenarios, parts_of(changes)


def _say(what: str) -> None:
    print(f"bench recovery: {what}", file=sys.stderr, flush=True)
