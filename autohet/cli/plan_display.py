"""Terminal display of `autohet plan`: tables, and plans as bars.

A bar is one pipeline: a segment a stage, as wide as its blocks, coloured by GPU type.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autohet.runtime.process.terminal import PlainConsole
from planner.cluster import Fleet
from planner.cost.parameters import OURS
from planner.plan import Pipeline, Plan, Stage

# Colours that differ in lightness as well as in hue (Okabe and Ito), terminal colour beside the
# picture's.
COLOURS = (
    ("dodger_blue2", "#0072B2"),
    ("orange1", "#E69F00"),
    ("green4", "#009E73"),
    ("hot_pink3", "#CC79A7"),
    ("sky_blue1", "#56B4E9"),
    ("orange_red1", "#D55E00"),
    ("yellow2", "#C8B900"),
    ("grey62", "#888888"),
)
MOST_BARS = 12
MOST_NOTES = 4
_NARROW = 3
Document = Mapping[str, Any]


def show(document: Document, fleet: Fleet, console: Console | None = None) -> None:
    """Print one answer, the comparison of several, or a front; assumptions come last."""
    console = console or PlainConsole()
    results = document.get("results", [document] if document.get("plan") else [])
    if "front" in document and "plan" not in document:
        console.print(front_table(document["front"], fleet))
        if document.get("choice"):
            console.print(Text(document["choice"]), soft_wrap=True)
    elif "results" in document:
        console.print(comparison_table(results, console.width))
        for result in results:
            console.print(Text(f"\n{name_of(result)}", style="bold"))
            _print_result(console, result, fleet)
    else:
        _print_answer(console, document, fleet)
    without_rule = [note for result in results for note in result.get("notes", ())]
    for note in [*without_rule, *_rates(results), *_notes(results), *_assumed(document)]:
        console.print(Text(note, style="dim"))
    _print_training(console, document.get("training"))


ACTIVATION_MEMORY = {
    "counted": "Activation memory: counted on a traced block of transformers' modules.",
    "estimated": "Activation memory: estimated by a rule for all transformers, not by the modules.",
}


def _print_training(console: Console, training: Document | None) -> None:
    if training is None:
        return
    if sentence := ACTIVATION_MEMORY.get(training["activation_memory"]):
        console.print(Text(sentence, style="dim"))
    if not training["can_run"]:
        console.print(
            Text(f"autohet train cannot run this model: {training['reason']}", style="red"),
            soft_wrap=True,
        )


def name_of(result: Document) -> str:
    """Return the strategy, or the file of a given plan."""
    return str(result.get("file", result["strategy"]))


def _print_result(console: Console, result: Document, fleet: Fleet) -> None:
    if result.get("plan"):
        _print_plan(console, result, fleet)
    if not result["feasible"]:
        what = "does not fit" if result.get("plan") else "no plan"
        console.print(
            Text(f"{what}: {result.get('reason', 'not feasible')}", style="red"), soft_wrap=True
        )
    for sentence in result.get("host_memory", {}).get("sentences", ()):
        console.print(Text(sentence, style="yellow"), soft_wrap=True)


def _print_answer(console: Console, document: Document, fleet: Fleet) -> None:
    _print_result(console, document, fleet)
    if not document.get("plan"):
        return
    for line in _facts(document):
        console.print(Text(line))
    for item in document.get("idle", ()):
        console.print(
            Text(f"idle: {', '.join(_short(item['workers']))}: {item['why']}", style="dim")
        )
    if document.get("front"):
        console.print(front_table(document["front"], fleet))


def _rates(results: Sequence[Document]) -> list[str]:
    """Return a line for each GPU type on its rate: measured or an estimate."""
    lines = []
    for result in results:
        for gpu, rate in result.get("rates", {}).items():
            lines.append(f"{gpu}, {rate['precision']}: {rate['basis']} ({rate['source']})")
    return list(dict.fromkeys(lines))


def _notes(results: Sequence[Document]) -> list[str]:
    """Return notes on block times that were not measured, so that no guess looks like one."""
    found = dict.fromkeys(
        note for r in results if r.get("predicted") for note in r["predicted"].get("estimated", ())
    )
    blocks = [note for note in found if note.startswith("block")]
    rest = len(found) - len(blocks)
    shown = [f"not measured: {note}" for note in blocks[:MOST_NOTES]]
    hidden = rest + len(blocks) - len(shown)
    return [
        *shown,
        *(
            [f"{hidden} more estimates are listed under predicted.estimated of --json"]
            if shown and hidden
            else []
        ),
    ]


def _assumed(document: Document) -> list[str]:
    """Return lines on the framework, if it is not this project's, and on the calibration.

    The framework is the one whose runs are predicted.
    """
    lines = []
    framework = document.get("framework", OURS)
    if framework != OURS:
        lines.append(
            f"predicted as {framework} would run it; --framework {OURS} predicts this project's"
            " runtime"
        )
    found = document.get("calibration")
    if found:
        error = f"{found['mean_error_before']:.1%} to {found['mean_error_after']:.1%}"
        moved = (
            f"{name} {v['default']:.3g} -> {v['fitted']:.3g}"
            for name, v in found["parameters"].items()
        )
        lines.append(f"calibrated on {found['runs']} runs, mean error {error}: {', '.join(moved)}")
    return lines


def _table(title: str) -> Table:
    return Table(title=title, box=SIMPLE_HEAD, title_justify="left")


# Columns of a comparison, and the width of the terminal from which each is shown.
_COLUMNS = (
    ("strategy", 0),
    ("step", 0),
    ("ratio", 0),
    ("tok/s", 90),
    ("$/h", 0),
    ("$/Mtok", 90),
    ("plan", 0),
    ("GPUs", 0),
    ("gap", 0),
    ("search", 0),
)


def comparison_table(results: Sequence[Document], width: int = 120) -> Table:
    """Table with one row for each strategy; the ratio is to the best step time.

    A narrow terminal gets fewer columns.
    """
    times = [r["predicted"]["step_time_s"] for r in results if r["feasible"]]
    best = min(times, default=None)
    table = _table("Plans compared, costed by one model")
    shown = [(name, least <= width) for name, least in _COLUMNS]
    for name in (name for name, is_shown in shown if is_shown):
        justify: Literal["left", "right"] = "left" if name in ("strategy", "plan") else "right"
        table.add_column(name, justify=justify, no_wrap=True)
    for result in results:
        if result.get("predicted"):
            cells = _comparison_row(result, best or 1.0)
            table.add_row(
                *(cell for cell, (_, is_shown) in zip(cells, shown, strict=True) if is_shown)
            )
        else:
            table.add_row(Path(name_of(result)).name, Text("no plan", style="red"))
    return table


def _comparison_row(result: Document, best: float) -> list[Text | str]:
    predicted = result["predicted"]
    search = result.get("search") or {}
    plan = Plan.from_document(result["plan"])
    ratio = predicted["step_time_s"] / best
    shown = f"{ratio:.3f}" if result["feasible"] else "no fit"
    if not result["feasible"]:
        style = "red"
    else:
        style = "bold green" if ratio < 1 + 1e-9 else ""
    gap = search.get("gap")
    return [
        Path(name_of(result)).name,
        seconds(predicted["step_time_s"]),
        Text(shown, style=style),
        f"{predicted['tokens_per_s']:,.0f}",
        money(predicted["usd_per_hour"]),
        money(predicted["usd_per_million_tokens"], 3),
        shape_of(plan),
        str(len(plan.workers)),
        "" if gap is None else f"{gap:.1%}",
        seconds(search["seconds"]) if search.get("seconds") is not None else "",
    ]


def front_table(front: Sequence[Document], fleet: Fleet) -> Table:
    """Return the Pareto front as a table, fastest first."""
    table = _table("Pareto front: no other plan found is both faster and cheaper")
    for name in ("step", "tok/s", "$/h", "$/Mtok", "GPUs in use", "plan", "TP"):
        table.add_column(name, justify="right" if name != "GPUs in use" else "left")
    for member in front:
        plan = Plan.from_document(member["plan"])
        predicted = member["predicted"]
        degrees = sorted({stage.tp_degree for p in plan.pipelines for stage in p.stages})
        table.add_row(
            seconds(predicted["step_time_s"]),
            f"{predicted['tokens_per_s']:,.0f}",
            money(predicted["usd_per_hour"]),
            money(predicted["usd_per_million_tokens"], 3),
            ", ".join(f"{count} {gpu}" for gpu, count in gpus_of(plan, fleet).items()),
            shape_of(plan),
            "/".join(map(str, degrees)),
        )
    return table


def gpus_of(plan: Plan, fleet: Fleet) -> dict[str, int]:
    """Count GPUs in use by type."""
    return dict(sorted(Counter(fleet.gpu_type(worker) for worker in plan.workers).items()))


def _facts(document: Document) -> list[str]:
    """Return lines on speed and price, the parts of a step, and the bound on any better plan."""
    predicted = document["predicted"]
    search = document.get("search") or {}
    line = f"step {seconds(predicted['step_time_s'])}, {predicted['tokens_per_s']:,.0f} tokens/s"
    if predicted.get("usd_per_hour") is not None:
        line += (
            f", {predicted['usd_per_hour']:.2f} $/h, {predicted['usd_per_million_tokens']:.3f} $/M"
            " tokens"
        )
    breakdown = predicted["breakdown_s"].items()
    pieces = [f"{name.replace('_', ' ')} {seconds(s)}" for name, s in breakdown if s > 1e-6]
    lines = [line, f"of the step: {', '.join(pieces)}"]
    for each in predicted.get("transfers") or ():
        one, other = each["zones"]
        lines.append(
            f"between {one} and {other}: {each['gb_per_hour']:,.1f} GB/h,"
            f" {each['usd_per_hour']:.2f} $/h"
        )
    if document.get("choice"):
        lines.append(f"chosen: {document['choice']}")
    if search.get("proof"):
        lines.append(search["proof"])
    if document.get("robustness"):
        lines.append(document["robustness"]["sentence"])
    return [*lines, *document.get("explanation", {}).get("sentences", ())]


def _print_plan(console: Console, document: Document, fleet: Fleet) -> None:
    plan = Plan.from_document(document["plan"])
    colours = colours_of(fleet)
    layers = plan.pipelines[0].stages[-1].end_layer if plan.pipelines else 1
    width = max(20, min(console.width - 30, max(layers * 4, 48)))
    for count, pipeline in grouped(plan, fleet)[:MOST_BARS]:
        text = Text(f"{count:>3} x ")
        text.append_text(bar(pipeline, fleet, width, colours))
        text.append(f"  {pipeline.num_microbatches} x {pipeline.microbatch_sequences} seq")
        console.print(text, no_wrap=True, overflow="crop")
        for line in stage_lines(pipeline, fleet):
            console.print(Text(f"      {line}", style="dim"), soft_wrap=True)
    if plan.spmd is not None:
        names = ", ".join(_short(plan.workers))
        for axis, units in plan.spmd.units:
            console.print(
                Text(f"      {axis}: {'/'.join(map(str, units))} on {names}", style="dim")
            )
    for entry in document.get("program", ()):
        console.print(
            Text(f"      {entry['tensor']} {entry['shape']}: {'; '.join(entry['instructions'])}"),
            soft_wrap=True,
        )
    hidden = len(grouped(plan, fleet)) - MOST_BARS
    if hidden > 0:
        console.print(Text(f"    and {hidden} more kinds of pipeline", style="dim"))
    console.print(_legend(plan, fleet, colours))


def grouped(plan: Plan, fleet: Fleet) -> list[tuple[int, Pipeline]]:
    """Count pipelines that look the same together, in plan order."""
    found: dict[tuple[object, ...], tuple[int, Pipeline]] = {}
    for pipeline in plan.pipelines:
        stages = tuple(
            (s.num_layers, s.tp_shares or s.tp_degree, fleet.gpu_type(s.workers[0]))
            for s in pipeline.stages
        )
        memory = tuple(
            (s.recompute, s.shard_optimizer, s.compute, s.expert_dispatch) for s in pipeline.stages
        )
        key = (stages, memory, pipeline.num_microbatches, pipeline.microbatch_sequences)
        found[key] = (found[key][0] + 1 if key in found else 1, found.get(key, (0, pipeline))[1])
    return list(found.values())


def stage_lines(pipeline: Pipeline, fleet: Fleet) -> list[str]:
    """Describe a bar's colours and marks in words; count equal neighbours together."""
    words = [stage_words(stage, fleet) for stage in pipeline.stages]
    counted = [(len(list(equal)), said) for said, equal in itertools.groupby(words)]
    return [said if count == 1 else f"{count} x {said}" for count, said in counted]


