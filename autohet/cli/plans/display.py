"""Terminal display of `autohet plan`: tables, and plans as bars.

A bar is one pipeline: a segment a stage, as wide as its blocks, coloured by GPU type.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autohet.runtime.process.terminal import PlainConsole
from planner.cost.parameters import OURS
from planner.inputs.documents import Json
from planner.inputs.fleet import Fleet
from planner.plans.plan import Pipeline, Plan, Stage

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


def show(document: Json, fleet: Fleet, console: Console | None = None) -> None:
    """Print one answer, the comparison of several, or a front; assumptions come last."""
    console = console or PlainConsole()
    alone = [document] if document.get("plan") else []
    results = document.get("results", alone)
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

    notes: list[str] = []
    for result in results:
        notes += result.get("notes", ())
    lines = []
    for result in results:
        for gpu, rate in result.get("rates", {}).items():
            lines.append(f"{gpu}, {rate['precision']}: {rate['basis']} ({rate['source']})")
    # Plans compared share types, in one order of appearance.
    notes += list(dict.fromkeys(lines))
    notes += _notes(results)
    notes += _assumption_lines(document)
    for note in notes:
        console.print(Text(note, style="dim"))
    _print_launch(console, document.get("launch"))
    _print_training(console, document.get("training"))


def _print_launch(console: Console, launch: Json | None) -> None:
    if launch is None:
        return
    workers = [f"{number} {name}" for name, number in launch["launched"].items()]
    launched = ", ".join(workers) or "no worker"
    cost = f"${launch['usd_per_hour']:.2f} an hour for all nodes with GPUs"
    console.print(Text(f"Ray launches {launched}: {cost}, by the known prices.", style="dim"))


ACTIVATION_MEMORY = {
    "counted": "Activation memory: counted on a traced block of transformers' modules.",
    "estimated": "Activation memory: estimated by a rule for all transformers, not by the modules.",
}


def _print_training(console: Console, training: Json | None) -> None:
    if training is None:
        return
    sentence = ACTIVATION_MEMORY.get(training["activation_memory"])
    if sentence is not None:
        console.print(Text(sentence, style="dim"))
    if not training["can_run"]:
        refusal = f"autohet train cannot run this model: {training['reason']}"
        console.print(Text(refusal, style="red"), soft_wrap=True)


def name_of(result: Json) -> str:
    """Return the strategy, or the file of a given plan."""
    return str(result.get("file", result["strategy"]))


def _print_result(console: Console, result: Json, fleet: Fleet) -> None:
    if result.get("plan"):
        _print_plan(console, result, fleet)
    if not result["feasible"]:
        what = "does not fit" if result.get("plan") else "no plan"
        reason = result.get("reason", "not feasible")
        console.print(Text(f"{what}: {reason}", style="red"), soft_wrap=True)
    for sentence in result.get("host_memory", {}).get("sentences", ()):
        console.print(Text(sentence, style="yellow"), soft_wrap=True)


def _print_answer(console: Console, document: Json, fleet: Fleet) -> None:
    _print_result(console, document, fleet)
    if not document.get("plan"):
        return
    for line in _facts(document):
        console.print(Text(line))
    for item in document.get("idle", ()):
        workers = ", ".join(_short(item["workers"]))
        console.print(Text(f"idle: {workers}: {item['why']}", style="dim"))
    if document.get("front"):
        console.print(front_table(document["front"], fleet))


def _notes(results: Sequence[Json]) -> list[str]:
    """Return notes on block times that were not measured, so that no guess looks like one."""
    estimated: list[str] = []
    for result in results:
        if result.get("predicted"):
            estimated += result["predicted"].get("estimated", ())
    found = list(dict.fromkeys(estimated))

    # Times of blocks are most of a step; what else is estimated is only counted.
    blocks = [note for note in found if note.startswith("block")]
    shown = [f"not measured: {note}" for note in blocks[:MOST_NOTES]]
    hidden = len(found) - len(shown)
    if shown and hidden:
        shown.append(f"{hidden} more estimates are listed under predicted.estimated of --json")
    return shown


def _assumption_lines(document: Json) -> list[str]:
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
        moved = [
            f"{name} {value['default']:.3g} -> {value['fitted']:.3g}"
            for name, value in found["parameters"].items()
        ]
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


def comparison_table(results: Sequence[Json], width: int = 120) -> Table:
    """Table with one row for each strategy; the ratio is to the best step time.

    A narrow terminal gets fewer columns.
    """
    times = [result["predicted"]["step_time_s"] for result in results if result["feasible"]]
    # Without a feasible plan no ratio is shown.
    best = min(times, default=1.0)
    table = _table("Plans compared, costed by one model")
    names = [name for name, least_width in _COLUMNS if least_width <= width]
    for name in names:
        justify: Literal["left", "right"] = "left" if name in ("strategy", "plan") else "right"
        table.add_column(name, justify=justify, no_wrap=True)

    for result in results:
        if result.get("predicted"):
            predicted = result["predicted"]
            plan = Plan.from_document(result["plan"])
            search = result.get("search") or {}
            gap = search.get("gap")
            searched_s = search.get("seconds")
            cells: dict[str, Text | str] = {
                "strategy": Path(name_of(result)).name,
                "step": seconds(predicted["step_time_s"]),
                "ratio": _ratio(result, best),
                "tok/s": f"{predicted['tokens_per_s']:,.0f}",
                "$/h": money(predicted["usd_per_hour"]),
                "$/Mtok": money(predicted["usd_per_million_tokens"], 3),
                "plan": shape_of(plan),
                "GPUs": str(len(plan.workers)),
                "gap": "" if gap is None else f"{gap:.1%}",
                "search": "" if searched_s is None else seconds(searched_s),
            }
            table.add_row(*[cells[name] for name in names])
        else:
            table.add_row(Path(name_of(result)).name, Text("no plan", style="red"))
    return table


def _ratio(result: Json, best: float) -> Text:
    if not result["feasible"]:
        return Text("no fit", style="red")
    ratio = result["predicted"]["step_time_s"] / best
    # The best plan's ratio is 1, but for rounding.
    is_best = ratio < 1 + 1e-9
    return Text(f"{ratio:.3f}", style="bold green" if is_best else "")


def front_table(front: Sequence[Json], fleet: Fleet) -> Table:
    """Return the Pareto front as a table, fastest first."""
    table = _table("Pareto front: no other plan found is both faster and cheaper")
    for name in ("step", "tok/s", "$/h", "$/Mtok", "GPUs in use", "plan", "TP"):
        table.add_column(name, justify="right" if name != "GPUs in use" else "left")
    for member in front:
        plan = Plan.from_document(member["plan"])
        predicted = member["predicted"]
        num_by_gpu = gpus_of(plan, fleet)
        degrees: set[int] = set()
        for pipeline in plan.pipelines:
            degrees.update(stage.tp_degree for stage in pipeline.stages)
        table.add_row(
            seconds(predicted["step_time_s"]),
            f"{predicted['tokens_per_s']:,.0f}",
            money(predicted["usd_per_hour"]),
            money(predicted["usd_per_million_tokens"], 3),
            ", ".join(f"{number} {gpu}" for gpu, number in num_by_gpu.items()),
            shape_of(plan),
            _join("/", sorted(degrees)),
        )
    return table


def gpus_of(plan: Plan, fleet: Fleet) -> dict[str, int]:
    """Count GPUs in use by type."""
    numbers = Counter(fleet.gpu_type(worker) for worker in plan.workers)
    return dict(sorted(numbers.items()))


def _join(mark: str, numbers: Iterable[int]) -> str:
    return mark.join(map(str, numbers))


def _facts(document: Json) -> list[str]:
    """Return lines on speed and price, the parts of a step, and the bound on any better plan."""
    predicted = document["predicted"]
    search = document.get("search") or {}
    line = f"step {seconds(predicted['step_time_s'])}, {predicted['tokens_per_s']:,.0f} tokens/s"
    if predicted.get("usd_per_hour") is not None:
        line += (
            f", {predicted['usd_per_hour']:.2f} $/h, {predicted['usd_per_million_tokens']:.3f} $/M"
            " tokens"
        )

    pieces = []
    for name, part_s in predicted["breakdown_s"].items():
        # Parts that the plan does not have are zero, or rounding.
        if part_s > 1e-6:
            pieces.append(f"{name.replace('_', ' ')} {seconds(part_s)}")
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
    lines += document.get("explanation", {}).get("sentences", ())
    return lines


def _print_plan(console: Console, document: Json, fleet: Fleet) -> None:
    plan = Plan.from_document(document["plan"])
    colours = colours_of(fleet)
    kinds = group_pipelines(plan, fleet)
    num_layers = plan.pipelines[0].stages[-1].end_layer if plan.pipelines else 1
    # Room for a label in each segment, and 30 columns for what stands beside a bar.
    wanted_width = max(num_layers * 4, 48)
    width = max(20, min(console.width - 30, wanted_width))
    for count, pipeline in kinds[:MOST_BARS]:
        text = Text(f"{count:>3} x ")
        text.append_text(bar(pipeline, fleet, width, colours))
        text.append(f"  {pipeline.shape} seq")
        console.print(text, no_wrap=True, overflow="crop")
        for line in stage_lines(pipeline, fleet):
            console.print(Text(f"      {line}", style="dim"), soft_wrap=True)

    if plan.spmd is not None:
        names = ", ".join(_short(plan.workers))
        for axis, units in plan.spmd.units:
            console.print(Text(f"      {axis}: {_join('/', units)} on {names}", style="dim"))
    for entry in document.get("program", ()):
        instructions = "; ".join(entry["instructions"])
        line = f"      {entry['tensor']} {entry['shape']}: {instructions}"
        console.print(Text(line), soft_wrap=True)

    hidden = len(kinds) - MOST_BARS
    if hidden > 0:
        console.print(Text(f"    and {hidden} more kinds of pipeline", style="dim"))
    used = gpus_of(plan, fleet)
    have = Counter(fleet.gpu_type(worker) for worker in fleet.workers)
    text = Text("      ")
    for gpu, (colour, _) in colours.items():
        text.append("  ", style=f"on {colour}")
        text.append(f" {gpu} {used.get(gpu, 0)}/{have[gpu]}   ")
    console.print(text)


def group_pipelines(plan: Plan, fleet: Fleet) -> list[tuple[int, Pipeline]]:
    """Count pipelines that look the same together, in plan order."""
    numbers: Counter[Hashable] = Counter()
    first_by_look: dict[Hashable, Pipeline] = {}
    for pipeline in plan.pipelines:
        stages = []
        for stage in pipeline.stages:
            gpu_type = fleet.gpu_type(stage.workers[0])
            size = (stage.num_layers, stage.tp_shares or stage.tp_degree, gpu_type)
            measures = (
                stage.recompute,
                stage.shard_optimizer,
                stage.compute,
                stage.expert_dispatch,
            )
            stages.append((size, measures))
        look = tuple(stages), pipeline.shape
        numbers[look] += 1
        first_by_look.setdefault(look, pipeline)
    return [(numbers[look], pipeline) for look, pipeline in first_by_look.items()]


def stage_lines(pipeline: Pipeline, fleet: Fleet) -> list[str]:
    """Describe a bar's colours and marks in words; count equal neighbours together."""
    lines = []
    words = [stage_words(stage, fleet) for stage in pipeline.stages]
    for line, equal in itertools.groupby(words):
        count = len(list(equal))
        if count > 1:
            line = f"{count} x {line}"
        lines.append(line)
    return lines


