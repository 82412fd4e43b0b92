"""Pictures of `autohet plan` (PNG or SVG).

They show plans as bars of blocks coloured by GPU type, and the Pareto front.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autohet.cli.plan_display import (
    MOST_BARS,
    Document,
    colours_of,
    gpus_of,
    grouped,
    money,
    name_of,
    seconds,
    segment_label,
)
from planner.cluster import Fleet
from planner.errors import ConfigError
from planner.plan import Pipeline, Plan

MOST_LISTED = 20
_BAR_INCHES = 0.42
_TITLE_INCHES = 0.55
_LINE = "#0072B2"
_MARKED = "#D55E00"


def draw(document: Document, fleet: Fleet, path: str | Path) -> None:
    """Write a picture of the plan, of several compared, or of the front if the document has one.

    ConfigError if it cannot be drawn or written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--picture needs matplotlib: pip install 'autohet[picture]'") from None
    if Path(path).suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"--picture is '{path}'; its name must end in .png or .svg")
    front = document.get("front")
    results = [r for r in document.get("results", [document]) if r.get("plan")]
    if not front and not results:
        raise ConfigError("there is no plan to draw")
    figure = _front_figure(Figure, front, fleet) if front else _plans_figure(Figure, results, fleet)
    try:
        with rc_context({"svg.fonttype": "none"}):  # text stays text: searchable, and small
            figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"cannot write picture '{path}': {error.strerror}") from None


# ---- plans ----


def _plans_figure(figure_class: Any, results: Sequence[Document], fleet: Fleet) -> Any:
    """Draw one panel for each plan over a common axis of blocks; all bars are equally thick."""
    bars = [min(len(grouped(Plan.from_document(r["plan"]), fleet)), MOST_BARS) for r in results]
    heights = [_BAR_INCHES * n + _TITLE_INCHES for n in bars]
    figure = figure_class(figsize=(10, sum(heights) + 0.9), layout="constrained")
    axes = figure.subplots(
        len(results), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights}
    )[:, 0]
    for axis, result in zip(axes, results, strict=True):
        _draw_plan(axis, result, fleet)
    axes[-1].set_xlabel("blocks", fontsize=8)
    axes[-1].tick_params(axis="x", labelsize=8, length=3, labelbottom=True)
    axes[-1].set_xlim(0, Plan.from_document(results[0]["plan"]).pipelines[0].stages[-1].end_layer)
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    _draw_legend(figure, fleet, [Plan.from_document(r["plan"]) for r in results])
    return figure


def _draw_plan(axis: Any, result: Document, fleet: Fleet) -> None:
    plan = Plan.from_document(result["plan"])
    colours = colours_of(fleet)
    kinds = grouped(plan, fleet)
    for row, (_, pipeline) in enumerate(kinds[:MOST_BARS]):
        _draw_pipeline(axis, row, pipeline, fleet, colours)
    labels = [
        f"{count} x ({p.num_microbatches} of {p.microbatch_sequences})"
        for count, p in kinds[:MOST_BARS]
    ]
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.set_ylim(len(labels) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.tick_params(axis="x", length=0, labelbottom=False)
    for side in ("top", "right", "left", "bottom"):
        axis.spines[side].set_visible(False)
    more = (
        f", and {len(kinds) - MOST_BARS} more kinds of pipeline" if len(kinds) > MOST_BARS else ""
    )
    axis.set_title(title(result, plan, fleet) + more, loc="left", fontsize=9.5, pad=4)


def title(result: Document, plan: Plan, fleet: Fleet) -> str:
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
        colour = colours[fleet.gpu_type(stage.workers[0])][1]
        axis.barh(
            row,
            stage.num_layers,
            left=stage.first_layer,
            color=colour,
            edgecolor="white",
            linewidth=1.5,
            height=0.8,
        )
        label = segment_label(stage)
        room = stage.num_layers / blocks * 100
        text = label if room >= 1.2 * len(label) else str(stage.num_layers)
        if room >= 1.2 * len(text):
            middle = stage.first_layer + stage.num_layers / 2
            axis.text(middle, row, text, ha="center", va="center", fontsize=8, color=ink(colour))


def ink(colour: str) -> str:
    """Return black or white for text on a colour (relative luminance, ITU-R BT.709)."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "white" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.45 else "black"


def _draw_legend(figure: Any, fleet: Fleet, plans: Sequence[Plan]) -> None:
    """Draw the GPU types, for one plan also how many of them it uses.

    The legend explains once the labels beside the bars.
    """
    from matplotlib.patches import Patch

    have: dict[str, int] = {}
    for worker in fleet.workers:
        have[fleet.gpu_type(worker)] = have.get(fleet.gpu_type(worker), 0) + 1
    used = gpus_of(plans[0], fleet) if len(plans) == 1 else None
    handles = []
    for gpu, (_, colour) in colours_of(fleet).items():
        label = gpu if used is None else f"{gpu} ({used.get(gpu, 0)} of {have[gpu]})"
        handles.append(Patch(color=colour, label=label))
    handles.append(Patch(alpha=0, label="beside a bar: pipelines x (microbatches of sequences)"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(handles), 6),
        frameon=False,
        fontsize=8,
    )


# ---- the front ----


def _front_figure(figure_class: Any, front: Sequence[Document], fleet: Fleet) -> Any:
    """Draw price against speed with numbered points, and a list of what each number is.

    The cheapest tokens are marked.
    """
    listed = listed_points(len(front))
    figure = figure_class(figsize=(11, max(4.8, 0.25 * len(listed) + 1.2)), layout="constrained")
    axis, side = figure.subplots(1, 2, gridspec_kw={"width_ratios": [3, 2]})
    prices = [member["predicted"]["usd_per_hour"] for member in front]
    rates = [member["predicted"]["tokens_per_s"] for member in front]
    cheapest = min(range(len(front)), key=lambda i: front[i]["predicted"]["usd_per_million_tokens"])
    # Fastest first: between two prices one has the cheaper point's speed.
    axis.plot(prices, rates, color=_LINE, drawstyle="steps-pre", linewidth=1, alpha=0.5)
    axis.scatter(
        prices,
        rates,
        s=130,
        zorder=3,
        color=[_MARKED if i == cheapest else _LINE for i in range(len(front))],
    )
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
    return sorted({round(i * (count - 1) / (MOST_LISTED - 1)) for i in range(MOST_LISTED)})


def _list_points(
    axis: Any, front: Sequence[Document], listed: Sequence[int], cheapest: int, fleet: Fleet
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
    for row, i in enumerate(listed, 2):
        member = front[i]
        predicted = member["predicted"]
        gpus = " + ".join(
            f"{n} {gpu}" for gpu, n in gpus_of(Plan.from_document(member["plan"]), fleet).items()
        )
        texts = (
            str(row - 1),
            seconds(predicted["step_time_s"]),
            money(predicted["usd_per_hour"]),
            money(predicted["usd_per_million_tokens"], 3),
            gpus,
        )
        colour = _MARKED if i == cheapest else "black"
        for text, (_, at) in zip(texts, columns, strict=True):
            axis.text(
                at, 1 - row * height, text, fontsize=8, color=colour, transform=axis.transAxes
            )
