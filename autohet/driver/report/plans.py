"""Pictures of a run's plans as inline SVG: who holds which layers in each generation."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from autohet.driver.report.chart import COLORS
from autohet.driver.report.events import Event, of_kind
from planner.inputs.fleet import node_of
from planner.plans.plan import Pipeline, Plan, Stage

WIDTH = 980
LEFT = 110
BAR = 26
GAP = 6
MOST_PLANS = 24
MOST_PIPELINES = 16
PIXELS_PER_LETTER = 6.5
Held = Mapping[str, tuple[int, int]]
"""First layer and end layer of each worker."""


def plan_pictures(events: Sequence[Event], begin: float) -> str:
    """Return a picture of each generation's plan, the newest open; empty without a plan.

    A stage with a border holds layers on some worker that the worker did not hold before.
    """
    types = {event["node"]: event.get("gpu_type") or "?" for event in of_kind(events, "arrival")}
    names = sorted({*types.values()})
    colors = {name: COLORS[index % len(COLORS)] for index, name in enumerate(names)}
    color_by_node = {node: colors[name] for node, name in types.items()}

    moved = {event["generation"]: event for event in of_kind(events, "reconfigure")}
    held: Held = {}
    parts = []
    for event in of_kind(events, "plan"):
        if "plan" not in event:
            continue
        plan = Plan.from_document(event["plan"])
        title = _title(event, plan, moved.get(event["generation"]), begin)
        parts.append((title, _picture(plan, held, color_by_node)))
        held = {}
        for pipeline in plan.pipelines:
            for stage in pipeline.stages:
                for worker in stage.workers:
                    held[worker] = (stage.first_layer, stage.end_layer)
    legend = ""
    for name in names:
        legend += f"<span style='color:{colors[name]}'>■ {escape(name)}</span> "
    shown = parts[-MOST_PLANS:]
    found = []
    for number, (title, picture) in enumerate(shown, 1):
        is_newest = " open" if number == len(shown) else ""
        found.append(f"<details{is_newest}><summary>{escape(title)}</summary>{picture}</details>")
    if len(parts) > len(shown):
        found.insert(0, f"<p>{len(parts) - len(shown)} earlier plans are in events.jsonl.</p>")
    return f"<p>{legend}</p>{''.join(found)}" if found else ""


def _title(event: Event, plan: Plan, change: Event | None, begin: float) -> str:
    seconds = event["time"] - begin
    words = [
        f"generation {event['generation']}, {seconds:,.1f} s: {len(plan.workers)} GPUs,"
        f" {event['predicted_step_s']:.3g} s a step predicted; {event.get('cause', 'start')}"
    ]
    if change is not None:
        tiers = change["bytes_by_tier"].items()
        moved = [f"{tier} {count / 1e6:,.1f} MB" for tier, count in tiers if count]
        words.append(f"moved: {', '.join(moved) or 'nothing'}")
    return "; ".join(words)


def _picture(plan: Plan, held: Held, color_by_node: Mapping[str, str]) -> str:
    """Return the plan's pipelines below one another, each as a bar of its stages."""
    if not plan.pipelines:
        return ""
    num_layers = plan.pipelines[0].stages[-1].end_layer
    shown = plan.pipelines[:MOST_PIPELINES]
    parts: list[str] = []
    for row, pipeline in enumerate(shown):
        top = row * (BAR + GAP)
        size = f"{pipeline.shape} seq".replace(" x ", " × ")
        parts.append(f"<text x={LEFT - 8} y={top + 17} text-anchor=end>{size}</text>")
        for stage in pipeline.stages:
            parts += _stage(pipeline, stage, num_layers, top, held, color_by_node)
    height = len(shown) * (BAR + GAP)
    if len(plan.pipelines) > len(shown):
        height += 16
        more = len(plan.pipelines) - len(shown)
        parts.append(f"<text x={LEFT} y={height - 4}>and {more} more pipelines</text>")
    return f"<svg viewBox='0 0 {WIDTH} {height}' role=img>{''.join(parts)}</svg>"


def _stage(
    pipeline: Pipeline,
    stage: Stage,
    num_layers: int,
    top: int,
    held: Held,
    color_by_node: Mapping[str, str],
) -> Iterator[str]:
    """Yield a stage's rectangle, as wide as its layers, and the label that fits into it."""
    scale = (WIDTH - LEFT) / num_layers
    left = LEFT + stage.first_layer * scale
    # A stage without layers has the embedding or the head alone.
    width = max(stage.num_layers * scale, 3.0) - 1
    color = color_by_node.get(node_of(stage.workers[0]), "#888888")
    layers = (stage.first_layer, stage.end_layer)
    is_new = any(held.get(worker) != layers for worker in stage.workers)
    border = "#222" if held and is_new else "none"
    indices: dict[str, list[str]] = {}
    for worker in stage.workers:
        indices.setdefault(node_of(worker), []).append(worker.rpartition("/")[2])
    words = [f"{node}/{','.join(gpus)}" for node, gpus in indices.items()]
    if stage.tp_shares:
        words.append(f"TP {'+'.join(str(share) for share in stage.tp_shares)}")
    whole = " ".join(words)
    title = f"layers {stage.first_layer} to {stage.end_layer - 1} on {whole}"
    yield (
        f"<rect x={left:.1f} y={top} width={width:.1f} height={BAR} fill='{color}'"
        f" fill-opacity=.35 stroke='{border}' stroke-width=2><title>{escape(title)}</title></rect>"
    )
    label = f"{stage.num_layers} · {whole}"
    if len(label) * PIXELS_PER_LETTER > width:
        label = str(stage.num_layers)
    yield f"<text x={left + 4:.1f} y={top + 17}>{escape(label)}</text>"
