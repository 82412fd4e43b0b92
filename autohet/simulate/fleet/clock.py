"""SIMULATED clock: one time for all parts of a simulated workforce."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SimulatedClock:
    """Current second of the simulation, and the moments at which the controller must look."""

    now: float = 0.0
    changed_at: float = 0.0
    """Second of the last change that the controller may have to answer."""
    wake_at: list[float] = field(default_factory=list)

    def note_change(self) -> None:
        self.changed_at = self.now

    def wake_soon(self) -> None:
        """Make the controller look at what it has asked for just now."""
        self.wake_at.append(self.now + 1e-3)

    def pending_wakes(self) -> list[float]:
        """Return the moments still to come, and drop those that have passed."""
        self.wake_at = [at for at in self.wake_at if at > self.now]
        return self.wake_at
