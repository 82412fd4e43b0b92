"""Fence of a process against drivers that a later driver has replaced."""

import threading


class StaleDriver(RuntimeError):
    """Raised for a command of a driver that a later one has replaced."""

    def __init__(self, epoch: int, newest: int) -> None:
        super().__init__(epoch, newest)
        self.epoch = epoch
        self.newest = newest

    def __str__(self) -> str:
        return (
            f"a command of the driver of epoch {self.epoch} is refused: that of epoch"
            f" {self.newest} has taken over"
        )


class EpochFence:
    """Highest epoch (`recovery.checkpoint.epoch`) that has commanded a process. Thread-safe."""

    def __init__(self, epoch: int) -> None:
        self._newest = epoch
        self._lock = threading.Lock()

    def admit(self, epoch: int) -> None:
        """Admit a command of this epoch, and none of lower ones from now on.

        Raises:
            StaleDriver: a higher epoch has commanded this process.
        """
        with self._lock:
            if epoch < self._newest:
                raise StaleDriver(epoch, self._newest)
            self._newest = epoch
