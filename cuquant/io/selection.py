"""Which arrays of a file are quantized, and to which format each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice

import numpy as np

from cuquant import interop
from cuquant.formats import Format, get_format
from cuquant.io.container.messages import quote


@dataclass(frozen=True)
class Selection:
    """Formats by globs of names: an exact name decides, else the first glob that fits.

    A glob fits a tensor's name, or its module's: "*.down_proj" and "*.down_proj.weight". What none
    fits is kept.

    Attributes
    ----------
    rules
        Globs and formats in order; None keeps an array.
    include, exclude
        Globs: without `include` all arrays are candidates.

    Examples
    --------
    >>> chosen = Selection.of({"*.down_proj": "int8", "lm_head": None, "*": "nf4"})
    >>> chosen.format_of("layers.0.down_proj.weight"), chosen.format_of("lm_head.weight")
    (Format('int8'), None)
    """

    rules: tuple[tuple[str, Format | None], ...]
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, formats: Formats, include: Iterable[str] = (), exclude: Iterable[str] = ()
    ) -> Selection:
        """What the doors of files take; ValueError and TypeError as `get_format` gives them."""
        if isinstance(formats, Selection):
            more = tuple(include), tuple(exclude)
            return replace(
                formats, include=formats.include + more[0], exclude=formats.exclude + more[1]
            )
        rules = formats if isinstance(formats, Mapping) else {"*": formats}
        if not rules:
            raise ValueError("format is an empty dict; pass a format, or {glob: format}")
        if unknown := next((glob for glob in rules if not isinstance(glob, str)), None):
            raise TypeError(f"format has the key {quote(unknown)}; pass {{glob: format}}")
        made = tuple((g, None if f is None else get_format(f)) for g, f in rules.items())
        return cls(made, tuple(include), tuple(exclude))

    def rule_of(self, names: Sequence[str]) -> tuple[str, Format | None]:
        """The glob that decides on an array of these names, and its format; "" where none fits."""
        exact = {*names, *(name.removesuffix(".weight") for name in names)}
        fitting = [rule for rule in self.rules if rule[0] in exact]
        fitting += [rule for rule in self.rules if fits(rule[0], names)]
        return fitting[0] if fitting else ("", None)

    def format_of(self, *names: str) -> Format | None:
        """Of an array of these names; None: it is kept."""
        return self.rule_of(names)[1]

    def decide(
        self, names: Sequence[str], dtype: np.dtype, shape: tuple[int, ...]
    ) -> tuple[Format | None, str | None]:
        """The format of a tensor of these names, or None and why it is kept as it is."""
        if dtype.name not in interop.INPUT_DTYPES:
            return None, f"{dtype} values"
        if len(shape) < 2:
            return None, "fewer than two axes"
        if self.include and not any(fits(glob, names) for glob in self.include):
            return None, "not included"
        fmt = self.format_of(*names)
        if fmt is None or any(fits(glob, names) for glob in self.exclude):
            return None, "excluded"
        try:
            fmt.check_shape(shape)
        except ValueError:
            return None, f"{shape[-1]} columns do not divide into blocks"
        reason = fmt.why_keep(shape, dtype.itemsize * math.prod(shape))
        return (fmt, None) if reason is None else (None, reason)

    def refuse_unused(self, names: Mapping[str, Sequence[str]], path: object) -> None:
        """ValueError for a glob that fits nothing; `names`: of each array all that it has."""
        wanted = [(glob, "include") for glob in self.include]
        wanted += [(glob, "exclude") for glob in self.exclude]
        wanted += [(glob, "format") for glob, _ in self.rules if glob != "*"]
        for glob, where in wanted:
            if not any(fits(glob, known) for known in names.values()):
                some = ", ".join(map(quote, islice(names, 3)))
                raise ValueError(
                    f"{path}: no tensor is called {quote(glob)}, which {where} names; "
                    f"the names are {some or 'none'}{', ...' if len(names) > 3 else ''}"
                )

    def __str__(self) -> str:
        if len(self.rules) == 1 and self.rules[0][0] == "*":
            return str(self.rules[0][1])
        return ", ".join(f"{glob}={fmt or 'kept'}" for glob, fmt in self.rules)


def fits(glob: str, names: Iterable[str]) -> bool:
    """Whether a glob fits one of the names, or the module of one.

    >>> fits("*.up", ["layers.0.up.weight"]), fits("up", ["layers.0.up.weight"])
    (True, False)
    """
    return any(
        fnmatchcase(name, glob) or fnmatchcase(name.removesuffix(".weight"), glob) for name in names
    )


Formats = str | Format | Mapping[str, "str | Format | None"] | Selection
"""One format for all, or one for each glob of names; None keeps what the glob fits."""
