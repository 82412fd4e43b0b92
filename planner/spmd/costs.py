"""Cost of instructions: seconds, as terms linear in the devices' shares, and bytes of each device.

A term is the time of the slowest device: instructions follow each other on all devices, as in HAP
(section 4). Padded collectives send parts as large as the largest one. A bandwidth is that of a
whole tensor: its bytes over the seconds of the collective on even parts.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from planner.arrays import Floats
from planner.errors import ConfigError
from planner.spmd.graph import Graph, GraphNode
from planner.spmd.layouts import FACTORED, SILENT, dual_of
from planner.spmd.program import Instruction, Program
from planner.spmd.rules import axis_of

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
        missing = names - set(self.collectives)
        if missing:
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
    # each device sends all parts but its own
    num_sent = max(n - 1, 1)
    gather = link_bytes_per_s * n / num_sent
    num_rounds = float(np.ceil(np.log2(max(n, 2))))
    wait_s = latency_s * num_rounds

    padded = Collective(gather, wait_s)
    # one broadcast (or reduction) for each device's part, each with its own message
    grouped = Collective(gather * GROUPED_SHARE, latency_s * num_sent)
    return {
        "all_gather_padded": padded,
        "all_gather_grouped": grouped,
        "reduce_scatter_padded": padded,
        "reduce_scatter_grouped": grouped,
        # a reduce-scatter, then an all-gather
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
        """Return the segment of an axis: the row of ratios that cuts it."""
        if len(self.ratios) == 1 or self._axes[axis].is_batch:
            return 0
        return 1

    def lengths(self, axis: str) -> tuple[int, ...]:
        """Units of each device; they sum to the axis' units."""
        key = self.key(axis)
        if key not in self._lengths:
            segment, units = key
            self._lengths[key] = round_to_units(self.ratios[segment], units)
        return self._lengths[key]

    def of(self, axis: str) -> Floats:
        """Share of each device."""
        key = self.key(axis)
        if key not in self._of:
            segment, units = key
            if self.whole:
                self._of[key] = np.array(self.lengths(axis)) / units
            else:
                self._of[key] = np.array(self.ratios[segment])
        return self._of[key]

    def key(self, axis: str) -> tuple[int, int]:
        """Segment and units: what the shares of an axis depend on."""
        return self.segment(axis), self._axes[axis].units


