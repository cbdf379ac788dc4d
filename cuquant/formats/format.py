"""A format is a value: codec x scale x offset x packing, and the arrays that hold it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from cuquant.formats import strings
from cuquant.formats.blocks import BlockLayout
from cuquant.formats.codecs import Codec, Minifloat, Uniform
from cuquant.formats.packing import Packing
from cuquant.formats.scales import DTYPES, FLAT, NESTED_BLOCK, PLAIN, Block, Scale
from cuquant.lazy import lazy

ARRANGED = ("permuted", "absmax", "divisor", "per_matrix")  # options that kernels do not see
MOST_BITS = 1.5  # times those of long rows, from which on an array is kept as it is


E2M1, OF_E2M1 = "fp4_e2m1", 32  # the format of nvfp4's codes with plain scales, and its own block


class Component(NamedTuple):
    """One array of a quantized array: its name, dtype and shape."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True, repr=False)
class Format:
    """One quantization format; `str` gives the string that `get_format` reads.

    Attributes
    ----------
    name
        As `get_format` knows it.
    codec
        Number <-> unsigned code.
    scale
        The scale rule; None for fp16 and bf16, which hold the values themselves.
    offset
        None, "zero_point" (x' = (code - zero_point) * scale) or "min" (x' = code * scale + min).
    packing
        Where the bits of the codes go; a BlockLayout interleaves codes and scales as ggml does.
    options
        What the user chose beyond the name, for `get_format(name, **options)`.
    permuted
        Whether columns are sorted by group: column j of what is stored is column permutation[j] of
        the array.
    text
        What `get_format` was told, in words that `parse_format` (cuquant/io/state.py) reads: a
        Format that is changed afterwards has none. An attribute, since torch.compile reads
        attributes and passes no object to a function.
    """

    name: str
    codec: Codec
    scale: Scale | None
    offset: str | None
    packing: Packing | BlockLayout
    options: Mapping[str, Any] = field(default_factory=dict, compare=False)
    permuted: bool = False
    text: str | None = field(default=None, init=False, compare=False)

    def __hash__(self) -> int:
        return self._hash

    @lazy
    def _hash(self) -> int:  # asked for at every call of an operation
        return hash((self.name, self.codec, self.scale, self.offset, self.packing, self.permuted))

    def __getstate__(self) -> dict[str, object]:  # another process hashes strings otherwise
        made = ("_hash", "plain", "exact", "usual")
        return {name: value for name, value in self.__dict__.items() if name not in made}

    def __str__(self) -> str:
        return strings.write(self.name, self.options)

    def __repr__(self) -> str:
        return f"Format({str(self)!r})"

    @property
    def is_blocks(self) -> bool:
        """Whether codes and scales are interleaved in one array of ggml's bytes."""
        return isinstance(self.packing, BlockLayout)

    @property
    def is_flat(self) -> bool:
        """Whether blocks run over the flattened array."""
        return self.scale is not None and self.scale.flat is not None

    @lazy
    def odd(self) -> tuple[str, ...]:
        """What kernels do not see: "flat" or one of ARRANGED."""
        if self.scale is None:
            return ()
        rules = {word: getattr(self.scale, word) for word in ("absmax", "divisor", "per_matrix")}
        said = {"permuted": self.permuted, "flat": self.is_flat, **rules}
        return tuple(word for word, is_so in said.items() if is_so)

    @lazy
    def is_plain(self) -> bool:
        """Whether arrays of this format lie as kernels read them: nothing is `odd`."""
        return not self.odd

    @lazy
    def plain(self) -> "Format":
        """The format of what kernels read, of an array that is arranged around it.

        >>> from cuquant import get_format
        >>> get_format("nf4:flat").plain, get_format("int8+absmax").plain
        (Format('nf4'), Format('int8'))
        """
        if self.is_plain:
            return self
        if self.rule.per_matrix:
            return self.exact
        options = self._common_options()
        if options.get("block_size") == FLAT:
            del options["block_size"]
        elif self.is_flat:
            options["block_size"] = self.rule.flat
        block = self.rule.flat or self.rule.block
        scale = replace(self.rule, block=block, absmax=False, divisor=False)
        return replace(self, scale=scale, permuted=False, options=options)

    @lazy
    def exact(self) -> "Format":
        """`plain`, or where products of that are rounded otherwise, a plain format of all values.

        >>> from cuquant import get_format
        >>> get_format("nvfp4+divisor").exact, get_format("nvfp4+divisor").plain
        (Format('fp4_e2m1:16+float32'), Format('nvfp4'))
        """
        if self.is_plain or not (self.rule.divisor or self.rule.per_matrix):
            return self.plain
        scale = replace(self.usual.rule, dtype="float32", nested=None)
        options = {**self.usual.options, "scale_dtype": "float32"}
        if scale.block == OF_E2M1:
            options.pop("block_size", None)
        else:
            options["block_size"] = scale.block
        return replace(self, name=E2M1, scale=scale, options=options)

    @lazy
    def usual(self) -> "Format":
        """With one global scale for the whole array, which multiplies; else as it is."""
        if not (self.scale and (self.scale.divisor or self.scale.per_matrix)):
            return self
        scale = replace(self.scale, divisor=False, per_matrix=False)
        return replace(self, scale=scale, options=self._common_options())

    def _common_options(self) -> dict[str, Any]:
        return {k: v for k, v in self.options.items() if k not in ARRANGED}

    @property
    def block_size(self) -> Block | None:
        """Elements that share a scale; None for fp16 and bf16."""
        return self.scale.block if self.scale else None

    @property
    def bits(self) -> int:
        """Of one code, as stored."""
        return self.packing.bits

    @lazy
    def zero_code(self) -> int:
        """encode(0): what padding and blocks without a usable scale hold (before a zero point)."""
        return int(self.codec.encode(np.zeros(1, np.float32))[0])

    @property
    def row_packing(self) -> Packing:
        """`packing`, or how ggml codes are packed once they are taken out of their blocks."""
        if isinstance(self.packing, Packing):
            return self.packing
        return Packing(self.bits, "low" if self.bits in (4, 8) else "dense")

    @property
    def layout(self) -> BlockLayout:
        """`packing` where `is_blocks`."""
        if not isinstance(self.packing, BlockLayout):
            raise TypeError(f"{self} is not stored in ggml's blocks")
        return self.packing

    @property
    def rule(self) -> Scale:
        """`scale` where there is one."""
        if self.scale is None:
            raise TypeError(f"{self} has no scale")
        return self.scale

    @property
    def scale_is_plain(self) -> bool:
        """Whether the stored scale is the effective one, in float32, float16 or bfloat16."""
        rule = self.scale
        return rule is not None and not (rule.nested or rule.absmax) and rule.dtype in PLAIN

    @property
    def has_integer_codes(self) -> bool:
        """Whether codes are integers, which have no place for NaN."""
        return isinstance(self.codec, Uniform)

    @property
    def holds_nan(self) -> bool:
        """Whether a block can be NaN: ggml's scales of a byte have no such number."""
        return not self.is_blocks or self.layout.has_half_scale

    def check_shape(self, stored: tuple[int, ...]) -> None:
        """ValueError where an array stored as [rows..., K] cannot have this format."""
        if not stored:
            raise ValueError("shape is () (0-d); quantization needs at least one axis: reshape(1)")
        if self.scale and isinstance(self.scale.block, tuple) and len(stored) < 2:
            raise ValueError(
                f"shape is {stored}; a block_size of {self.scale.block} needs two axes or more"
            )
        if self.is_blocks and stored[-1] % self.layout.elements:
            raise ValueError(
                f"{self.name} needs a quantized axis that is a multiple of {self.layout.elements}, "
                f"got {stored[-1]}; pad it, as ggml does, or pass another axis="
            )

    def components(self, stored: tuple[int, ...]) -> tuple[Component, ...]:
        """The arrays that hold an array stored as [rows..., K]: names, dtypes, shapes."""
        return self._components(tuple(stored))

    # A call of an operation asks several times, and a model has few shapes.
    @lru_cache(maxsize=4096)  # noqa: B019
    def _components(self, stored: tuple[int, ...]) -> tuple[Component, ...]:
        if self.is_flat:
            return self.plain.components((math.prod(stored),))
        if self.permuted:
            order = Component("permutation", np.dtype(np.int32), stored[-1:])
            return (*self.plain.components(stored), order)
        *rows, count = stored
        if self.is_blocks:
            blocks = count // self.layout.elements
            shape = (*rows, blocks, self.layout.nbytes)
            return (Component("blocks", np.dtype(np.uint8), shape),)
        # fp16 and bf16 are stored as what they are.
        dtype = self.codec.dtype if isinstance(self.codec, Minifloat) and self.bits == 16 else None
        packing = self.row_packing
        parts = [Component("packed", dtype or packing.dtype, (*rows, packing.words(count)))]
        if self.scale is None:
            return tuple(parts)
        shape = self.scale.shape(stored)
        if self.scale.nested == "double":
            blocks = -(-math.prod(shape) // NESTED_BLOCK)
            parts += [
                Component("scale", np.dtype(np.uint8), shape),
                Component("nested_scale", np.dtype(np.float32), (blocks,)),
                Component("nested_offset", np.dtype(np.float32), ()),
            ]
        else:
            parts.append(Component("scale", DTYPES[self.scale.dtype], shape))
        if self.offset == "min":
            parts.append(Component("minimum", DTYPES[self.scale.dtype], shape))
        if self.offset == "zero_point":
            parts.append(Component("zero_point", np.dtype(np.uint8), shape))
        if self.scale.nested == "global":
            each = stored[:-2] if self.scale.per_matrix else ()
            parts.append(Component("global_scale", np.dtype(np.float32), each))
        return tuple(parts)

    def nbytes(self, stored: tuple[int, ...]) -> int:
        """Bytes of all components of an array stored as [rows..., K]."""
        return sum(part.nbytes for part in self.components(stored))

    def why_keep(self, stored: tuple[int, ...], nbytes: int) -> str | None:
        """Why an array of `nbytes`, stored as [rows..., K], had better stay as it is; or None.

        Rows shorter than a block have a scale of their own all the same: of filters of 3 x 3, nf4
        takes 16 bits a weight and mxfp4 8, for the accuracy of 4.

        >>> from cuquant import get_format
        >>> get_format("mxfp4").why_keep((64, 64, 3, 3), 147_456)
        'short rows of 3 would take 8 bits a weight'
        """
        if self.scale is None:  # fp16 and bf16: whoever asks for them wants the dtype
            return None
        if not (size := math.prod(stored)):
            return "no values"
        bits = self.nbytes(stored) * 8 / size
        if bits >= MOST_BITS * self.bits_per_element:
            return f"short rows of {stored[-1]} would take {bits:.3g} bits a weight"
        if bits * size >= nbytes * 8:
            return f"no smaller: it would take {bits:.3g} bits a weight"
        return None

    @property
    def bits_per_element(self) -> float:
        """Bits an element takes in a 4096 x 4096 array, scales and all."""
        return self.nbytes((4096, 4096)) * 8 / 4096**2
