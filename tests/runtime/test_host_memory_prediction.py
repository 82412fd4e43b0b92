"""Host memory that the planner expects a node to need: against recovery's own rule, and against
what real workers put there.
"""

import math
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import _disable_current_modes

from autohet.runtime.copies import memory_snapshots
from autohet.runtime.copies.memory_snapshots import MemorySnapshots
from autohet.runtime.facts.layout import layout_of_plan
from autohet.runtime.models.config import read_config
from autohet.runtime.state import live as live_module
from autohet.runtime.state.live import Live
from planner.cost.basis import Workload
from planner.cost.memory import host_memory
from planner.cost.memory.host_memory import HostMemory, Kept
from planner.cost.model import CostModel
from planner.cost.parameters import OURS, CostParameters, framework_parameters
from planner.inputs.fleet import Fleet, Node, NodeType, node_of
from planner.plans.plan import Pipeline, Plan, Stage
from recovery.local import memory_budget
from recovery.local.memory_budget import Budget, share_out
from recovery.state.layout import Layout, ShardId
from recovery.transfer import exchange
from tests.harness.limited_memory import LimitedMemory
from tests.harness.model_specs import spec_of
from tests.harness.random_plans import plans
from tests.runtime import test_transition_memory as transition

WIDTH = 128
LAYERS = 3
COMMON: dict[str, Any] = {"vocab_size": 512, "bos_token_id": None, "eos_token_id": None}
LLAMA = {
    **COMMON,
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 384,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "tied": {**LLAMA, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2",
        **COMMON,
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": 4,
        "n_positions": 64,
    },
}
NEAR = 0.03
"""Of the planner's figures: snapshot files have headers, and the planner does not know each tensor.
"""
IN_FLIGHT_BYTES, ON_HOST = (
    exchange.IN_FLIGHT_BYTES,
    live_module.shard_on_host,
)  # before the fixture changes them
in_proportion = transition.in_proportion


def predicted(
    plan: Plan,
    model: dict[str, Any],
    host_bytes: float,
    kept: Kept = host_memory.ALL_KEPT,
    device_bytes: float = 1,
) -> dict[str, HostMemory]:
    """By node, each with so much host memory; devices have no room for two states."""
    kind = NodeType(
        "n", "T4", 1000, int(device_bytes), 1e11, 1e9, host_memory_bytes=int(host_bytes)
    )
    fleet = Fleet(0, tuple(Node(node, kind) for node in dict.fromkeys(map(node_of, plan.workers))))
    spec = spec_of("m", model, "fp32")
    parameters = replace(
        framework_parameters(OURS, CostParameters()),
        context_bytes=0.0,
        context_share=0.0,
        memory_margin=0.0,
    )
    cost = CostModel(fleet, Workload(spec, plan.sequence_length, "fp32"), parameters=parameters)
    return {memory.node: memory for memory in cost.memory_of.host_memory(plan, kept)}


# ---- recovery's rule


def test_the_rules_have_the_same_numbers() -> None:
    assert host_memory.SNAPSHOT_FILES == memory_budget.FILES
    assert host_memory.COPY_ROUNDS == memory_budget.ROUNDS
    assert host_memory.USABLE == memory_budget.USABLE
    assert host_memory.IN_FLIGHT_BYTES == IN_FLIGHT_BYTES


def sole_by_worker(layout: Layout, node: str) -> dict[str, frozenset[ShardId]]:
    """Of each of the node's workers the shards that no other node holds, read off the layout."""
    elsewhere = {
        shard
        for worker, shards in layout.shards_by_worker.items()
        if node_of(worker) != node
        for shard in shards
    }
    return {
        worker: shards - elsewhere
        for worker, shards in layout.shards_by_worker.items()
        if node_of(worker) == node
    }


def keeps_sole(budget: Budget, sole: dict[str, frozenset[ShardId]]) -> bool:
    return all(shards <= budget.shards_by_worker[worker] for worker, shards in sole.items())


