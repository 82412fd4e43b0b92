"""What a stage computes with, where its owners send it before each step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autohet.runtime.facts.layout import layout_of_plan, state_name
from autohet.runtime.parallel.buckets import LocalBuffers
from autohet.runtime.parallel.compute_weights import ComputeWeights
from autohet.runtime.parallel.stage_dtypes import StageDtypes
from planner.plans.plan import Pipeline, Plan, Stage
from recovery.state.borrowed import BorrowedState
from tests.harness.toy_model import ExactConfig

CONFIG = ExactConfig(num_hidden_layers=4, tie_word_embeddings=True)
SENT = 7.0


class FromOwners:
    """A group in which each owner that is not this worker sends one value."""

    def __init__(self, me: str) -> None:
        self.me = me

    def start_broadcast(self, tensor: Tensor, source: str) -> None:
        if source != self.me:
            tensor.fill_(SENT)

    def wait_on_stream(self, work: None) -> None: ...


class Groups:
    def group(self, members: Sequence[str]) -> Any:
        return FromOwners("a")


def test_a_gather_fills_what_others_own_and_leaves_alone_the_masters_that_a_snapshot_may_be_reading() -> (  # noqa: E501
    None
):
    pipelines = (
        Pipeline((Stage(0, 4, (worker,), shard_optimizer=True),), 1, 1) for worker in ("a", "b")
    )
    plan = Plan("m", 2, 1, 4, tuple(pipelines))
    local = LocalBuffers(plan, CONFIG, "a", None)
    units, tensors = (
        layout_of_plan(plan, CONFIG).units_of("a"),
        layout_of_plan(plan, CONFIG).tensors,
    )
    state = {name: torch.randn(tensors[name].local_shape(held)) for name, held in units.items()}
    weights = ComputeWeights(
        local, Groups(), state, StageDtypes(*[torch.float32] * 4), torch.device("cpu")
    )  # type: ignore[arg-type]
    whole = [name for name, held in local.units.items() if local.owned.get(name) == held]
    others = [name for name in local.units if name not in local.owned]
    assert whole
    assert others
    borrowed = BorrowedState(state)
    weights.gather()
    assert not borrowed.changed
    assert all(weights.tensors[name] is state[state_name("param", name)] for name in whole)
    assert all(bool((weights.tensors[name] == SENT).all()) for name in others)
