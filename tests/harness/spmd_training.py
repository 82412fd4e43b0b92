"""Training of SPMD plans on gloo processes: steps under any layouts, a death, and the same run in one plain process."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from autohet.runtime.groups import GenerationGroups, PeerLost
from autohet.runtime.job import TrainingSection
from autohet.runtime.layout import state_name
from autohet.runtime.spmd.capture import Captured, capture
from autohet.runtime.spmd.layout import layout_of_spmd_plan, split_dims
from autohet.runtime.spmd.trainer import SpmdTrainer
from planner.spmd.costs import Device, SpmdCluster, ring_collectives
from planner.spmd.plan import SpmdPlan, synthesize
from recovery.local.agent_store import AgentStore
from recovery.local.snapshot import SnapshotWriter
from recovery.peers.server import ShardServer
from recovery.state.holdings import Holding, Source
from recovery.transfer.restore import Access, LiveState, Restored, restore
from recovery.transfer.schedule import schedule
from tests.harness.spmd_models import spmd_case
from tests.harness.spmd_programs import given_plan, gloo_group, random_program

TOKEN = "spmd"
DIED = 9
TRAINING = TrainingSection(
    global_batch_sequences=6, sequence_length=8, steps=100, precision="fp32", learning_rate=1e-2, min_learning_rate_ratio=1.0, clip_norm=0.3
)


def one_process(name: str, steps: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and weights of plain PyTorch: AdamW and clip_grad_norm_."""
    model, batch = spmd_case(name, torch.float32)
    settings = TRAINING
    optimizer = torch.optim.AdamW(
        model.parameters(), settings.learning_rate, settings.betas, settings.eps, weight_decay=settings.weight_decay
    )
    losses, norms = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        assert settings.clip_norm is not None
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, {name: value.detach() for name, value in model.named_parameters()}


def uneven_cluster(count: int, link_bytes_per_s: float = 1e9) -> SpmdCluster:
    devices = tuple(Device(f"n{rank}", speed * 1e9, 1e12) for rank, speed in zip(range(count), (4.0, 1.0, 2.0, 3.0), strict=False))
    return SpmdCluster(devices, ring_collectives(count, link_bytes_per_s, 1e-6))


def some_plan(captured: Captured, size: int, seed: int | None) -> SpmdPlan:
    """The planner's, or a random program on random shares."""
    if seed is None:
        return synthesize(captured.graph, uneven_cluster(size))
    rng = random.Random(seed)
    weights = [rng.uniform(0.3, 3) for _ in range(size)]
    return given_plan(captured.graph, random_program(captured.graph, seed), (tuple(w / sum(weights) for w in weights),))


def train(
    rank: int, size: int, store: TCPStore, name: str, seeds: Sequence[int | None], steps: int
) -> list[tuple[list[float], list[float], float]]:
    """For each plan: losses, norms, and the largest difference of this rank's weights from one process's, over the largest weight."""
    group, found = gloo_group(store, rank, size), []
    expected = one_process(name, steps)[2]
    for seed in seeds:
        model, batch = spmd_case(name, torch.float32)
        captured = capture(model, batch)
        trainer = SpmdTrainer(captured, some_plan(captured, size, seed), group, TRAINING)
        done = [trainer.train_step(batch) for _ in range(steps)]
        worst = 0.0
        for parameter, layout in trainer.executor.plan.program.storage.items():
            if parameter in expected:
                wanted = trainer.executor.local_part(expected[parameter], parameter, layout)
                difference = (trainer.state[state_name("param", parameter)] - wanted).abs()
                worst = max(worst, float(difference.max()) if difference.numel() else 0.0)
        found.append(([step.loss for step in done], [step.gradient_norm for step in done], worst))
    return found


# ---- a death ----


class Node:
    """One rank's agent store and server; `keep` writes the state to its own and to the next node's memory, as replication does."""

    def __init__(self, directory: Path, rank: int, size: int) -> None:
        self.directory, self.rank, self.size, self.name = directory, rank, size, f"n{rank}"
        self.store = AgentStore(directory / self.name / "memory", directory / self.name / "disk", self.name)
        self.server = ShardServer(self.store, TOKEN, host="127.0.0.1")

    def keep(self, worker: str, layout: Any, step: int, state: dict[str, Tensor]) -> None:
        for node in (self.rank, (self.rank + 1) % self.size):
            writer = SnapshotWriter(self.directory / f"n{node}" / "memory", worker, layout, 1)
            writer.start(step, state)
            writer.wait(20)
            writer.close(20)


def _refuse(uri: str, step: int, shards: Any) -> Any:
    raise AssertionError(f"{len(shards)} shards of step {step} are read from durable storage")