def stage_words(stage: Stage, fleet: Fleet) -> str:
    """Describe one stage: blocks, GPUs, TP degree, and its measures to save memory."""
    noun = "block" if stage.num_layers == 1 else "blocks"
    parts = [f"{stage.num_layers} {noun} on {fleet.gpu_type(stage.workers[0])}"]
    if stage.tp_shares:
        parts.append(f"TP {_join('+', stage.tp_shares)}")
    elif stage.tp_degree > 1:
        kind = "TP" if stage.spmd is None else "one program on"
        parts.append(f"{kind} {stage.tp_degree}")
    if stage.compute is not None:
        parts.append(f"computes in {stage.compute}")
    if stage.expert_dispatch == "all_to_all":
        parts.append("tokens to experts by all-to-all")
    if stage.recompute == "offload":
        parts.append("full recomputation from inputs in host memory")
    elif stage.recompute not in (None, "none"):
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
        room = end - at
        label = segment_label(stage)
        if len(label) >= room:
            label = str(stage.num_layers)
        label = label[:room]

        colour, _ = colours[fleet.gpu_type(stage.workers[0])]
        style = f"bold black on {colour}"
        if number == len(pipeline.stages) - 1:
            text.append(label.center(room), style=style)
        else:
            # The last column is a gap, so that one sees where stages of one colour meet.
            text.append(label.center(room - 1), style=style)
            text.append(" ")
        at = end
    return text


