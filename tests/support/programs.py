"""What kernels are compiled for."""

import re

from cuquant.gpu.jit import Program


def number(program: Program, field: str) -> int:
    """A number of its Tile or Work, the struct that says how the work is divided."""
    found = re.search(rf"\b{field} = (-?\d+)", program.facts)
    assert found, f"{program.name} has no {field}"
    return int(found.group(1))