def stage_words(stage: Stage, fleet: Fleet) -> str:
    """Describe one stage: blocks, GPUs, TP degree, and its measures to save memory."""
    noun = "block" if stage.num_layers == 1 else "blocks"
    parts = [f"{stage.num_layers} {noun} on {fleet.gpu_type(stage.workers[0])}"]
    if stage.tp_shares:
        parts.append(f"TP {'+'.join(map(str, stage.tp_shares))}")
    elif stage.tp_degree > 1:
        parts.append(f"{'TP' if stage.spmd is None else 'one program on'} {stage.tp_degree}")
    if stage.compute is not None:
        parts.append(f"computes in {stage.compute}")
    if stage.expert_dispatch == "all_to_all":
        parts.append("tokens to experts by all-to-all")
    if stage.recompute not in (None, "none"):
        parts.append(f"{stage.recompute} recomputation")
    if stage.shard_optimizer:
        parts.append("optimizer state shared out")
    return ", ".join(parts)


def bar(
    pipeline: Pipeline, fleet: Fleet, width: int, colours: Mapping[str, tuple[str, str]]
) -> Text:
    """Draw one pipeline as coloured segments.

    A segment shows its blocks, its TP degree if that is above 1, or its shares, and its marks.
    """
    text = Text()
    total = max(1, pipeline.stages[-1].end_layer)
    at = 0
    for number, stage in enumerate(pipeline.stages):
        end = max(at + _NARROW, round(width * stage.end_layer / total))
        label = segment_label(stage)
        shown = label if len(label) < end - at else str(stage.num_layers)
        style = f"bold black on {colours[fleet.gpu_type(stage.workers[0])][0]}"
        last = number == len(pipeline.stages) - 1
        text.append(shown[: end - at].center(end - at - (0 if last else 1)), style=style)
        text.append("" if last else " ")
        at = end
    return text


