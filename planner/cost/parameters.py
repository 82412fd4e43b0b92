"""Constants of the cost model that no table holds, and the differences of frameworks.

Each constant has a physical meaning; calibration fits some (`layers.calibration`). Frameworks
differ in what they do in a step; these differences are changes of the constants, for predicting
runs of theirs, or of ours.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from planner.cost.schedule import Transfers
from planner.errors import ConfigError
from planner.plans.plan import Plan


@dataclass(frozen=True, slots=True)
class CostParameters:
    """Constants of the cost model, with defaults from data sheets and measurements.

    The measurements are published. `backward_ratio` 2 is arithmetic. The launches, exposure,
    efficiencies and `context_share` were chosen once, by hand and jointly, with AMP's T4 runs,
    Sailor's GH200 runs and FASOP's iteration in view: these rows of the accuracy table are
    in-sample.

    Compute:
    launch_exposure: share of the launch time in a measured curve (what exceeds its work at the
    largest microbatch, in proportion) that a run pays; the rest is an artefact of measuring one
    layer at a time.
    launch_s, launch_limit: the host's time to launch one block's forward kernels without tensor
    parallelism, if only one microbatch size was measured (`PointSplit`), and the largest share of
    the measurement that it may be.
    backward_ratio, launch_backward_ratio: backward over forward for work and for launches, if it
    was not measured.
    stage_overhead_s: what a framework adds to each forward and each backward of a stage.
    fuses_elementwise: a compiler fuses element-wise kernels (torch.compile), so that values pass
    memory twice instead of six times.
    compiles_blocks: the same, for blocks without selective recomputation (this project's runtime).
    fuses_loss: logits are read by one fused kernel, which keeps one fp32 copy.

    Links:
    efficiency_intra, efficiency_inter: share of nominal bandwidth that a message reaches if no link
    table gives it.
    all_reduce_efficiency: share of that which rings of more than two members over several nodes
    reach.
    latency_intra_s, latency_inter_s: of one message.
    transfers: whom a transfer between stages occupies: "both" sender and receiver (blocking calls,
    as in DeepSpeed), the "receiver" alone (fused or asynchronous sends, as in Megatron-LM), or
    "none" (receives are posted ahead as well, as in this project's runtime).
    sliced_boundaries: hidden states cross from node to node in slices, one for each rank of the
    tensor-parallel group that takes them, which then gathers them inside its node (scatter and
    gather, Narayanan et al. 2021, section 4.1); else each rank takes the whole.
    gather_bytes_per_s: limit of that gathering, however fast the links.
    sync_bytes_per_parameter: width of a gradient on the wire.
    tied_sync: "union" sums a tied embedding over its holders in first and last stages at once,
    "two_step" first within each stage and then between the two (Megatron-LM).

    Step:
    optimizer_bytes_per_parameter: memory traffic of one AdamW step with its gradient norm and
    casts.
    memory_efficiency: reached share of a device's memory bandwidth.
    step_overhead_s: once a step.
    host_link_bytes_per_s: limit of one direction between a GPU and pinned host memory, where the
    catalogue has none (24.8e9 measured for each A100 on PCIe 4.0 x16, nvbandwidth, NVIDIA developer
    forum 352186; on PCIe machines the node's own link bounds it).
    host_update_bytes_per_s: memory traffic of AdamW on the host for one GPU, 32 bytes a parameter,
    where the node's cores are unknown: four of `planner.cost.memory.offload`.

    Memory:
    state_bytes_per_parameter: None takes the precision's own (memory.py).
    flat_gradients: all-reduces need a flat fp32 buffer beside the gradients; else these lie in it.
    border_messages: hidden states and their gradients that a stage keeps for each neighbour in
    addition to the microbatches in flight: received ahead, in use, on their way.
    activation_scale: kept activations over the formula's.
    autograd_activations: blocks keep what autograd saves of the library's modules
    (`LayerSpec.autograd`), not what a framework's own kernels keep.
    loss_chunk_bytes: bytes of fp32 logits that the loss has at one time; None: all.
    fused_head_elements: logits that a head on one rank has at one time, if head and loss are
    computed together; None: they are not.
    context_bytes, context_share (of the device's memory): CUDA context, library workspace, and
    communicators if these are not counted.
    communicator_bytes: of one communicator, of which the runtime's plans have 3 to 8 a worker
    (`planner.plans.communicators`); 0: not counted.
    memory_margin: share of the device's memory that a plan must leave free (fragmentation, other
    processes).
    elastic: a change of plans moves state through host memory, which also has snapshots of it
    (`host_memory.py`).
    may_cut_sequence: tensor-parallel stages may be sequence parallel, if no plan fits otherwise or
    their tokens go to experts by all-to-all; sequence_parallel: all of them are.
    offload_optimizer: masters and moments of all plans are in host memory.
    uneven_shares: workers of a tensor-parallel group may have different shares of what is cut
    (`Stage.tp_shares`).
    half_gradients: gradients of fp16 runs stay in fp16, without an fp32 copy and without a flat
    buffer.
    scales_gradients: gradients inside fp16 stages are scaled; what leaves the stages is in fp32.
    full_shard: weights, gradients and optimizer state are shared out over the pipelines, each layer
    gathered ahead of its use (`planner.cost.memory.full_shard`).
    """

    launch_exposure: float = 0.9
    launch_s: float = 1.6e-3
    launch_limit: float = 0.5
    launch_backward_ratio: float = 1.0
    backward_ratio: float = 2.0
    stage_overhead_s: float = 0.0
    fuses_elementwise: bool = False
    compiles_blocks: bool = False
    fuses_loss: bool = False
    efficiency_intra: float = 0.7
    efficiency_inter: float = 0.85
    all_reduce_efficiency: float = 0.75
    latency_intra_s: float = 10e-6
    latency_inter_s: float = 30e-6
    transfers: Transfers = "both"
    sliced_boundaries: bool = False
    gather_bytes_per_s: float = math.inf
    sync_bytes_per_parameter: float = 4.0
    tied_sync: Literal["union", "two_step"] = "union"
    optimizer_bytes_per_parameter: float = 48.0
    memory_efficiency: float = 0.75
    step_overhead_s: float = 0.0
    host_link_bytes_per_s: float = 24e9
    host_update_bytes_per_s: float = 19e9
    state_bytes_per_parameter: float | None = None
    flat_gradients: bool = True
    border_messages: float = 0.0
    activation_scale: float = 1.0
    autograd_activations: bool = False
    loss_chunk_bytes: float | None = None
    fused_head_elements: float | None = None
    context_bytes: float = 1.0 * 2**30
    context_share: float = 0.03
    communicator_bytes: float = 0.0
    memory_margin: float = 0.03
    elastic: bool = False
    uneven_shares: bool = False
    may_cut_sequence: bool = False
    sequence_parallel: bool = False
    half_gradients: bool = False
    scales_gradients: bool = False
    full_shard: bool = False
    offload_optimizer: bool = False

    @property
    def fuses_block(self) -> bool:
        """True if element-wise kernels are fused in a block."""
        return self.fuses_elementwise or self.compiles_blocks


OURS = "autohet"
MIN_COMPILED_PARAMETERS = 1_000_000
"""Least parameters of a block that this project's runtime compiles."""


@dataclass(frozen=True)
class Framework:
    """Framework as `changes` to the cost parameters, and what they stand for."""

    what: str
    changes: Mapping[str, Any]


FRAMEWORKS: Mapping[str, Framework] = {
    OURS: Framework(
        "this project's runtime: transfers beside its work, in slices between nodes, fp32 gradients"
        " that lie in the buffers of their sums, one sum over all holders of a tied embedding",
        {
            "transfers": "none",
            "sliced_boundaries": True,
            "sync_bytes_per_parameter": 4.0,
            "tied_sync": "union",
            "flat_gradients": False,
            "border_messages": 5.0,
            "autograd_activations": True,
            "loss_chunk_bytes": 64.0 * 2**20,
            "fused_head_elements": 2.0**26,
            "elastic": True,
            "uneven_shares": True,
            "may_cut_sequence": True,
            "scales_gradients": True,
        },
    ),
    "deepspeed": Framework(
        "DeepSpeed's pipeline engine: sender and receiver both wait for a transfer, in slices"
        " between nodes, gathered slowly (into lists of tensors, and the output and its gradient"
        " once more before the backward), fp32 gradients",
        {
            "transfers": "both",
            "sliced_boundaries": True,
            "gather_bytes_per_s": 20e9,
            "sync_bytes_per_parameter": 4.0,
            "tied_sync": "union",
            "communicator_bytes": 0.0,
            "half_gradients": True,
            "context_share": 0.03,
            "memory_margin": 0.03,
        },
    ),
    "megatron": Framework(
        "Megatron-LM: fused sends, in slices between nodes (scatter and gather), gradients in 16"
        " bits, a tied embedding summed within the stages, then between them",
        {
            "transfers": "receiver",
            "sliced_boundaries": True,
            "flat_gradients": False,
            "sync_bytes_per_parameter": 2.0,
            "tied_sync": "two_step",
            "communicator_bytes": 0.0,
        },
    ),
    "fsdp": Framework(
        "PyTorch's FSDP: weights, gradients and optimizer state shared out over all pipelines, the"
        " next layer gathered while one computes, gradients reduced in 16 bits beside the backward",
        {
            "transfers": "none",
            "sync_bytes_per_parameter": 2.0,
            "flat_gradients": False,
            "state_bytes_per_parameter": 16.0,
            "full_shard": True,
            "fuses_loss": True,
            "memory_margin": 0.03,
        },
    ),
    "pytorch": Framework(
        "plain PyTorch with torch.compile (DDP): element-wise kernels and the loss are fused, fp32"
        " gradients without a second buffer",
        {
            "transfers": "none",
            "sync_bytes_per_parameter": 4.0,
            "flat_gradients": False,
            "fuses_elementwise": True,
            "fuses_loss": True,
            "memory_margin": 0.03,
        },
    ),
}


def framework_parameters(name: str, parameters: CostParameters) -> CostParameters:
    """Return the parameters with the changes of a framework.

    ConfigError for an unknown framework.
    """
    if name not in FRAMEWORKS:
        raise ConfigError(f"framework is '{name}'; known: {', '.join(FRAMEWORKS)}")
    if name != OURS:
        parameters = replace(parameters, compiles_blocks=False)
    return replace(parameters, **FRAMEWORKS[name].changes)


def usual_framework(plans: Sequence[Plan]) -> str:
    """Return the framework of published runs with such plans, if none is named.

    Plans with stages or tensor parallelism are taken for DeepSpeed's; others cannot be its pipeline
    engine's: FSDP's if they share out state, else plain PyTorch's.
    """
    shares_out = False
    for plan in plans:
        if plan.spmd is not None:
            return "deepspeed"
        for pipeline in plan.pipelines:
            if len(pipeline.workers) > 1:
                return "deepspeed"
            shares_out = shares_out or pipeline.stages[0].shard_optimizer
    return "fsdp" if shares_out else "pytorch"
