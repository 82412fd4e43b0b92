"""Display of a run: a live table on a terminal, plain lines elsewhere.

It reads the controller and changes nothing.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from autohet.control.planning.proposals import PlanProposal
from autohet.control.values.observation import Observation
from autohet.driver.events.event_log import failing_note
from autohet.driver.loop.controller import Controller
from autohet.runtime.process.terminal import PlainConsole, visible
from planner.inputs.documents import Json

LINE_PERIOD_S = 5.0
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
EMULATED = (
    "EMULATED GPUs: nodes are processes of this machine, paced to the speed of the types that they"
    " pose as"
)


class View:
    """Shows a run on standard error. Use as a context manager; call it after each tick."""

    def __init__(self, *, emulated: bool, console: Console | None = None) -> None:
        self.console = console or PlainConsole(stderr=True)
        self._emulated = emulated
        self._live: Live | None = None
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4, transient=True)
        self._line_at = 0.0
        self._line_news: tuple[object, ...] = ()

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, controller: Controller, seen: Observation) -> None:
        if self._live is not None:
            self._live.update(self._render(controller, seen))
            return
        # Nothing is printed while nothing changes, so that a log stays short in a long wait.
        now = time.monotonic()
        state = controller.state
        steps = controller.memory.ledger.committed_steps
        news = (steps, type(state), getattr(state, "reason", ""))
        if now - self._line_at >= LINE_PERIOD_S and news != self._line_news:
            self._line_at = now
            self._line_news = news
            line = status_line(controller.status(), seen)
            print(visible(line), file=sys.stderr, flush=True)

    def _render(self, controller: Controller, seen: Observation) -> RenderableType:
        status = controller.status()
        parts: list[RenderableType] = [Text(status_line(status, seen), style="bold")]
        memory = controller.memory
        if memory.proposal is not None:
            measured_s = memory.ledger.measured_step_s(memory.generation)
            parts.append(plan_table(memory.proposal, measured_s))
            parts += [Text(line) for line in utilisation_lines(status["gpu_types"])]
        if memory.ledger.changes:
            change = memory.ledger.changes[-1]
            moved = []
            for tier, num_bytes in change.bytes_by_tier().items():
                if num_bytes:
                    moved.append(f"{tier} {megabytes(num_bytes)}")
            parts.append(
                Text(
                    f"last change: {change.cause}; {change.steps_lost} steps lost;"
                    f" {', '.join(moved) or 'nothing moved'}; {change.stalled_s:.1f} s stalled,"
                    f" {change.redone_s:.1f} s of work done again"
                )
            )
        if self._emulated:
            parts.append(Text(EMULATED, style="dim"))
        return Group(*parts)


def status_line(status: Json, seen: Observation) -> str:
    """Return a line with step, loss, tokens per second, fleet and state."""
    num_by_type: Counter[str] = Counter()
    for view in seen.nodes.values():
        num_by_type.update([view.node.node_type.gpu_type] * len(view.workers))
    gpus = [f"{number} {gpu_type}" for gpu_type, number in sorted(num_by_type.items())]
    fleet = " + ".join(gpus) or "no GPUs"

    loss = "-" if status["loss"] is None else f"{status['loss']:.4f}"
    speed = "-" if not status["tokens_per_s"] else f"{status['tokens_per_s']:,.0f}"
    return (
        f"step {status['step']}/{status['steps'] or '?'}  loss {loss}{_optimizer_note(status)}"
        f"  {speed} tokens/s  {fleet}  {_doing(status)}{failing_note(status)}"
    )


def _doing(status: Json) -> str:
    state = str(status["state"])
    reason = str(status["reason"])
    if reason.startswith(state):
        return reason
    if reason:
        return f"{state} ({reason})"
    return state


def _optimizer_note(status: Json) -> str:
    """Return gradient norm, learning rate, data epoch and evaluation loss, where known."""
    formats = {
        "gradient_norm": "norm {:.3g}",
        "learning_rate": "lr {:.3g}",
        "epoch": "epoch {:.2f}",
    }
    known = [text.format(status[key]) for key, text in formats.items() if status[key] is not None]
    if status["evaluation_loss"] is not None:
        known.append(f"eval {status['evaluation_loss']:.4f} @{status['evaluation_step']}")
    return "".join(f"  {each}" for each in known)


def utilisation_lines(by_gpu_type: Mapping[str, Json]) -> list[str]:
    """Return a line for each GPU type with its measured and predicted utilisation."""
    lines = []
    for gpu_type, figures in by_gpu_type.items():
        parts = []
        if figures["mfu"] is not None:
            parts.append(f"MFU {figures['mfu']:.1%} (predicted {figures['predicted_mfu']:.1%})")
        if figures["peak_memory_bytes"] is not None:
            peak = figures["peak_memory_bytes"] / 2**30
            predicted = figures["predicted_memory_bytes"] / 2**30
            parts.append(f"peak memory {peak:.1f} GiB (predicted {predicted:.1f})")
        if parts:
            lines.append(f"{figures['gpus']} {gpu_type}: {', '.join(parts)}")
    return lines


def plan_table(proposal: PlanProposal, measured_s: float | None = None) -> Table:
    """Return a table of a plan's pipelines and stages: layers, GPUs, microbatches."""
    predicted = proposal.predicted_step_s
    measured = "" if measured_s is None else f", measured {measured_s:.3f} s"
    table = Table(
        title=f"predicted {predicted:.3f} s a step{measured}", title_justify="left", expand=False
    )
    for column in ("pipeline", "microbatches", "stages: layers on workers (GPU type)"):
        table.add_column(column)

    fleet = proposal.cost.fleet
    types = sorted({fleet.gpu_type(worker) for worker in proposal.plan.workers})
    colours = {gpu_type: COLOURS[index % len(COLOURS)] for index, gpu_type in enumerate(types)}

    for index, pipeline in enumerate(proposal.plan.pipelines):
        text = Text()
        for stage in pipeline.stages:
            gpu_type = fleet.gpu_type(stage.workers[0])
            last = stage.first_layer + stage.num_layers - 1
            workers = "+".join(stage.workers)
            label = f"[{stage.first_layer}-{last}] {workers} ({gpu_type})  "
            text.append(label, style=colours[gpu_type])
        table.add_row(str(index), pipeline.shape, text)
    return table


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
