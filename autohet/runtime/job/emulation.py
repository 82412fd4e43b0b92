"""The `emulation` section: emulated GPU speeds and memory."""

from dataclasses import dataclass, field

from autohet.runtime.job.requirements import require, require_positive


@dataclass(frozen=True, kw_only=True)
class EmulationSection:
    """EMULATION of GPU speeds on machines without GPUs: sleeps lengthen each forward and backward.

    With `profile`, an action of `gpu_type` takes that table's seconds times `scale`; otherwise a
    block's forward takes `block_forward_s * scale / relative_speed_by_gpu_type[gpu_type]` per
    sequence and its backward twice that.
    """

    profile: str | None = None
    """Path of a profile table, as `autohet profile` writes it; null: `relative_speed_by_gpu_type`.
    """
    scale: float = 1.0
    """Emulated seconds for each second of the profile."""
    relative_speed_by_gpu_type: dict[str, float] = field(default_factory=dict)
    """Speed of each GPU type, relative to a type of speed 1."""
    block_forward_s: float = 0.01
    """Seconds of one sequence's forward through one block at relative speed 1.

    Not used with `profile`.
    """
    memory_scale: float = 1.0
    """Emulated GPU memory for each byte of the type's real memory.

    Below 1, a small model meets the limits that a large one would meet.
    """

    def __post_init__(self) -> None:
        require_positive("emulation.scale", self.scale)
        require_positive("emulation.block_forward_s", self.block_forward_s)
        require_positive("emulation.memory_scale", self.memory_scale)
        for gpu_type, speed in self.relative_speed_by_gpu_type.items():
            require_positive(f"emulation.relative_speed_by_gpu_type.{gpu_type}", speed)
        require(
            (self.profile is None) != (not self.relative_speed_by_gpu_type),
            "emulation needs exactly one of profile and relative_speed_by_gpu_type",
        )
