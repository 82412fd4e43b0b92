"""Pictures of `autohet plan` (PNG or SVG).

They show plans as bars of blocks coloured by GPU type, and the Pareto front.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autohet.cli.plans.display import (
    MOST_BARS,
    colours_of,
    gpus_of,
    group_pipelines,
    money,
    name_of,
    seconds,
    segment_label,
)
from autohet.runtime.process.figures import figure_class, save_figure
from planner.errors import ConfigError
from planner.inputs.documents import Json
from planner.inputs.fleet import Fleet
from planner.plans.plan import Pipeline, Plan

MOST_LISTED = 20
_BAR_INCHES = 0.42
_TITLE_INCHES = 0.55
_LINE = "#0072B2"
_MARKED = "#D55E00"


def draw(document: Json, fleet: Fleet, path: str | Path) -> None:
    """Write a picture of the plan, of several compared, or of the front if the document has one.

    ConfigError if it cannot be drawn or written.
    """
    front = document.get("front")
    results = [result for result in document.get("results", [document]) if result.get("plan")]
    if front:
        figure = front_figure(figure_class(), front, fleet)
    elif results:
        figure = _plans_figure(figure_class(), results, fleet)
    else:
        raise ConfigError("there is no plan to draw")
    save_figure(figure, path)


# ---- plans ----


def _plans_figure(new_figure: Any, results: Sequence[Json], fleet: Fleet) -> Any:
    """Draw one panel for each plan over a common axis of blocks; all bars are equally thick.

    The legend has the GPU types, for one plan also how many of them it uses.
    """
    from matplotlib.patches import Patch

    plans = [Plan.from_document(result["plan"]) for result in results]
    heights = []
    for plan in plans:
        num_bars = min(len(group_pipelines(plan, fleet)), MOST_BARS)
        heights.append(_BAR_INCHES * num_bars + _TITLE_INCHES)

    figure = new_figure(figsize=(10, sum(heights) + 0.9), layout="constrained")
    axes = figure.subplots(
        len(results), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    for axis, result in zip(axes, results, strict=True):
        _draw_plan(axis, result, fleet)

    # The panels share one axis of blocks, which is written below the last.
    last_axis = axes[-1]
    num_blocks = plans[0].pipelines[0].stages[-1].end_layer
    last_axis.set_xlabel("blocks", fontsize=8)
    last_axis.tick_params(axis="x", labelsize=8, length=3, labelbottom=True)
    last_axis.set_xlim(0, num_blocks)
    last_axis.xaxis.get_major_locator().set_params(integer=True)
    have = Counter(fleet.gpu_type(worker) for worker in fleet.workers)
    used = gpus_of(plans[0], fleet) if len(plans) == 1 else None
    handles = []
    for gpu, (_, colour) in colours_of(fleet).items():
        label = gpu
        if used is not None:
            label = f"{gpu} ({used.get(gpu, 0)} of {have[gpu]})"
        handles.append(Patch(color=colour, label=label))
    handles.append(Patch(alpha=0, label="beside a bar: pipelines x (microbatches of sequences)"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 6),
        frameon=False,
        fontsize=8,
    )
    return figure


def _draw_plan(axis: Any, result: Json, fleet: Fleet) -> None:
    plan = Plan.from_document(result["plan"])
    colours = colours_of(fleet)
    kinds = group_pipelines(plan, fleet)
    labels = []
    for row, (count, pipeline) in enumerate(kinds[:MOST_BARS]):
        _draw_pipeline(axis, row, pipeline, fleet, colours)
        microbatches = f"{pipeline.num_microbatches} of {pipeline.microbatch_sequences}"
        labels.append(f"{count} x ({microbatches})")

    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", length=0, labelbottom=False)
    for side in ("top", "right", "left", "bottom"):
        axis.spines[side].set_visible(False)

    text = title(result, plan, fleet)
    hidden = len(kinds) - MOST_BARS
    if hidden > 0:
        text += f", and {hidden} more kinds of pipeline"
    axis.set_title(text, loc="left", fontsize=9.5, pad=4)


def title(result: Json, plan: Plan, fleet: Fleet) -> str:
    """Return a title: strategy, step time, throughput, price, pipelines, GPUs in use."""
    predicted = result["predicted"]
    count = len(plan.pipelines)
    parts = [
        f"{Path(name_of(result)).name}: {seconds(predicted['step_time_s'])} a step",
        f"{predicted['tokens_per_s']:,.0f} tokens/s",
        f"{count} pipeline{'s' if count > 1 else ''}",
        f"{len(plan.workers)} of {len(fleet.workers)} GPUs",
    ]
    if predicted.get("usd_per_hour") is not None:
        parts.insert(2, f"{money(predicted['usd_per_hour'])} $/h")
    return ", ".join(parts)


def _draw_pipeline(
    axis: Any, row: int, pipeline: Pipeline, fleet: Fleet, colours: Mapping[str, tuple[str, str]]
) -> None:
    blocks = pipeline.stages[-1].end_layer
    for stage in pipeline.stages:
        _, colour = colours[fleet.gpu_type(stage.workers[0])]
        axis.barh(
            row,
            stage.num_layers,
            left=stage.first_layer,
            color=colour,
            edgecolor="white",
            linewidth=1.5,
            height=0.8,
        )

        # A bar holds about 100 / 1.2 characters. What has no room is shortened, or left out.
        room = stage.num_layers / blocks * 100
        text = segment_label(stage)
        if room < 1.2 * len(text):
            text = str(stage.num_layers)
        if room >= 1.2 * len(text):
            middle = stage.first_layer + stage.num_layers / 2
            axis.text(middle, row, text, ha="center", va="center", fontsize=8, color=ink(colour))


def ink(colour: str) -> str:
    """Return black or white for text on a colour (relative luminance, ITU-R BT.709)."""
    red = int(colour[1:3], 16) / 255
    green = int(colour[3:5], 16) / 255
    blue = int(colour[5:7], 16) / 255
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "white" if luminance < 0.45 else "black"


# ---- the front ----


def front_figure(new_figure: Any, front: Sequence[Json], fleet: Fleet) -> Any:
    """Draw price against speed with numbered points, and a list of what each number is.

    The cheapest tokens are marked.
    """
    listed = listed_points(len(front))
    height = max(4.8, 0.25 * len(listed) + 1.2)
    figure = new_figure(figsize=(11, height), layout="constrained")
    axis, side = figure.subplots(1, 2, gridspec_kw={"width_ratios": [3, 2]})

    predictions = [member["predicted"] for member in front]
    prices = [predicted["usd_per_hour"] for predicted in predictions]
    rates = [predicted["tokens_per_s"] for predicted in predictions]
    usd_per_million = [predicted["usd_per_million_tokens"] for predicted in predictions]
    cheapest = usd_per_million.index(min(usd_per_million))
    colours = [_LINE] * len(front)
    colours[cheapest] = _MARKED

    # Fastest first: between two prices one has the cheaper point's speed.
    axis.plot(prices, rates, color=_LINE, drawstyle="steps-pre", linewidth=1, alpha=0.5)
    axis.scatter(prices, rates, s=130, zorder=3, color=colours)
    for number, i in enumerate(listed, 1):
        axis.annotate(
            str(number),
            (prices[i], rates[i]),
            ha="center",
            va="center",
            color="white",
            fontsize=7,
            zorder=4,
        )

    axis.set_xlabel("$ an hour", fontsize=9)
    axis.set_ylabel("tokens a second", fontsize=9)
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.tick_params(labelsize=8)
    axis.set_title(
        "Pareto front: no other plan found is both faster and cheaper", loc="left", fontsize=10
    )
    axis.grid(alpha=0.25)
    for edge in ("top", "right"):
        axis.spines[edge].set_visible(False)
    _list_points(side, front, listed, cheapest, fleet)
    return figure


def listed_points(count: int) -> list[int]:
    """Return the points that get numbers: all of a few; of many, some that include both ends."""
    if count <= MOST_LISTED:
        return list(range(count))
    listed = {round(number * (count - 1) / (MOST_LISTED - 1)) for number in range(MOST_LISTED)}
    return sorted(listed)


def _list_points(
    axis: Any, front: Sequence[Json], listed: Sequence[int], cheapest: int, fleet: Fleet
) -> None:
    axis.axis("off")
    columns = (("", 0.0), ("step", 0.07), ("$/h", 0.24), ("$/M tokens", 0.38), ("GPUs", 0.60))
    height = 1.0 / (len(listed) + 3)
    for heading, at in columns:
        axis.text(at, 1 - height, heading, fontsize=8, weight="bold", transform=axis.transAxes)
    axis.text(
        columns[1][1],
        0.01,
        "in orange: the cheapest tokens",
        fontsize=8,
        color=_MARKED,
        transform=axis.transAxes,
    )
    # The first row is that of the headings.
    for row, index in enumerate(listed, 2):
        member = front[index]
        predicted = member["predicted"]
        num_by_gpu = gpus_of(Plan.from_document(member["plan"]), fleet)
        texts = (
            str(row - 1),
            seconds(predicted["step_time_s"]),
            money(predicted["usd_per_hour"]),
            money(predicted["usd_per_million_tokens"], 3),
            " + ".join(f"{number} {gpu}" for gpu, number in num_by_gpu.items()),
        )
        colour = _MARKED if index == cheapest else "black"
        for text, (_, at) in zip(texts, columns, strict=True):
            axis.text(
                at, 1 - row * height, text, fontsize=8, color=colour, transform=axis.transAxes
            )
