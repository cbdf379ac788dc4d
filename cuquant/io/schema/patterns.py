"""Patterns of names in configurations, which nobody vouches for."""

from __future__ import annotations

import re
from functools import lru_cache

from cuquant.errors import FormatError
from cuquant.io.container.messages import quote

MAX_PATTERN, MAX_NAME = 500, 500  # characters
MAX_REPEATS = 3  # of unknown length: each multiplies the time by the length of the name
_REPEAT = re.compile(r"(?<!\\)(?:\\\\)*([*+]|\{\d*,\d*\})")


@lru_cache(maxsize=4096)
def compiled(pattern: str) -> re.Pattern[str]:
    """A regular expression that matches in a time which its length and the name's bound.

    Raises
    ------
    FormatError
        For what is none, is long, or repeats often: groups that repeat themselves take as long as
        the universe lasts.
    """
    repeats = _REPEAT.findall(pattern)
    nested = re.search(r"[*+}]\)(?:[*+]|\{)", pattern)
    if len(pattern) > MAX_PATTERN or len(repeats) > MAX_REPEATS or nested:
        raise FormatError(f"the pattern {quote(pattern)} would take too long to match")
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise FormatError(f"{quote(pattern)} is no pattern of names") from error


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern fits the beginning of a name.

    >>> matches(r".*\\.(q|k)_proj", "layers.0.q_proj"), matches("k", "q_proj")
    (True, False)
    """
    return len(name) <= MAX_NAME and compiled(pattern).match(name) is not None
