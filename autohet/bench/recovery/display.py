"""The recovery benchmark for people: a table on the terminal, and bars of seconds by part."""

from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from autohet.runtime.process.figures import figure_class, save_figure
from autohet.runtime.process.terminal import PlainConsole
from planner.inputs.documents import Document

PARTS = ("detect", "replan", "rebuild", "restore", "first_step")
COLOURS = ("#7f7f7f", "#9467bd", "#1f77b4", "#d62728", "#2ca02c")


def show(document: Document) -> None:
    """Print the tables of the real and of the simulated part."""
    console = PlainConsole()
    real_title = f"Real processes, links {document['links_scale']}"
    simulated_title = (
        "SIMULATED: restore schedules of published scale; the other parts by stated constants"
    )
    for simulated, title in ((False, real_title), (True, simulated_title)):
        found = [s for s in document["scenarios"] if s["simulated"] is simulated]
        if not found:
            continue
        table = _new_table(title)
        for name in ("restore", "total"):
            table.add_column(f"{name},\ns", justify="right")
        table.add_column("MB\nmoved")
        for name in ("steps\nlost", "over\nlinks", "over\nbound", "vs\ns3"):
            table.add_column(name, justify="right")
        _add_rows(table, found, _row)
        console.print(table)
        if len(_measured_parts(found)) > 1:
            console.print(_parts_table(found))
        for scenario in found:
            console.print(f"  {scenario['scenario']}: {scenario['what']}", highlight=False)

    if document.get("process_start_s"):
        console.print(
            f"A worker process starts in {document['process_start_s']:.1f} s, measured alone; that"
            " is in the rebuild of policies that restart, and in their total",
            highlight=False,
        )
    for reason in document.get("left_out", ()):
        console.print(f"Not measured: {reason}", highlight=False)
    console.print(
        f"S3: {document['durable_storage']}. Other parts:"
        f" {document['method']['detect, replan, rebuild, first_step']}"
    )


def _parts_table(scenarios: list[Document]) -> Table:
    """Return a table of the seconds of each part.

    A part of a recovery that no policy measured has no column.
    """
    table = _new_table("Seconds of each part")
    table.add_column("how")
    parts = _measured_parts(scenarios)
    for part in parts:
        table.add_column(part.replace("_", "\n"), justify="right")

    def row(scenario: Document, policy: str, result: Document) -> list[str]:
        return [result["how"], *(_number(result["seconds"][part]) for part in parts)]

    _add_rows(table, scenarios, row)
    return table


def _new_table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    table.add_column("policy")
    return table


def _add_rows(
    table: Table,
    scenarios: list[Document],
    cells: Callable[[Document, str, Document], list[str]],
) -> None:
    """Add a row for each policy; the first of a scenario has its name."""
    for scenario in scenarios:
        policies = scenario["policies"]
        names = list(policies)
        for policy, result in policies.items():
            name = scenario["scenario"].replace("_", " ") if policy == names[0] else ""
            # A simulation copies nothing that could be wrong.
            is_wrong = result["verified"] is False and not scenario["simulated"]
            shown = policy.replace("_", " ") + (" WRONG" if is_wrong else "")
            row = cells(scenario, policy, result)
            table.add_row(name, shown, *row, end_section=policy == names[-1])


def _measured_parts(scenarios: list[Document]) -> list[str]:
    """Return the parts of a recovery that some policy measured."""
    measured = set[str]()
    for scenario in scenarios:
        for result in scenario["policies"].values():
            measured |= {part for part in PARTS if result["seconds"][part] is not None}
    return [part for part in PARTS if part in measured]


def _row(scenario: Document, policy: str, result: Document) -> list[str]:
    ratio = ""
    # The first policy's row has what holds for the whole scenario.
    is_first = policy == next(iter(scenario["policies"]))
    if is_first and scenario.get("restore_ratio_vs_s3_only"):
        # Of the restores alone: a process's start depends on what else the machine does.
        ratio = f"{_number(scenario['restore_ratio_vs_s3_only'])}x"
    return [
        _number(result["seconds"]["restore"]),
        _number(result["seconds"]["total"]),
        _moved(result["bytes_by_tier"]),
        str(result["steps_lost"]),
        _number(result.get("restore_over_limit")),
        _number(result.get("restore_over_bound")),
        ratio,
    ]


def _moved(bytes_by_tier: dict[str, int | None]) -> str:
    """Return the megabytes from each tier, one line each."""
    lines = []
    for tier, num_bytes in bytes_by_tier.items():
        if num_bytes is None:
            return "not\ncounted"
        if num_bytes:
            lines.append(f"{_megabytes(num_bytes)} {tier}")
    return "\n".join(lines) or "none"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    digits = 1 if value >= 10 else 2
    return f"{value:.{digits}f}"


def _megabytes(num_bytes: float) -> str:
    digits = 1 if num_bytes < 1e8 else 0
    return f"{num_bytes / 1e6:.{digits}f}"


def draw(document: Document, path: str) -> None:
    """Draw seconds by part as bars, one a policy, scenarios side by side (real part).

    Raises:
        ConfigError: matplotlib is not installed.
    """
    scenarios = []
    for scenario in document["scenarios"]:
        if not scenario["simulated"] and scenario["ratio_vs_limit"] is not None:
            scenarios.append(scenario)

    figure = figure_class()(figsize=(2.4 * len(scenarios) + 1.5, 4.6))
    axes = figure.subplots(1, len(scenarios), sharey=True, squeeze=False)
    first_axis = axes[0][0]
    for axis, scenario in zip(axes[0], scenarios, strict=True):
        _bars(axis, scenario)
    first_axis.set_ylabel("seconds")
    # room for the totals above the highest bar
    _, highest = first_axis.get_ylim()
    first_axis.set_ylim(top=1.1 * highest)

    handles, labels = first_axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=len(PARTS), frameon=False)
    size = scenarios[0]["state_bytes"] / 1e6
    figure.suptitle(
        f"Recovery by part, {size:,.0f} MB of state, links {document['links_scale']}", fontsize=11
    )
    figure.tight_layout(rect=(0, 0.07, 1, 0.98))
    save_figure(figure, path)


def _bars(axis: Any, scenario: Document) -> None:
    policies = list(scenario["policies"])
    bottoms = [0.0] * len(policies)
    for part, colour in zip(PARTS, COLOURS, strict=True):
        heights = []
        tops = []
        for policy, bottom in zip(policies, bottoms, strict=True):
            height = scenario["policies"][policy]["seconds"][part] or 0.0
            heights.append(height)
            tops.append(bottom + height)
        axis.bar(policies, heights, bottom=bottoms, color=colour, label=part, width=0.65)
        bottoms = tops

    for index, total in enumerate(bottoms):
        axis.text(index, total, f"{total:.1f}", ha="center", va="bottom", fontsize=8)
    title = f"({scenario['scenario']})"
    ratio = scenario["ratio_vs_s3_only"]
    if ratio:
        title = f"{title}  {ratio:.1f}x"
    axis.set_title(title, fontsize=10)
    labels = [policy.replace("_", "\n") for policy in policies]
    axis.set_xticks(range(len(policies)), labels, fontsize=7)
    axis.spines[["top", "right"]].set_visible(False)
