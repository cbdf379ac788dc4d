"""The exceptions that cuquant raises beside ValueError and TypeError, and pieces of their texts."""

import difflib
import reprlib
from collections.abc import Iterable


class FormatError(ValueError):
    """A file or a piece of packed data is malformed, truncated or inconsistent."""


class BackendUnavailable(RuntimeError):
    """A GPU, CuPy or NVRTC is needed and not here; the message names the pip command."""


class CupyBroken(BackendUnavailable):
    """CuPy is installed and cannot be imported; `reason` and `advice` are its message."""

    def __init__(self, reason: str, advice: str) -> None:
        super().__init__(f"CuPy cannot be imported ({reason}); {advice}")
        self.reason, self.advice = reason, advice


class CompileError(RuntimeError):
    """NVRTC rejected a kernel; the message names the kernel, the true file and line."""


SOURCE = "."  # what pip installs cuquant from: its source folder; it is on no index


def pip_install(extra: str) -> str:
    """The command that installs what an extra of pyproject.toml names.

    >>> pip_install("cuda12")
    "pip install '.[cuda12]'"
    """
    return f"pip install '{SOURCE}[{extra}]'"


def clipped(value: object, most: int = 60) -> str:
    """repr of what came, cut where it is long: a message stays one that people can read.

    >>> clipped("a" * 1000, 9)
    "'aaaaa..."
    """
    if isinstance(value, (str, bytes)):
        text = repr(value[: most + 1])
    else:
        # Of a container, the first entries: it may hold millions. On one line, as arrays are not.
        text = " ".join(_PRINTER.repr(value).split())
    return shortened(text, most)


_PRINTER = reprlib.Repr()
_PRINTER.maxstring = _PRINTER.maxother = 80


def shortened(text: str, most: int = 200) -> str:
    """A text, cut where it is longer than `most` characters.

    >>> shortened("abcdefgh", 6)
    'abc...'
    """
    return text if len(text) <= most else text[: most - 3] + "..."


def clipped_text(text: str, most: int = 200) -> str:
    """A message of somebody else's on one line, cut where it is long.

    >>> clipped_text("two\\nlines")
    'two lines'
    """
    return shortened(" ".join(text[: 8 * most].split()), most)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question where `name` is the beginning of known ones or near to them, else nothing.

    >>> did_you_mean("nf5", ["nf4", "int8"])
    " (did you mean 'nf4'?)"
    >>> did_you_mean("fp8", ["mxfp8", "fp8_e4m3"])
    " (did you mean 'fp8_e4m3' or 'mxfp8'?)"
    """
    if len(name) > 64:
        return ""
    said, words = name.lower(), list(known)
    longer = [word for word in words if len(said) > 1 and word.startswith(said)]
    near = list(dict.fromkeys([*longer, *difflib.get_close_matches(said, words, 3, 0.6)]))[:3]
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
