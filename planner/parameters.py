"""The cost model's few constants that no table holds, each with a physical meaning; calibration fits some (README.md)."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CostParameters:
    """Defaults come from data sheets and published measurements; sources in README.md.

    Compute, where only one microbatch size and no backward was measured (`split_point`): launch_s is the host's time to launch
    one block's forward kernels, at most launch_limit of the measurement; backward_ratio and launch_backward_ratio are backward
    over forward for work and for launches. stage_overhead_s: what a framework adds to each forward and each backward of a stage.
    Links. efficiency_intra and efficiency_inter: reached share of nominal bandwidth where no link table says it;
    latency_intra_s, latency_inter_s: of one message. blocking_sends: a sender waits until its message has left.
    sync_bytes_per_parameter: width of a gradient on the wire. tied_sync: "union" sums a tied embedding over the holders in first
    and last stages at once, "two_step" first within each stage and then between the two (Megatron-LM).
    Step. optimizer_bytes_per_parameter: memory traffic of one AdamW update; memory_efficiency: reached share of a device's
    memory bandwidth; step_overhead_s: once a step.
    Memory. state_bytes_per_parameter None takes the precision's own (memory.py); context_bytes: CUDA context, communicators,
    library workspace; fragmentation: share added to all that the allocator holds.
    """

    launch_s: float = 1.6e-3
    launch_limit: float = 0.5
    launch_backward_ratio: float = 2.0
    backward_ratio: float = 2.0
    stage_overhead_s: float = 0.0
    efficiency_intra: float = 0.75
    efficiency_inter: float = 0.75
    latency_intra_s: float = 10e-6
    latency_inter_s: float = 30e-6
    blocking_sends: bool = False
    sync_bytes_per_parameter: float = 4.0
    tied_sync: Literal["union", "two_step"] = "union"
    optimizer_bytes_per_parameter: float = 30.0
    memory_efficiency: float = 0.75
    step_overhead_s: float = 0.0
    state_bytes_per_parameter: float | None = None
    context_bytes: float = 1.0 * 2**30
    fragmentation: float = 0.04
