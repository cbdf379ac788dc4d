"""NumPy in the place of a GPU that is measured."""

import numpy as np

from cuquant.bench.report import Machine

MACHINE = Machine("Fake 100", "580.1", "13.0", "14.2.0", "12.9", "0.1.0", 1 << 16)


class FakeEngine:
    """A device that takes 3, 4, 5, ... microseconds for whatever it is given."""

    def __init__(self, captures=True):
        self.captures, self.clock, self.captured = captures, 2.0, 0

    def capture(self, run):
        if not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured += 1
        return run

    def elapsed(self, run):
        run()
        self.clock += 1
        return self.clock


class FakeGpu:
    """NumPy arrays on a device."""

    def __init__(self, captures=True):
        self.machine, self.engine = MACHINE, FakeEngine(captures)
        self.released = 0

    def upload(self, x):
        return x.copy()

    def download(self, x):
        return x.copy()

    def copy(self, x):
        return x.copy()

    def poison(self, x):
        x.reshape(-1).view(np.uint8)[...] = 0xA5

    def memory_calls(self, nbytes):
        return {name: [lambda: None, lambda: None] for name in ("copy", "read", "write")}

    def release(self):
        self.released += 1