@settings(max_examples=25)
@given(st.sampled_from(sorted(MODELS)), plans(LAYERS, 4, uneven=True), st.booleans())
def test_what_is_left_out_is_what_recovery_leaves_out(
    model: str, plan: Plan, replicates: bool
) -> None:
    """On both sides of what all would take, and of what no other node holds would."""
    layout, nodes = (
        layout_of_plan(plan, read_config(MODELS[model])),
        {worker: node_of(worker) for worker in plan.workers},
    )
    for node, memory in predicted(plan, MODELS[model], 1, Kept(True, replicates)).items():
        mine = [worker for worker in layout.workers if nodes[worker] == node]
        held = sum(
            layout.shard_bytes(shard)
            for worker in mine
            for shard in layout.shards_by_worker[worker]
        )
        assert memory.state_bytes == pytest.approx(held, rel=NEAR)
        for factor, room in ((1 + NEAR, True), (1 - NEAR, False)):
            budget = share_out(
                node, layout, nodes, int(factor * memory.wanted_bytes), replicates=replicates
            )
            assert budget.suffices == room, f"{node}: {factor} x {memory.wanted_bytes:,.0f}"
        sole = sole_by_worker(layout, node)
        alone = sum(layout.shard_bytes(shard) for shards in sole.values() for shard in shards)
        assert memory.sole_bytes == pytest.approx(alone, rel=NEAR, abs=NEAR * held)
        more = share_out(
            node,
            layout,
            nodes,
            int((1 + NEAR) * memory.sole_snapshot_bytes + NEAR * held),
            replicates=replicates,
        )
        assert keeps_sole(more, sole)


def test_shared_optimizer_state_lies_once_so_all_of_it_is_kept_first() -> None:
    """A third of it on each of three nodes, to a unit."""
    pipelines = tuple(
        Pipeline((Stage(0, LAYERS, (f"n{number}/0",), shard_optimizer=True),), 1, 1)
        for number in range(3)
    )
    plan = Plan("m", 3, 1, 4, pipelines)
    layout, nodes = (
        layout_of_plan(plan, read_config(LLAMA)),
        {worker: node_of(worker) for worker in plan.workers},
    )
    for node, memory in predicted(plan, LLAMA, 1).items():
        (held,) = (
            sum(map(layout.shard_bytes, layout.shards_by_worker[worker]))
            for worker in nodes
            if nodes[worker] == node
        )
        assert memory.state_bytes == memory.sole_bytes == pytest.approx(held, rel=NEAR)
        for factor in (1 - NEAR, 1 + NEAR):
            assert share_out(
                node, layout, nodes, int(factor * memory.wanted_bytes), replicates=True
            ).suffices == (factor > 1)


# ---- what workers put there


