"""Cost of instructions: seconds, as terms linear in the devices' shares, and bytes of each device.

A term is the time of the slowest device: instructions follow each other on all devices, as in HAP
(section 4). Padded collectives send parts as large as the largest one. A bandwidth is that of a
whole tensor: its bytes over the seconds of the collective on even parts.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.errors import ConfigError
from planner.spmd.graph import Graph, GraphNode
from planner.spmd.layouts import SILENT, dual_of
from planner.spmd.program import Instruction, Program
from planner.spmd.rules import axis_of

Floats = NDArray[np.float64]
STATE_BYTES = 16.0
"""Bytes of a trained scalar in fp32: weight, gradient and AdamW's two moments."""


@dataclass(frozen=True, slots=True)
class Device:
    """Device with its rates and limits.

    flops_per_s: rate reached in matrix products. memory_bytes_per_s: rate of other operators.
    launch_s: seconds to launch one operator, forward and backward.
    """

    name: str
    flops_per_s: float
    memory_bytes: float = float("inf")
    memory_bytes_per_s: float = float("inf")
    launch_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Collective:
    """Collective of a whole tensor in even parts: it takes latency + bytes / bandwidth."""

    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class SpmdCluster:
    """Devices in order of ranks and what the collectives over all of them take.

    ConfigError where one is not measured.
    """

    devices: tuple[Device, ...]
    collectives: Mapping[str, Collective]

    def __post_init__(self) -> None:
        names = {
            "all_gather_padded",
            "all_gather_grouped",
            "reduce_scatter_padded",
            "reduce_scatter_grouped",
            "all_reduce",
            "all_to_all",
        }
        if missing := names - set(self.collectives):
            raise ConfigError(
                f"collectives without a bandwidth: {', '.join(sorted(missing))}; measure or"
                " estimate them, none is free"
            )


GROUPED_SHARE = 0.67
"""Bandwidth of grouped over padded collectives on even parts: 0.55 / 0.82 GB/s, as HAP's authors
measured on V100 and P100.
"""


def ring_collectives(
    num_devices: int, link_bytes_per_s: float, latency_s: float
) -> dict[str, Collective]:
    """Return the collectives of a ring (Patarasu and Yuan 2009).

    link_bytes_per_s: bandwidth of its slowest link. latency_s: seconds of one message.
    """
    n = num_devices
    gather = link_bytes_per_s * n / max(n - 1, 1)
    wait_s = latency_s * float(np.ceil(np.log2(max(n, 2))))
    grouped = Collective(gather * GROUPED_SHARE, latency_s * max(n - 1, 1))
    return {
        "all_gather_padded": Collective(gather, wait_s),
        "all_gather_grouped": grouped,
        "reduce_scatter_padded": Collective(gather, wait_s),
        "reduce_scatter_grouped": grouped,
        "all_reduce": Collective(gather / 2, 2 * wait_s),
        "all_to_all": Collective(gather * n, wait_s),
    }


@dataclass(frozen=True, slots=True)
class Work:
    """Cost term of compute: seconds of the slowest device.

    The device has the launches, and the whole work (axis None) or its share along an axis.
    """

    axis: str | None
    flops: float
    traffic: float = 0.0
    launches: float = 1.0


@dataclass(frozen=True, slots=True)
class Wire:
    """Cost term of communication: constant_s, and scaled_s times the largest share.

    The share is the largest along any of the axes (for even parts 1 / devices).
    """

    constant_s: float
    scaled_s: float = 0.0
    axes: tuple[str, ...] = ()


Term = Work | Wire


class Shares:
    """Share of each axis that each device takes.

    Shares are ratios by segment, rounded to the axis' units unless `whole` is False. With one
    segment, every axis has the same ratios. With two, axes of the data (0) and of parameters (1)
    have their own.
    """

    def __init__(
        self, graph: Graph, ratios: tuple[tuple[float, ...], ...], whole: bool = True
    ) -> None:
        self.ratios = ratios
        self.whole = whole
        self._axes = {axis.name: axis for axis in graph.axes.values()}
        self._of: dict[tuple[int, int], Floats] = {}
        self._lengths: dict[tuple[int, int], tuple[int, ...]] = {}

    def segment(self, axis: str) -> int:
        return 0 if len(self.ratios) == 1 or self._axes[axis].is_batch else 1

    def lengths(self, axis: str) -> tuple[int, ...]:
        """Units of each device; they sum to the axis' units."""
        key = self.key(axis)
        if key not in self._lengths:
            self._lengths[key] = round_to_units(self.ratios[key[0]], key[1])
        return self._lengths[key]

    def of(self, axis: str) -> Floats:
        """Share of each device."""
        key = self.key(axis)
        if key not in self._of:
            self._of[key] = (
                np.array(self.lengths(axis)) / key[1]
                if self.whole
                else np.array(self.ratios[key[0]])
            )
        return self._of[key]

    def key(self, axis: str) -> tuple[int, int]:
        """Segment and units: what the shares of an axis depend on."""
        return self.segment(axis), self._axes[axis].units


