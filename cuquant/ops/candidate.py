"""A kernel that an explanation names."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A kernel that could run.

    Attributes
    ----------
    kernel
        Its file in kernels/, or the library.
    weights
        "prepacked" or "as quantized": how the weights must lie; "" where there are none.
    estimated_us
        Microseconds, as the rule that chooses reckons them, without what the note says comes
        first; None where it does not.
    note
        What it does.
    is_chosen
        Whether it runs, of those whose weights lie so; of a row quantizer all that run are.
    """

    kernel: str
    weights: str
    estimated_us: float | None
    note: str
    is_chosen: bool