def run_with_a_death(
    directory: Path, size: int, name: str, victim: int, dies_at: int, steps: int
) -> dict[int, tuple[list[float], dict[str, int]]]:
    """What each survivor answers, by rank; every process is gone afterwards."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ranks = {
        rank: context.Process(target=_life, args=(rank, size, store.port, str(directory), name, victim, dies_at, steps), daemon=True)
        for rank in range(size)
    }
    deadline = time.monotonic() + 150
    for process in ranks.values():
        process.start()
    for process in ranks.values():
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()
        process.join(5)
    assert ranks[victim].exitcode == DIED
    return {rank: tuple(json.loads((directory / f"{rank}.json").read_text())) for rank in ranks if rank != victim}


def _life(rank: int, size: int, port: int, directory: str, *arguments: Any) -> None:
    torch.set_num_threads(1)
    answer = train_through_a_death(rank, size, TCPStore("127.0.0.1", port, is_master=False), directory, *arguments)
    (Path(directory) / f"{rank}.json").write_text(json.dumps(answer))


def train_through_a_death(
    rank: int, size: int, store: TCPStore, directory: str, name: str, victim: int, dies_at: int, steps: int
) -> tuple[list[float], dict[str, int]]:
    """Every rank trains; `victim` dies in the backward of step `dies_at`; the others restore to a plan of their own and go on. Losses by
    step and bytes by tier."""
    model, batch = spmd_case(name, torch.float32)
    captured = capture(model, batch)
    # The planner's program with every state sharded: so a death takes the only live copy of the victim's parts.
    plan = synthesize(captured.graph, uneven_cluster(size, 1e3), pinned=split_dims(captured.graph), state_bytes=1e3)
    dims = split_dims(captured.graph, plan)
    members = [f"w{number}" for number in range(size)]
    layout, node = layout_of_spmd_plan(plan, members, dims), Node(Path(directory), rank, size)
    store.set(f"port/{rank}", str(node.server.port))

    def hook(phase: str, step: int) -> None:
        if rank == victim and step == dies_at and phase == "backward":
            os._exit(DIED)

    trainer = SpmdTrainer(captured, plan, gloo_group(store, rank, size, timeout_s=15.0), TRAINING, phase_hook=hook)
    losses: list[float] = []
    try:
        while len(losses) < steps:
            node.keep(members[rank], layout, trainer.step, trainer.state)
            losses.append(trainer.train_step(batch).loss)
    except PeerLost:
        pass
    assert len(losses) == dies_at
    survivors = [member for number, member in enumerate(members) if number != victim]
    restored, plan = _restored(rank, store, captured, node, dims, layout, trainer, survivors, victim)
    group = gloo_group(PrefixStore("after", store), survivors.index(members[rank]), len(survivors), "restored")  # type: ignore[arg-type]
    trainer = SpmdTrainer(captured, plan, group, TRAINING, restored.state, dies_at)
    while trainer.step < steps:
        losses.append(trainer.train_step(batch).loss)
    return losses, restored.bytes_by_tier


def _restored(
    rank: int, store: TCPStore, captured: Captured, node: Node, dims: dict[str, int], layout: Any, trainer: SpmdTrainer,
    survivors: list[str], victim: int,
) -> tuple[Restored, SpmdPlan]:  # fmt: skip
    """What is left goes to where a plan of the survivors wants it, with the parameters cut where they were."""
    cluster = uneven_cluster(node.size)
    left = tuple(device for number, device in enumerate(cluster.devices) if number != victim)
    plan = synthesize(captured.graph, SpmdCluster(left, ring_collectives(len(left), 1e9, 1e-6)), pinned=dims)
    after = layout_of_spmd_plan(plan, survivors, dims)
    step, me = trainer.step, f"w{rank}"
    holdings = [Holding(Source("worker", f"n{w[1:]}", w, step, 1), layout.shards_by_worker[w]) for w in survivors]
    if rank == (victim + 1) % node.size:
        copies = [held for held in node.store.inventory() if held.source.name == f"w{victim}" and held.step == step]
        store.set("copies", pickle.dumps(copies))
    holdings += pickle.loads(store.get("copies"))
    transfers = schedule(after, {w: f"n{w[1:]}" for w in survivors}, holdings, step)
    agents = {f"n{w[1:]}": ("127.0.0.1", int(store.get(f"port/{w[1:]}")), TOKEN) for w in survivors}
    group: Any = gloo_group_of(PrefixStore("transfer", store), survivors, me)
    access = Access(node.store, agents, _refuse, 20.0)
    restored = restore(transfers, me, after, LiveState(layout, trainer.state), group, access)
    store.add("restored", 1)
    while store.add("restored", 0) < len(survivors):
        time.sleep(0.02)
    return restored, plan


def gloo_group_of(store: Any, members: Sequence[str], me: str) -> Any:
    return GenerationGroups(store, 2, me, torch.device("cpu"), 20.0, 20.0).group(list(members), "world")