def round_to_units(ratios: Iterable[float], units: int) -> tuple[int, ...]:
    """Whole units in these ratios: the floors, and one more to the largest deficits (the first of
    equals).
    """
    exact = np.asarray(tuple(ratios), dtype=np.float64)
    exact = exact / exact.sum() * units
    floors = np.floor(exact + 1e-9).astype(int)
    order = sorted(range(len(floors)), key=lambda j: (-(exact[j] - floors[j]), j))
    for j in order[: units - int(floors.sum())]:
        floors[j] += 1
    return tuple(int(length) for length in floors)


class CostTable:
    """Terms and bytes of a graph's instructions on a cluster.

    passes: number of times that a step runs the program, each on one microbatch. Gradients are
    summed after the last.
    """

    def __init__(
        self, graph: Graph, cluster: SpmdCluster, state_bytes: float = STATE_BYTES, passes: int = 1
    ) -> None:
        self.graph = graph
        self.cluster = cluster
        self.state_bytes = state_bytes
        self.passes = passes
        self.num_devices = len(cluster.devices)
        self.speeds = np.array([device.flops_per_s for device in cluster.devices])
        self._traffic = np.array([device.memory_bytes_per_s for device in cluster.devices])
        self._launch = np.array([device.launch_s for device in cluster.devices])
        self.limits = np.array([device.memory_bytes for device in cluster.devices])
        self._seconds: dict[tuple[object, ...], float] = {}
        self._of: Shares | None = None
        self._counted: tuple[Program, Counter[Term]] | None = None

    def terms(self, instruction: Instruction) -> tuple[Term, ...]:
        """Return the cost terms of one execution of an instruction and its gradient dual."""
        node = self.graph.by_name[instruction.tensor]
        if instruction.op == "load":
            if (
                node.kind == "parameter"
                and node.needs_gradient
                and instruction.output.kind == "replicated"
            ):
                return (self._wire("all_reduce", node, (), latency=False),)
            return ()
        return (
            self._compute(node, instruction)
            if instruction.op == "compute"
            else self._conversion(node, instruction)
        )

    def times(self, instruction: Instruction) -> int:
        """Count how often a step pays for an instruction: once per pass.

        A leaf is paid for once per step: its terms are the sum of its gradient.
        """
        return 1 if instruction.op == "load" else self.passes

    def final_terms(self, program: Program) -> tuple[Term, ...]:
        """Replicated parameters' gradients are summed in one all-reduce: its latency, once."""
        summed = any(self.terms(i) for i in program.instructions if i.op == "load")
        return (
            (Wire(self.cluster.collectives["all_reduce"].latency_s),)
            if summed and self.num_devices > 1
            else ()
        )

    def _compute(self, node: GraphNode, instruction: Instruction) -> tuple[Term, ...]:
        axis = axis_of(self.graph, node, instruction.letter) if instruction.letter else None
        inputs = [self.graph.by_name[name] for name in node.inputs]
        passes = 3.0 if node.needs_gradient else 1.0
        traffic = (
            0.0
            if node.is_alias
            else passes
            * (node.num_bytes + sum(i.num_bytes for i in inputs if i.kind != "parameter"))
        )
        launches = 0.0 if node.is_alias else 1.0
        backward = node.backward_flops if node.needs_gradient else 0.0
        found: list[Term] = []
        if any(layout.kind == "factored" for _, layout in instruction.inputs):
            found += [
                Work(None, backward / 2, 0.0, 0.0),
                *(self._wire("all_gather_padded", n, (axis,)) for n in (inputs[0], node)),
            ]
            backward /= 2
        found.append(Work(axis, node.flops + backward, traffic, launches))
        if (
            instruction.letter
            and node.signature is not None
            and (size := node.signature.reduced_bytes.get(instruction.letter))
        ):
            collective = self.cluster.collectives["all_reduce"]
            found.append(
                Wire(
                    2 * collective.latency_s + size / collective.bytes_per_s
                    if self.num_devices > 1
                    else 0.0
                )
            )
        return tuple(found)

    def _conversion(self, node: GraphNode, instruction: Instruction) -> tuple[Term, ...]:
        if instruction.op in SILENT:
            return ()
        ((_, source),) = instruction.inputs
        target = instruction.output
        axes = []
        for layout in (source, target):
            if layout.kind == "sharded":
                axes.append(self.graph.axes[node.name, layout.dim].name)
        sent = (instruction.op, *([dual_of(source, target)] if node.needs_gradient else []))
        suffix = f"_{instruction.variant}" if instruction.variant else ""
        return tuple(self._wire(f"{name}{suffix}", node, tuple(axes)) for name in sent)

    def _wire(
        self, name: str, node: GraphNode, axes: tuple[str | None, ...], latency: bool = True
    ) -> Wire:
        if self.num_devices == 1:
            return Wire(0.0)
        collective = self.cluster.collectives[name]
        whole_s = node.num_bytes / collective.bytes_per_s
        wait_s = collective.latency_s if latency else 0.0
        if name == "all_reduce" or name.endswith("grouped"):
            return Wire(wait_s + whole_s)
        return Wire(
            wait_s, whole_s * self.num_devices, tuple(axis for axis in axes if axis is not None)
        )

    def seconds(self, terms: Iterable[Term], shares: Shares) -> float:
        """The sum over the terms."""
        if shares is not self._of:
            self._of = shares
            self._seconds = {}
        return sum(self._term_s(term, shares) for term in terms)

    def _term_s(self, term: Term, shares: Shares) -> float:
        if isinstance(term, Wire):
            if not term.axes:
                return term.constant_s
            return term.constant_s + term.scaled_s * max(
                float(shares.of(axis).max()) for axis in term.axes
            )
        key = (term.axis and shares.key(term.axis), term.flops, term.traffic, term.launches)
        if key not in self._seconds:
            self._seconds[key] = float(self.work_s(term, shares).max())
        return self._seconds[key]

    def work_s(self, term: Work, shares: Shares) -> Floats:
        """Return the seconds of each device, for its share of the work."""
        fixed, whole = self.line(term)
        return fixed + (whole if term.axis is None else shares.of(term.axis) * whole)

    def line(self, term: Work) -> tuple[Floats, Floats]:
        """Return the fixed seconds of each device, and its seconds for the whole work."""
        return term.launches * self._launch, term.flops / self.speeds + term.traffic / self._traffic

    def program_s(self, program: Program, shares: Shares) -> float:
        """Seconds of a whole step."""
        return sum(
            count * self.seconds((term,), shares) for term, count in self.counted(program).items()
        )

    def counted(self, program: Program) -> Counter[Term]:
        """The terms of a whole step and how often each occurs: equal layers have equal terms."""
        if self._counted is None or self._counted[0] is not program:
            terms = Counter(self.final_terms(program))
            for instruction in program.instructions:
                for term in self.terms(instruction):
                    terms[term] += self.times(instruction)
            self._counted = program, terms
        return self._counted[1]

    @property
    def least_bytes(self) -> float:
        """Minimum bytes that all devices hold together in any program: every byte once."""
        nodes = [node for node in self.graph.nodes if node.kind == "op" and not node.is_alias]
        kept = sum(node.num_bytes for node in nodes if node.needs_gradient)
        return kept + sum(
            node.num_bytes / node.item_bytes * self.state_bytes for node in self.graph.parameters
        )

    def bytes_of(self, instruction: Instruction) -> tuple[str | None, float]:
        """Return the axis and bytes that an instruction keeps on the devices for the step.

        The bytes are those of the whole tensor. A device holds its share along the axis; it holds
        the whole if the axis is None.
        """
        node = self.graph.by_name[instruction.tensor]
        if instruction.op == "load":
            values = node.num_bytes / node.item_bytes
            size = values * self.state_bytes if node.kind == "parameter" else float(node.num_bytes)
        else:
            aliased = instruction.op == "compute" and node.is_alias
            size = float(node.num_bytes) if node.needs_gradient and not aliased else 0.0
        layout = instruction.output
        return (
            self.graph.axes[node.name, layout.dim].name if layout.kind == "sharded" else None
        ), size

    def program_bytes(self, program: Program, shares: Shares) -> Floats:
        """Return the bytes of each device: training state and what forward keeps for backward."""
        total = np.zeros(self.num_devices)
        for instruction in program.instructions:
            axis, size = self.bytes_of(instruction)
            total += size if axis is None else size * shares.of(axis)
        return total
