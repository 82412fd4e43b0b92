"""The few constants of the cost model that no table holds, each with a physical meaning; calibration fits some of them (README.md)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostParameters:
    """Defaults come from data sheets and published measurements, sources in README.md.

    Compute. launch_fraction: share of a measured microbatch-1 forward that does not grow with the microbatch, where only
    microbatch 1 was measured. backward_ratio: backward over forward where the backward was not measured. stage_overhead_s: time that
    a framework adds to each forward and each backward of a stage.
    Communication. link_efficiency_intra, link_efficiency_inter: reached share of a link's nominal bandwidth where no link table says
    it. latency_intra_s, latency_inter_s: one message. sync_bytes_per_parameter: width of a gradient on the wire.
    tied_efficiency: reached share of that bandwidth for the embedding's own all-reduce.
    Step. optimizer_bytes_per_parameter: memory traffic of one AdamW update; step_overhead_s: once a step.
    Memory. state_bytes_per_parameter None takes the precision's own (memory.py); context_bytes: CUDA context, NCCL, library workspace;
    fragmentation: share added to everything that the allocator holds.
    """

    launch_fraction: float = 0.25
    backward_ratio: float = 2.0
    stage_overhead_s: float = 0.0
    link_efficiency_intra: float = 0.75
    link_efficiency_inter: float = 0.75
    latency_intra_s: float = 10e-6
    latency_inter_s: float = 30e-6
    sync_bytes_per_parameter: float = 4.0
    tied_efficiency: float = 1.0
    optimizer_bytes_per_parameter: float = 30.0
    memory_efficiency: float = 0.75
    step_overhead_s: float = 0.0
    state_bytes_per_parameter: float | None = None
    context_bytes: float = 1.0 * 2**30
    fragmentation: float = 0.04
