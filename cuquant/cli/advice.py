"""Errors of the library in a shell's words: advice names options that the command has."""

import inspect
import re
from collections.abc import Collection
from typing import Any

from cuquant.io.conversion.door import convert
from cuquant.io.files import load
from cuquant.ops.quantize.door import quantize

# Parameters of the library that its messages name, those of `get_format` at the end.
PARAMETERS = {
    *inspect.signature(quantize).parameters,
    *inspect.signature(load).parameters,
    *inspect.signature(convert).parameters,
    "packing",
    "scale_dtype",
}
_PARAMETER = re.compile(r"\b([a-z_]+)=('[^']*'|[\w.]+)?")


def for_shell(message: str, options: Collection[str]) -> str:
    """A message whose advice can be followed on the command line.

    Advice stands behind a semicolon. A parameter is spelled as the option that it is there; an
    alternative that names one which the command lacks is left out.

    >>> text = "x holds nan; repair it, or pass nonfinite='clamp' or 'propagate'"
    >>> for_shell(text, ["--nonfinite"])
    'x holds nan; repair it, or pass --nonfinite clamp or propagate'
    >>> for_shell(text, [])
    'x holds nan; repair it'
    >>> for_shell("too long; pass max_header_bytes= if you trust the file", [])
    'too long'
    """
    problem, *advice = message.split("; ")
    clauses = [_respelled(problem, options), *(_possible(clause, options) for clause in advice)]
    return "; ".join(clause for clause in clauses if clause)


def options_of(command: Any) -> set[str]:
    """The options of a command of click, or of all commands of a group."""
    commands = [command, *getattr(command, "commands", {}).values()] if command else []
    return {name for found in commands for param in found.params for name in param.opts}


def _possible(clause: str, options: Collection[str]) -> str:
    """A piece of advice without the alternatives that need what the command lacks."""
    names = [name for name, _ in _PARAMETER.findall(clause) if name in PARAMETERS]
    if all(_option(name) in options for name in names):
        return _respelled(clause, options)
    # 'clamp' or 'propagate' are values of one alternative.
    parts = re.split(r",? or (?!')", clause)
    lacking = [_lacks(part, options) for part in parts]
    return " or ".join(
        _respelled(part, options) for part, lacks in zip(parts, lacking, strict=True) if not lacks
    )


def _lacks(text: str, options: Collection[str]) -> bool:
    names = (name for name, _ in _PARAMETER.findall(text))
    return any(name in PARAMETERS and _option(name) not in options for name in names)


def _respelled(text: str, options: Collection[str]) -> str:
    def spell(found: re.Match[str]) -> str:
        name, value = found[1], (found[2] or "").strip("'")
        if name not in PARAMETERS or _option(name) not in options:
            return found[0]
        return _option(name) if value in ("True", "") else f"{_option(name)} {value}"

    made = _PARAMETER.sub(spell, text)
    return made if made == text else re.sub(r" or '([^']*)'", r" or \1", made)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
