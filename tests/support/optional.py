"""Parts of cuquant that import what is optional."""

import importlib.util
from pathlib import Path

import cuquant

PACKAGE = Path(cuquant.__file__).parent
# Files and folders below cuquant, by what they import at once. No import of cuquant reaches them.
PARTS = {
    "torch": ("torch", "bench/decoder.py", "integrations"),
    "transformers": ("integrations",),
}


def belongs(path: Path, needed: str) -> bool:
    """Whether a file is of the parts that import something."""
    return any(path.is_relative_to(PACKAGE / part) for part in PARTS[needed])


def left_out() -> list[Path]:
    """Files and folders that cannot be imported here."""
    absent = [needed for needed in PARTS if importlib.util.find_spec(needed) is None]
    return [PACKAGE / part for needed in absent for part in PARTS[needed]]