class CountedHost:
    """Host memory of nodes named by the first two letters of their workers: copies of state that
    left its device, and snapshot files. `staged_bytes`, `peak_bytes`: of the copies, and of both,
    by node, at the worst.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock, self._mine = folder, threading.Lock(), threading.local()
        self._copies = defaultdict[str, LimitedMemory](LimitedMemory)
        self.staged_bytes, self.peak_bytes = defaultdict[str, int](int), defaultdict[str, int](int)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        move = Live.move_to_host

        def moving(live: Live, kept: Any, snapshot: Any) -> None:
            self._mine.worker = live.worker
            move(live, kept, snapshot)

        def counted(view: torch.Tensor, copy: torch.Tensor | None) -> torch.Tensor:
            with self._lock:
                memory = self._copies[self._mine.worker]
            with _disable_current_modes(), memory:
                found = ON_HOST(view, copy)
            self._note(self._mine.worker[:2])
            return found

        monkeypatch.setattr(Live, "move_to_host", moving)
        monkeypatch.setattr(live_module, "shard_on_host", counted)

    def _note(self, node: str) -> None:
        with self._lock:
            copied = sum(
                memory.bytes for worker, memory in self._copies.items() if worker.startswith(node)
            )
            self.staged_bytes[node] = max(self.staged_bytes[node], copied)
            self.peak_bytes[node] = max(
                self.peak_bytes[node],
                copied + sum(path.stat().st_size for path in self.files(node)),
            )

    def files(self, node: str) -> list[Path]:
        return list((self._folder / node / "memory").glob("*.snapshot"))


def swapped() -> tuple[Plan, Plan]:
    """Plans in which two nodes of two workers each exchange all that they hold."""
    halves = [(2, "n0/0"), (2, "n1/2")], [(2, "n0/1"), (2, "n1/3")]
    there = [transition.stages(*half) for half in halves]
    back = [
        transition.stages(
            *((layers, name) for (layers, _), (_, name) in zip(half, half[::-1], strict=True))
        )
        for half in halves
    ]
    return (Plan("m", 2, 1, transition.LENGTH, tuple(pipelines)) for pipelines in (there, back))  # type: ignore[return-value]


@pytest.mark.parametrize("room", [True, False])
def test_what_leaves_the_devices_is_what_is_predicted(
    room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two snapshots of each worker beside it, and none of the step that would serve
    instead.
    """
    host, (before, after) = CountedHost(tmp_path), swapped()
    host.install(monkeypatch)
    monkeypatch.setattr(
        MemorySnapshots, "lease", lambda *_: None
    )  # as for a worker that rolled forward
    monkeypatch.setattr(
        memory_snapshots, "write_copies_limit", lambda *_: None
    )  # whose temporary file is one a process, as workers are
    with transition.fleet_of(tmp_path, before.workers) as fleet:
        assert {report.error for report in fleet.train(before).values()} == {None}
        until = time.monotonic() + transition.DEADLINE_S
        while any(worker.report().snapshot_step != 2 for worker in fleet.workers.values()):
            assert time.monotonic() < until
            time.sleep(0.01)
        device = (
            math.inf if room else max(worker.memory.peak_bytes for worker in fleet.workers.values())
        )
        for worker in fleet.workers.values():
            worker.memory.limit_bytes = device
        assert {report.error for report in fleet.train(after, before).values()} == {None}
    monkeypatch.setattr(host_memory, "IN_FLIGHT_BYTES", transition.IN_FLIGHT)
    expected = predicted(
        before,
        transition.MODEL,
        1 << 30,
        Kept(True, False),
        device_bytes=1 << 40 if room else device,
    )
    for node in ("n0", "n1"):
        assert host.staged_bytes[node] == pytest.approx(expected[node].staged_bytes, rel=NEAR)
        assert (expected[node].staged_bytes == 0) == room
        whole = expected[node].staged_bytes + expected[node].wanted_bytes
        assert room or (1 - NEAR) * whole <= host.peak_bytes[node] <= (1 + NEAR) * whole


def at_most_what_is_predicted(
    seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, int]:
    """The bytes counted, by node; devices have room for the larger plan in training and for nothing
    more.
    """
    host, (before, after) = CountedHost(folder), transition.random_pair(seed)
    host.install(monkeypatch)
    monkeypatch.setattr(MemorySnapshots, "lease", lambda *_: None)
    transition.move(before, after, folder)
    # A worker of the new plan alone has trained in that one, for its limit, and still has what it
    # held there.
    expected = predicted(after, transition.MODEL, 1 << 30) | predicted(
        before, transition.MODEL, 1 << 30
    )
    for node, num_bytes in host.staged_bytes.items():
        assert num_bytes <= (1 + NEAR) * expected[node].staged_bytes
    return host.staged_bytes


def test_no_more_leaves_the_devices_than_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert max(at_most_what_is_predicted(0, tmp_path, monkeypatch).values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_no_more_leaves_in_random_changes(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_most_what_is_predicted(seed, tmp_path, monkeypatch)
