"""Files that are read and written by descriptor."""

import os


class Descriptor:
    """A file descriptor that is closed with the last object that refers to this one, or before.

    What is read or written by it, and not through a mapping, lets other threads run for as long as
    a disk takes: a mapping's page fault and `mmap.flush` keep the interpreter to themselves.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def fill(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` from `offset`; raise OSError, or EOFError if the file ends before."""
        while memory:
            count = os.preadv(self.number, [memory], offset)
            if not count:
                raise EOFError("the file ends before")
            memory = memory[count:]
            offset = offset + count

    def write(self, data: bytes, offset: int) -> None:
        while data:
            written = os.pwrite(self.number, data, offset)
            data = data[written:]
            offset = offset + written

    def close(self) -> None:
        number = self.number
        self.number = -1
        if number >= 0:
            os.close(number)

    __del__ = close
