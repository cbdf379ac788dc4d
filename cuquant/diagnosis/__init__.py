"""`doctor`: what is installed, what is missing, what does not fit together, and what to type."""

from dataclasses import dataclass
from pathlib import Path

from cuquant.diagnosis.checks import Check, examine
from cuquant.diagnosis.facts import gather
from cuquant.gpu.cubins import cache_folder, cache_size, clear_cache

__all__ = ["Check", "Diagnosis", "cache_folder", "cache_size", "clear_cache", "doctor"]


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` found.

    Attributes
    ----------
    checks
        In the order in which they build on each other.
    """

    checks: tuple[Check, ...]

    @property
    def backend(self) -> str:
        """ "cuda" where arrays on a GPU can be quantized and dequantized, else "cpu"."""
        return next((c.found.partition(":")[0] for c in self.checks if c.name == "backend"), "cpu")

    @property
    def ok(self) -> bool:
        """Whether no check found a problem; something optional may be missing."""
        return all(check.status != "problem" for check in self.checks)

    def lines(self) -> list[tuple[Check, str]]:
        """Aligned lines of text, each with the check that it belongs to."""
        width = max((len(check.name) for check in self.checks), default=0)
        lines = []
        for check in self.checks:
            lines.append((check, f"{check.name:<{width}}  {check.status:<7}  {check.found}"))
            if check.advice is not None:
                lines.append((check, f"{'':<{width}}  {'':<7}  -> {check.advice}"))
        return lines

    def __str__(self) -> str:
        return "\n".join(line for _, line in self.lines())


def doctor() -> Diagnosis:
    """Examine the installation; it never raises, and imports CuPy only where it is installed.

    Examples
    --------
    >>> import cuquant as cq
    >>> cq.doctor().backend in ("cpu", "cuda")
    True
    """
    return Diagnosis(examine(gather(Path(__file__).parent.parent)))
