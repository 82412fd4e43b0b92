"""The recovery benchmark for people: a table on the terminal, and bars of seconds by part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from autohet.runtime.process.terminal import PlainConsole
from planner.errors import ConfigError

PARTS = ("detect", "replan", "rebuild", "restore", "first_step")
WIDE = 110  # columns from which every part of a recovery has one of its own
COLOURS = ("#7f7f7f", "#9467bd", "#1f77b4", "#d62728", "#2ca02c")


def show(document: dict[str, Any]) -> None:
    """Print the tables of the real and of the simulated part."""
    console = PlainConsole()
    for simulated, title in (
        (False, f"Real processes, links {document['links_scale']}"),
        (
            True,
            "SIMULATED: restore schedules of published scale; the other parts by stated constants",
        ),
    ):
        found = [s for s in document["scenarios"] if s["simulated"] is simulated]
        if found:
            console.print(_table(title, found, console.width))
            for scenario in found:
                console.print(f"  {scenario['scenario']}: {scenario['what']}", highlight=False)
    console.print(_sweep(document["s3_sweep"]))
    console.print(
        f"S3: {document['durable_storage']}. Other parts:"
        f" {document['method']['detect, replan, rebuild, first_step']}"
    )


def _table(title: str, scenarios: list[dict[str, Any]], width: int) -> Table:
    """Return a table of seconds, and of the bytes moved from each tier.

    A part of a recovery that no policy measured has no column.
    """
    results = [result for each in scenarios for result in each["policies"].values()]
    measured = [p for p in PARTS if any(result["seconds"][p] is not None for result in results)]
    parts = (
        measured if width >= WIDE else [part for part in measured if part in ("rebuild", "restore")]
    )
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("policy", no_wrap=True)
    table.add_column("how")
    for part in (*parts, "total"):
        table.add_column(part.replace("_", "\n"), justify="right")
    table.add_column("MB\nmoved", no_wrap=True)
    for name in ("steps\nlost", "over\nlinks", "over\nbound", "vs\ns3"):
        table.add_column(name, justify="right", no_wrap=True)
    for scenario in scenarios:
        for policy, result in scenario["policies"].items():
            row = _row(scenario, policy, result, (*parts, "total"))
            table.add_row(*row, end_section=policy == list(scenario["policies"])[-1])
    return table


def _sweep(found: Sequence[dict[str, Any]]) -> Table:
    """Return a table of the bounds' ratios: a row for each speed of S3."""
    names = list(dict.fromkeys(entry["scenario"] for entry in found))
    table = Table(
        title="NOT measured: bound of s3_only over ours, by S3's speed a node",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    for heading in ("S3 GB/s", *names):
        table.add_column(heading, justify="right")
    for speed in dict.fromkeys(entry["s3_bytes_per_s"] for entry in found):
        ratios = [entry["bound_ratio"] for entry in found if entry["s3_bytes_per_s"] == speed]
        table.add_row(f"{speed / 1e9:g}", *(_number(value) for value in ratios))
    return table


def _row(
    scenario: dict[str, Any], policy: str, result: dict[str, Any], parts: Sequence[str]
) -> list[str]:
    first = policy == next(iter(scenario["policies"]))
    counts = result["bytes_by_tier"].items()
    moved = [f"{_megabytes(num_bytes)} {tier}" for tier, num_bytes in counts if num_bytes]
    uncounted = any(num_bytes is None for num_bytes in result["bytes_by_tier"].values())
    return [
        scenario["scenario"] if first else "",
        policy if result["verified"] is not False or scenario["simulated"] else f"{policy} WRONG",
        result["how"],
        *(_number(result["seconds"][part]) for part in parts),
        "not counted" if uncounted else "\n".join(moved) or "none",
        str(result["steps_lost"]),
        _number(result.get("restore_over_limit")),
        _number(result.get("restore_over_bound")),
        (
            f"{_number(scenario['ratio_vs_s3_only'])}x"
            if first and scenario["ratio_vs_s3_only"]
            else ""
        ),
    ]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    digits = 1 if value >= 10 else 2
    return f"{value:.{digits}f}"


def _megabytes(num_bytes: float) -> str:
    digits = 1 if num_bytes < 1e8 else 0
    return f"{num_bytes / 1e6:.{digits}f}"


def draw(document: dict[str, Any], path: str) -> None:
    """Draw seconds by part as bars, one a policy, scenarios side by side (real part).

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(
            "--picture needs matplotlib; install it, or leave --picture out"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    scenarios = [
        s for s in document["scenarios"] if not s["simulated"] and s["ratio_vs_limit"] is not None
    ]
    figure, axes = pyplot.subplots(
        1, len(scenarios), figsize=(2.4 * len(scenarios) + 1.5, 4.6), sharey=True, squeeze=False
    )
    for axis, scenario in zip(axes[0], scenarios, strict=True):
        _bars(axis, scenario)
    axes[0][0].set_ylabel("seconds")
    axes[0][0].set_ylim(top=1.1 * axes[0][0].get_ylim()[1])
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(PARTS), frameon=False)
    size = scenarios[0]["state_bytes"] / 1e6
    figure.suptitle(
        f"Recovery by part, {size:,.0f} MB of state, links {document['links_scale']}", fontsize=11
    )
    figure.tight_layout(rect=(0, 0.07, 1, 0.98))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bars(axis: Any, scenario: dict[str, Any]) -> None:
    policies = list(scenario["policies"])
    bottoms = [0.0] * len(policies)
    for part, colour in zip(PARTS, COLOURS, strict=True):
        heights = [scenario["policies"][policy]["seconds"][part] or 0.0 for policy in policies]
        axis.bar(policies, heights, bottom=bottoms, color=colour, label=part, width=0.65)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for index, total in enumerate(bottoms):
        axis.text(index, total, f"{total:.1f}", ha="center", va="bottom", fontsize=8)
    ratio = scenario["ratio_vs_s3_only"]
    axis.set_title(
        f"({scenario['scenario']})  {ratio:.1f}x" if ratio else f"({scenario['scenario']})",
        fontsize=10,
    )
    axis.set_xticks(
        range(len(policies)), [policy.replace("_", "\n") for policy in policies], fontsize=7
    )
    axis.spines[["top", "right"]].set_visible(False)