def round_to_units(ratios: Iterable[float], units: int) -> tuple[int, ...]:
    """Return whole units in these ratios.

    They are the floors, and one more for the largest deficits (the first of equals).
    """
    exact = np.asarray(tuple(ratios), dtype=np.float64)
    exact = exact / exact.sum() * units
    # a ratio that is a whole number of units but for rounding must not lose one
    floors = np.floor(exact + 1e-9).astype(int)
    deficits = exact - floors
    # a stable sort, so that the first of equal deficits comes first
    largest_deficits = np.argsort(-deficits, kind="stable")
    num_left = units - int(floors.sum())
    for index in largest_deficits[:num_left]:
        floors[index] += 1
    return tuple(floors.tolist())


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
        self.speeds = np.zeros(self.num_devices)
        self._traffic = np.zeros(self.num_devices)
        self._launch = np.zeros(self.num_devices)
        self.limits = np.zeros(self.num_devices)
        for rank, device in enumerate(cluster.devices):
            self.speeds[rank] = device.flops_per_s
            self._traffic[rank] = device.memory_bytes_per_s
            self._launch[rank] = device.launch_s
            self.limits[rank] = device.memory_bytes
        # `seconds` of work under the shares `_of`, and `term_counts` of the program last asked for:
        # searches ask again and again for the same
        self._seconds: dict[tuple[object, ...], float] = {}
        self._of: Shares | None = None
        self._counted: tuple[Program, Counter[Term]] | None = None

    def terms(self, instruction: Instruction) -> tuple[Term, ...]:
        """Return the cost terms of one execution of an instruction and its gradient dual."""
        node = self.graph.by_name[instruction.tensor]
        if instruction.op == "compute":
            return self._compute(node, instruction)
        if instruction.op != "load":
            return self._conversion(node, instruction)
        is_trained = node.kind == "parameter" and node.needs_gradient
        if is_trained and instruction.output.kind == "replicated":
            # all such gradients are summed at once: `final_terms` has the latency
            return (self._wire("all_reduce", node, (), latency=False),)
        return ()

    def times(self, instruction: Instruction) -> int:
        """Count how often a step pays for an instruction: once per pass.

        A leaf is paid for once per step: its terms are the sum of its gradient.
        """
        return 1 if instruction.op == "load" else self.passes

    def final_terms(self, program: Program) -> tuple[Term, ...]:
        """Return the latency of the one all-reduce that sums replicated parameters' gradients."""
        sums_gradients = any(self.terms(load) for load in program.loads)
        if not sums_gradients or self.num_devices == 1:
            return ()
        return (Wire(self.cluster.collectives["all_reduce"].latency_s),)

    def _compute(self, node: GraphNode, instruction: Instruction) -> tuple[Term, ...]:
        axis = None
        if instruction.letter:
            axis = axis_of(self.graph, node, instruction.letter)
        launches = 0.0 if node.is_alias else 1.0
        backward = node.backward_flops if node.needs_gradient else 0.0

        found: list[Term] = []
        if FACTORED in instruction.input_layouts:
            # Half of the backward is the weight's gradient: every rank computes all of it, from
            # the gathered input and output gradient.
            backward /= 2
            found.append(Work(None, backward, 0.0, 0.0))
            activations = self.graph.by_name[node.inputs[0]]
            found.append(self._wire("all_gather_padded", activations, (axis,)))
            found.append(self._wire("all_gather_padded", node, (axis,)))
        found.append(Work(axis, node.flops + backward, self._traffic_of(node), launches))

        reduced_bytes = 0.0
        if instruction.letter and node.signature is not None:
            reduced_bytes = node.signature.reduced_bytes.get(instruction.letter, 0.0)
        if reduced_bytes:
            seconds = 0.0
            if self.num_devices > 1:
                collective = self.cluster.collectives["all_reduce"]
                seconds = 2 * collective.latency_s + reduced_bytes / collective.bytes_per_s
            found.append(Wire(seconds))
        return tuple(found)

    def _traffic_of(self, node: GraphNode) -> float:
        """Return the bytes of activations that an operator reads and writes, with its backward."""
        if node.is_alias:
            return 0.0
        activation_bytes = node.num_bytes
        for name in node.inputs:
            source = self.graph.by_name[name]
            if source.kind != "parameter":
                activation_bytes += source.num_bytes
        # backward reads and writes twice what forward does
        passes = 3.0 if node.needs_gradient else 1.0
        return passes * activation_bytes

    def _conversion(self, node: GraphNode, instruction: Instruction) -> tuple[Term, ...]:
        if instruction.op in SILENT:
            return ()
        (source,) = instruction.input_layouts
        target = instruction.output
        source_axis = self.graph.axis_along(node.name, source)
        target_axis = self.graph.axis_along(node.name, target)
        axes = (source_axis, target_axis)

        suffix = f"_{instruction.variant}" if instruction.variant else ""
        found = [self._wire(f"{instruction.op}{suffix}", node, axes)]
        if node.needs_gradient:
            dual = dual_of(source, target)
            found.append(self._wire(f"{dual}{suffix}", node, axes))
        return tuple(found)

    def _wire(
        self, name: str, node: GraphNode, axes: tuple[str | None, ...], latency: bool = True
    ) -> Wire:
        """Return the term of a collective on a node's tensor, cut along the axes that are given.

        axes: None for each side of the collective that is not cut. latency: False to leave it out.
        """
        if self.num_devices == 1:
            return Wire(0.0)
        collective = self.cluster.collectives[name]
        whole_s = node.num_bytes / collective.bytes_per_s
        wait_s = collective.latency_s if latency else 0.0
        # grouped collectives send each part as it is, so they take the same for any shares
        depends_on_shares = name != "all_reduce" and not name.endswith("grouped")
        if not depends_on_shares:
            return Wire(wait_s + whole_s)
        cut_along = [axis for axis in axes if axis is not None]
        # the largest share is 1 / devices for even parts, which take `whole_s`
        return Wire(wait_s, whole_s * self.num_devices, tuple(cut_along))

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
            largest = max(float(shares.of(axis).max()) for axis in term.axes)
            return term.constant_s + term.scaled_s * largest
        # axes with equal shares and equal work take equal seconds
        cut = None if term.axis is None else shares.key(term.axis)
        key = (cut, term.flops, term.traffic, term.launches)
        if key not in self._seconds:
            seconds = self.work_s(term, shares)
            self._seconds[key] = float(seconds.max())
        return self._seconds[key]

    def work_s(self, term: Work, shares: Shares) -> Floats:
        """Return the seconds of each device, for its share of the work."""
        fixed, whole = self.line(term)
        if term.axis is None:
            return fixed + whole
        return fixed + shares.of(term.axis) * whole

    def line(self, term: Work) -> tuple[Floats, Floats]:
        """Return the fixed seconds of each device, and its seconds for the whole work."""
        fixed = term.launches * self._launch
        whole = term.flops / self.speeds + term.traffic / self._traffic
        return fixed, whole

    def program_s(self, program: Program, shares: Shares) -> float:
        """Seconds of a whole step."""
        counted = self.term_counts(program)
        return sum(count * self.seconds((term,), shares) for term, count in counted.items())

    def term_counts(self, program: Program) -> Counter[Term]:
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
        activations = 0
        for node in self.graph.nodes:
            if node.is_launched and node.needs_gradient:
                activations += node.num_bytes
        state = [self._state_bytes_of(node) for node in self.graph.parameters]
        return activations + sum(state)

    def _state_bytes_of(self, node: GraphNode) -> float:
        """Return the bytes of a parameter's training state."""
        num_scalars = node.num_bytes / node.item_bytes
        return num_scalars * self.state_bytes

    def bytes_of(self, instruction: Instruction) -> tuple[str | None, float]:
        """Return the axis and bytes that an instruction keeps on the devices for the step.

        The bytes are those of the whole tensor. A device holds its share along the axis; it holds
        the whole if the axis is None.
        """
        node = self.graph.by_name[instruction.tensor]
        size = 0.0
        if instruction.op != "load":
            is_view = instruction.op == "compute" and node.is_alias
            if node.needs_gradient and not is_view:
                size = float(node.num_bytes)
        elif node.kind == "parameter":
            size = self._state_bytes_of(node)
        else:
            size = float(node.num_bytes)
        return self.graph.axis_along(node.name, instruction.output), size

    def program_bytes(self, program: Program, shares: Shares) -> Floats:
        """Return the bytes of each device: training state and what forward keeps for backward."""
        total = np.zeros(self.num_devices)
        for instruction in program.instructions:
            axis, size = self.bytes_of(instruction)
            if axis is None:
                total += size
            else:
                total += size * shares.of(axis)
        return total
