"""SPMD programs on a fleet, with the cost model's layer times and links.

It makes devices and collectives of them, and predicts the cost of a plan of one program.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.cost.basis import CostBasis
from planner.cost.layers.layer_cost_model import LayerCostModel
from planner.cost.layers.layer_costs import LayerCosts
from planner.cost.memory.worker_memory import WorkerMemory
from planner.errors import InfeasibleError
from planner.inputs.fleet import NodeType
from planner.plans.plan import Plan
from planner.spmd.costs import CostTable, Device, SpmdCluster, Term, Wire, Work, ring_collectives
from planner.spmd.graph import Decoder, Graph
from planner.spmd.plan import PlacedProgram
from planner.spmd.program import Program, explain_tensors

STATE_BYTES = {"fp32": 16.0, "bf16": 18.0, "fp16": 18.0}
"""Bytes of a parameter: fp32 weight, gradient and AdamW's two moments, and the 16-bit copy."""


@dataclass(frozen=True)
class ProgramCosts:
    """Costs of SPMD programs on one fleet.

    decoders: cache of the model's graphs by microbatch size, None where no graph is known.
    """

    basis: CostBasis
    layers: LayerCostModel
    memory: WorkerMemory
    decoders: dict[int, Decoder | None]

    def decoder(self, microbatch: int) -> Decoder:
        """Return the model's graph.

        Raises:
            InfeasibleError: none is known, or the model can have none.
        """
        workload = self.basis.workload
        if microbatch not in self.decoders:
            make = workload.decoder
            self.decoders[microbatch] = None if make is None else make(microbatch)
        decoder = self.decoders[microbatch]
        if decoder is None:
            spec = workload.spec
            raise InfeasibleError(
                f"no graph is known of model '{spec.name}' (type {spec.model_type}), so it"
                " has no SPMD program. Use a strategy with pipelines (autohet, metis, fasop)"
            )
        return decoder

    def table(
        self, graph: Graph, workers: Sequence[str], microbatch: int, passes: int
    ) -> CostTable:
        """Return the cost of instructions on these workers, in this order."""
        kinds = self.basis.fleet.node_types_of(workers)
        even = max(1, microbatch // len(workers))
        rates_by_kind: dict[NodeType, tuple[float, float, float, float]] = {}
        devices = []
        for worker, kind in zip(workers, kinds, strict=True):
            if kind not in rates_by_kind:
                rates_by_kind[kind] = self._rates(kind, graph, microbatch, even)
            devices.append(Device(worker, *rates_by_kind[kind]))

        # The cost model knows the seconds of an all-reduce. Two sizes of it, one of them next to
        # nothing, give the latency and the bandwidth from which the ring's collectives follow.
        members = self.basis.fleet.members_of(workers)
        n = len(workers)
        size = self.basis.formats.inside_bytes(microbatch, self.basis.workload.precision)
        wait_s = self.basis.links.all_reduce_s(members, 1.0)
        link = float("inf")
        if n > 1:
            transfer_s = self.basis.links.all_reduce_s(members, size) - wait_s
            link = float(2 * (n - 1) / n * size / transfer_s)
        # An all-reduce waits for so many messages in turn (`ring_collectives`).
        num_rounds = float(np.ceil(np.log2(n)))
        num_messages = 2 * max(1.0, num_rounds)
        collectives = ring_collectives(n, link, wait_s / num_messages)
        cluster = SpmdCluster(tuple(devices), collectives)
        return CostTable(graph, cluster, STATE_BYTES[self.basis.workload.precision], passes)

    def _rates(
        self, kind: NodeType, graph: Graph, microbatch: int, even: int
    ) -> tuple[float, float, float, float]:
        """Return FLOP/s, memory, (infinite) memory bandwidth and seconds of a launch.

        They are those of the line through the model's times at one sequence and at an even share.
        """
        size = max(2, even)
        layers = self.layers.costs(kind, 1, 1)
        one = _model_s(layers)
        more = _model_s(self.layers.costs(kind, 1, size))
        slope = (more - one) / (size - 1)
        if slope <= 0:
            # Measured times may be equal at both sizes, or fall. No rate is infinite or below 0.
            slope = more / size

        flops = []
        num_launches = 0
        for node in graph.nodes:
            flops.append(node.flops + node.backward_flops)
            if node.is_launched:
                num_launches += 1
        flops_per_sequence = sum(flops) / microbatch
        # what does not grow with the batch is taken to be launches
        launch_s = max(0.0, one - slope) / num_launches
        memory = layers.limit_bytes - layers.fixed_bytes
        return flops_per_sequence / slope, memory, float("inf"), launch_s

    def _place(self, plan: Plan) -> tuple[CostTable, PlacedProgram]:
        """Return a plan's program over the model's graph, and the cost of its instructions.

        Raises:
            ConfigError: it is no program of this model.
        """
        (pipeline,) = plan.pipelines
        assert plan.spmd is not None
        microbatch = pipeline.microbatch_sequences
        placed = plan.spmd.place(self.decoder(microbatch).graph)
        passes = pipeline.num_microbatches
        table = self.table(placed.graph, plan.workers, microbatch, passes)
        return table, placed

    def breakdown(self, plan: Plan) -> tuple[dict[str, float], dict[str, int], tuple[str, ...]]:
        """Return the seconds of a step by purpose, the bytes by worker, and notes on estimates.

        The purposes follow each other.

        Raises:
            ConfigError: the plan is none of this model.
        """
        table, placed = self._place(plan)
        program = placed.program
        shares = placed.shares
        sync_terms: list[Term] = []
        for load in program.loads:
            sync_terms += table.terms(load)
        sync_terms += table.final_terms(program)
        sync_s = table.seconds(sync_terms, shares)

        seconds: dict[type[Term], float] = {Work: 0.0, Wire: 0.0}
        for term, count in table.term_counts(program).items():
            term_s = table.seconds((term,), shares)
            seconds[type(term)] += count * term_s

        kinds = self.basis.fleet.node_types_of(plan.workers)
        layers = [self.layers.costs(kind, 1, 1) for kind in kinds]
        breakdown = {
            "pipeline": seconds[Work],
            "collectives": max(0.0, seconds[Wire] - sync_s),
            "grad_sync": sync_s,
            "optimizer": _update_s(table, placed, layers),
            "overhead": self.basis.parameters.step_overhead_s,
        }

        used = table.program_bytes(program, shares)
        bytes_by_worker = {}
        for worker, num_bytes, kind in zip(plan.workers, used, kinds, strict=True):
            bytes_by_worker[worker] = int(num_bytes + self.memory.fixed_bytes(kind))

        # each note once, in order
        notes = dict[str, None]()
        for each in layers:
            notes.update(dict.fromkeys(each.estimated))
        return breakdown, bytes_by_worker, tuple(notes)

    def explain(self, plan: Plan, *, by_tensor: bool) -> dict[str, Any]:
        """Return `notes`, what has no rule, and `program` if asked for: `explain_tensors`."""
        _, placed = self._place(plan)
        found: dict[str, Any] = {"notes": list(placed.graph.notes)}
        if by_tensor:
            found["program"] = explain_tensors(placed.graph, placed.program)
        return found

    def work_by_worker(self, plan: Plan) -> dict[str, tuple[float, float]]:
        """Return forward and backward seconds of one microbatch's operators on each worker.

        They are those of nodes that are not slowed down.
        """
        table, placed = self._place(plan)
        total = np.zeros(len(plan.workers))
        for term, count in table.term_counts(placed.program).items():
            if isinstance(term, Work):
                count_per_pass = count / table.passes
                work_s = table.work_s(term, placed.shares)
                total = total + count_per_pass * work_s
        kinds = self.basis.fleet.node_types_of(plan.workers)
        slowdowns = np.array([kind.slowdown for kind in kinds])
        total = total / slowdowns

        # a term is forward and backward together; they are told apart by their FLOPs
        forward = sum(node.flops for node in placed.graph.nodes)
        backward = sum(node.backward_flops for node in placed.graph.nodes)
        part = forward / (forward + backward)
        found = {}
        for worker, seconds in zip(plan.workers, total, strict=True):
            forward_s = float(seconds * part)
            backward_s = float(seconds * (1 - part))
            found[worker] = (forward_s, backward_s)
        return found


def _model_s(layers: LayerCosts) -> float:
    """Return the seconds of forward and backward of all layers."""
    return float(layers.forward_s.sum() + layers.backward_s.sum())


def _update_s(table: CostTable, placed: PlacedProgram, layers: Sequence[LayerCosts]) -> float:
    """Return the seconds of the slowest worker's update: its part of the state's bytes.

    layers: costs of the whole model's layers on each worker.
    """
    loads = []
    sizes = []
    for load in placed.program.loads:
        if placed.graph.by_name[load.tensor].kind == "parameter":
            _, num_bytes = table.bytes_of(load)
            loads.append(load)
            sizes.append(num_bytes)
    state_only = Program(tuple(loads))
    held_bytes = table.program_bytes(state_only, placed.shares)
    held_parts = held_bytes / sum(sizes)
    whole_s = np.array([each.update_s.sum() for each in layers])
    seconds = held_parts * whole_s
    return float(seconds.max())