def segment_label(stage: Stage) -> str:
    """Return a segment's label: blocks, TP degree or shares, format if not the job's, and marks.

    `R` is full and `r` selective recomputation, `z` is shared optimizer state.
    """
    marks = {"full": "R", "selective": "r"}.get(stage.recompute or "none", "")
    marks += "z" if stage.shard_optimizer else ""
    label = str(stage.num_layers)
    if stage.tp_shares:
        label += f" tp{'+'.join(map(str, stage.tp_shares))}"
    elif stage.tp_degree > 1:
        label += f" {'tp' if stage.spmd is None else 'spmd'}{stage.tp_degree}"
    if stage.compute is not None:
        label += f" {stage.compute}"
    return f"{label} {marks}" if marks else label


def colours_of(fleet: Fleet) -> dict[str, tuple[str, str]]:
    """Return (terminal colour, picture colour) by GPU type, in order of appearance in the fleet."""
    types = dict.fromkeys(node.node_type.gpu_type for node in fleet.nodes)
    return {gpu: COLOURS[i % len(COLOURS)] for i, gpu in enumerate(types)}


def _legend(plan: Plan, fleet: Fleet, colours: Mapping[str, tuple[str, str]]) -> Text:
    used = gpus_of(plan, fleet)
    have = Counter(fleet.gpu_type(worker) for worker in fleet.workers)
    text = Text("      ")
    for gpu, (colour, _) in colours.items():
        text.append("  ", style=f"on {colour}")
        text.append(f" {gpu} {used.get(gpu, 0)}/{have[gpu]}   ")
    return text


def shape_of(plan: Plan) -> str:
    """Return the number of pipelines and their depths, such as `4 x 1-3`."""
    depths = sorted({len(pipeline.stages) for pipeline in plan.pipelines})
    span = str(depths[0]) if len(depths) == 1 else f"{depths[0]}-{depths[-1]}"
    return f"{len(plan.pipelines)} x {span}"


def seconds(value: float) -> str:
    """Format seconds with four digits and a unit that suits."""
    if value < 0.1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.4g} s"


def money(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _short(workers: Sequence[str]) -> list[str]:
    return [*workers[:4], f"and {len(workers) - 4} more"] if len(workers) > 4 else list(workers)
