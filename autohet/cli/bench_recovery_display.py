"""The recovery benchmark for people: a table on the terminal, and bars of seconds by part."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from planner.errors import ConfigError

PARTS = ("detect", "replan", "rebuild", "restore", "first_step")
COLOURS = ("#7f7f7f", "#9467bd", "#1f77b4", "#d62728", "#2ca02c")


def show(document: dict[str, Any]) -> None:
    """Print the tables of the real and of the simulated part."""
    console = Console()
    for simulated, title in (
        (False, f"Real processes, software-throttled links: {document['links_scale']}"),
        (True, "SIMULATED: restore schedules of published scale; the other parts by stated constants"),
    ):
        found = [s for s in document["scenarios"] if s["simulated"] is simulated]
        if found:
            console.print(_table(title, found))
            for scenario in found:
                console.print(f"  {scenario['scenario']}: {scenario['what']}", highlight=False)
    console.print(
        f"S3: {document['durable_storage']}. Other parts: {document['method']['detect, replan, rebuild, first_step']}"
    )


def _table(title: str, scenarios: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("scenario")
    table.add_column("policy")
    for part in (*PARTS, "total"):
        table.add_column(f"{part.replace('_', ' ')} s", justify="right")
    for name in ("memory MB", "disk MB", "peer MB", "s3 MB", "steps lost", "/ limit", "vs s3"):
        table.add_column(name, justify="right")
    for scenario in scenarios:
        for policy, result in scenario["policies"].items():
            table.add_row(*_row(scenario, policy, result), end_section=policy == list(scenario["policies"])[-1])
    return table


def _row(scenario: dict[str, Any], policy: str, result: dict[str, Any]) -> list[str]:
    first = policy == next(iter(scenario["policies"]))
    seconds = [_number(result["seconds"][part]) for part in (*PARTS, "total")]
    tiers = [f"{result['bytes_by_tier'][tier] / 1e6:,.1f}" for tier in ("memory", "disk", "peer", "s3")]
    return [
        scenario["scenario"] if first else "",
        policy if result["verified"] is not False or scenario["simulated"] else f"{policy} WRONG",
        *seconds,
        *tiers,
        str(result["steps_lost"]),
        _number(result.get("restore_over_limit")),
        f"{_number(scenario['ratio_vs_s3_only'])}x" if first else "",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def draw(document: dict[str, Any], path: str) -> None:
    """Bars of seconds by part, one a policy, scenarios side by side (real part).

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--picture needs matplotlib; install it, or leave --picture out") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    scenarios = [s for s in document["scenarios"] if not s["simulated"]]
    figure, axes = pyplot.subplots(
        1, len(scenarios), figsize=(2.4 * len(scenarios) + 1.5, 4.6), sharey=True, squeeze=False
    )
    for axis, scenario in zip(axes[0], scenarios, strict=True):
        _bars(axis, scenario)
    axes[0][0].set_ylabel("seconds")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(PARTS), frameon=False)
    size = scenarios[0]["state_bytes"] / 1e6
    figure.suptitle(f"Recovery by part, {size:,.0f} MB of state, software-throttled links", fontsize=11)
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
    axis.set_title(f"({scenario['scenario']})  {ratio:.1f}x" if ratio else f"({scenario['scenario']})", fontsize=10)
    axis.set_xticks(range(len(policies)), [policy.replace("_", "\n") for policy in policies], fontsize=7)
    axis.spines[["top", "right"]].set_visible(False)
