"""Costs of one way to use a node type, as a search reads them, and the stages they describe."""

from dataclasses import dataclass
from typing import Literal

from planner.arrays import Floats
from planner.plans.plan import Recompute


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """Costs of one way to use a node type, at one microbatch size.

    Arrays (num_layers + 2,) with the embedding first, the head last. Seconds a microbatch
    (forward_s, backward_s) and a step (update_s). Bytes a worker: state_bytes all step long,
    activation_bytes for each microbatch in flight, peak_bytes while a layer runs (count the largest
    of a stage once), sync_bytes that the worker contributes to gradient all-reduces.

    Numbers, in bytes: fixed_bytes of a worker, independent of its layers; border_bytes for each
    neighbour of the stage; limit_bytes that a GPU has.
    """

    forward_s: Floats
    backward_s: Floats
    update_s: Floats
    state_bytes: Floats
    activation_bytes: Floats
    peak_bytes: Floats
    sync_bytes: Floats
    fixed_bytes: float
    border_bytes: float
    limit_bytes: float
    estimated: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryChoices:
    """Choices that plans have to save memory.

    recompute: recomputation of a stage's blocks, fastest first; shard_optimizer: holders of a layer
    may share out its optimizer state; only_if_needed: plans may do either only if nothing fits
    without it, otherwise also if it is clearly faster. offload and offload_inputs: masters and
    moments, or inputs of blocks, may be in host memory, if nothing else fits. expert_dispatch: way
    in which tokens reach experts; auto: the faster one of each stage, if it fits.
    """

    recompute: tuple[Recompute, ...] = ("none",)
    shard_optimizer: bool = False
    only_if_needed: bool = False
    offload: bool = False
    offload_inputs: bool = False
    expert_dispatch: Literal["auto", "sum", "all_to_all"] = "sum"

    @property
    def remedy(self) -> str:
        """Way to keep fewer activations that is not in use yet, as part of a sentence, or empty."""
        if "offload" in self.recompute or self.offload_inputs:
            return ""
        if "full" in self.recompute:
            return "inputs of blocks in host memory (training.recompute: offload)"
        if "selective" in self.recompute:
            return "full recomputation (training.recompute: full)"
        return "recomputation (training.recompute)"

    @property
    def is_fixed(self) -> bool:
        """True if there is nothing to choose."""
        return len(self.recompute) == 1 and not self.shard_optimizer


@dataclass(frozen=True, slots=True)
class Assumed:
    """Stages that `layer_costs` describes.

    recompute: their recomputation; holders: workers among which optimizer state is shared out.
    at_least: for lower bounds; activations are those of this recomputation if they are less, and
    communicators are those that no plan can do without. choices: each stage of a plan gets the
    first of these with which it fits (`StageChoices.working_ahead`); empty: it keeps the plan's
    own.
    """

    recompute: Recompute
    holders: int = 1
    at_least: Recompute | None = None
    choices: tuple[Recompute, ...] = ()