def segment_label(stage: Stage) -> str:
    """Return a segment's label: blocks, TP degree or shares, format if not the job's, and marks.

    `R` is full and `r` selective recomputation, `o` full from inputs in host memory, `z` is shared
    optimizer state.
    """
    marks = {"full": "R", "selective": "r", "offload": "o"}.get(stage.recompute or "none", "")
    marks += "z" if stage.shard_optimizer else ""
    label = str(stage.num_layers)
    if stage.tp_shares:
        label += f" tp{_join('+', stage.tp_shares)}"
    elif stage.tp_degree > 1:
        kind = "tp" if stage.spmd is None else "spmd"
        label += f" {kind}{stage.tp_degree}"
    if stage.compute is not None:
        label += f" {stage.compute}"
    if marks:
        label += f" {marks}"
    return label


def colours_of(fleet: Fleet) -> dict[str, tuple[str, str]]:
    """Return (terminal colour, picture colour) by GPU type, in order of appearance in the fleet."""
    return {gpu: COLOURS[index % len(COLOURS)] for index, gpu in enumerate(fleet.gpu_types)}


def shape_of(plan: Plan) -> str:
    """Return the number of pipelines and their depths, such as `4 x 1-3`."""
    depths = sorted({len(pipeline.stages) for pipeline in plan.pipelines})
    span = str(depths[0])
    if len(depths) > 1:
        span += f"-{depths[-1]}"
    return f"{len(plan.pipelines)} x {span}"


def seconds(value: float) -> str:
    """Format seconds with four digits and a unit that suits."""
    if value < 0.1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.4g} s"


def money(value: float | None, digits: int = 2) -> str:
    """Format dollars; empty if the price is not known."""
    if value is None:
        return ""
    return f"{value:.{digits}f}"


def _short(workers: Sequence[str]) -> list[str]:
    if len(workers) <= 4:
        return list(workers)
    return [*workers[:4], f"and {len(workers) - 4} more"]
