"""What a writer of a kind of checkpoint makes of a quantized array: tensors, and how they come."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np

from cuquant.array.quant_array import QuantArray
from cuquant.formats import Format
from cuquant.formats.codecs import Uniform
from cuquant.formats.packing import Packing
from cuquant.io.container.gguf.types import GgufType

Specs = dict[str, tuple[Any, tuple[int, ...]]]  # dtype, tag or type, and shape, by tensor
Tensors = dict[str, np.ndarray]
WEIGHT = "weight"
PARTS = {
    "packed", "scale", "zero_point", "minimum", "blocks", "global_scale", "nested_scale",
    "nested_offset",
}  # fmt: skip
ODD = {
    "permuted": "its columns are permuted, which files of gptq and cuquant keep",
    "flat": "its blocks run across rows, which files of bitsandbytes and cuquant keep",
    "divisor": "its global scale divides, which files of compressed-tensors and cuquant keep",
    "per_matrix": "each matrix has a global scale, which compressed-tensors, GGUF and cuquant keep",
    "absmax": "it has absmax in place of scales, which files of bitsandbytes and cuquant keep",
}
CHUNK = 1 << 19  # elements whose codes are unpacked at a time
SCALE_TAGS = {"F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
FLOATS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}  # dtypes of plain scales
GGML_INTEGERS = ("q4_0", "q5_0", "q8_0")  # of which a block is codes and one float16


@dataclass(frozen=True)
class Source:
    """A quantized array that is to be written: what it is, and what reads it.

    Attributes
    ----------
    name, format, shape, dtype
        Of the array.
    read
        Reads it.
    axes
        As a QuantArray's; None where the last axis is the quantized one.
    rows
        Reads rows [start, stop) of a matrix; None where it is read whole.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], QuantArray]
    axes: tuple[int, ...] | None = None
    rows: Callable[[int, int], QuantArray] | None = None

    @property
    def stem(self) -> str:
        """The module's name and a dot; ValueError where the array is no module's weight."""
        stem = self.name.removesuffix(WEIGHT)
        if stem == self.name or (stem and not stem.endswith(".")):
            raise ValueError("its name does not end in .weight, as that of a module does")
        return stem

    @property
    def module(self) -> str:
        """The module's name."""
        return self.stem.removesuffix(".")

    def matrix(self, kind: str) -> tuple[int, int]:
        """(N, K); ValueError where the array is no matrix."""
        if len(self.shape) != 2:
            raise ValueError(f"{kind} holds matrices, not shapes such as {self.shape}")
        return self.shape[0], self.shape[1]


def refuse_odd_parts(source: Source, held: Sequence[str] = ()) -> None:
    """ValueError where an array is odd in another way than a kind holds, or not in rows."""
    if odd := [word for word in source.format.odd if word not in held]:
        raise ValueError(ODD[odd[0]])
    if not source.format.is_plain:
        return
    parts = source.format.components(source.shape)
    if odd := [part.name for part in parts if part.name not in PARTS]:
        raise ValueError(f"it has a component {odd[0]!r}, which only files of cuquant keep")
    if parts[0].shape[: len(source.shape) - 1] != source.shape[:-1]:
        raise ValueError("its blocks run across rows")


@dataclass(frozen=True)
class Recipe:
    """What one array becomes.

    Attributes
    ----------
    specs
        Of the tensors, which lie in one file.
    encode
        Makes them.
    words
        What the array is called in the kind's own words.
    said
        What the configuration has to say of it.
    module
        Of the array; "" where that has none.
    axes
        The axis of each tensor that the rows of the array lie along: codes are unpacked for some
        rows at a time. Tensors without one are the same of any rows. None: all rows at once.
    """

    specs: Specs
    encode: Callable[[QuantArray], Tensors]
    words: str
    said: Mapping[str, Any] = field(default_factory=dict)
    module: str = ""
    axes: Mapping[str, int] | None = None

    def tensors(self, source: Source) -> dict[str, np.ndarray | Iterator[np.ndarray]]:
        """What the array becomes.

        The largest tensor whose rows are the array's comes first, as an iterator of its bytes; the
        others are complete when that is at its end.
        """
        if self.axes is None:
            return dict(self.encode(source.read()))
        chunks = row_chunks(source)
        first = next(chunks)
        found = self.encode(first)
        if first.shape == source.shape:
            return dict(found)
        by_rows = [name for name in found if self.axes.get(name) == 0]
        streamed = max(by_rows, key=lambda name: found[name].nbytes, default=None)
        made = {
            name: np.empty(_whole(self.specs[name], piece), piece.dtype)
            if name in self.axes
            else piece
            for name, piece in found.items()
            if name != streamed
        }
        pieces = self._pieces(found, chunks, made, streamed)
        if streamed is None:
            for _ in pieces:
                pass
            return dict(made)
        return {streamed: pieces, **made}

    def _pieces(
        self, found: Tensors, chunks: Iterator[QuantArray], made: Tensors, streamed: str | None
    ) -> Iterator[np.ndarray]:
        """Bytes of the streamed tensor; puts the parts of others where they belong."""
        assert self.axes is not None  # `tensors` has looked
        done = dict.fromkeys(found, 0)
        while True:
            for name in found:
                axis = self.axes.get(name)
                if name != streamed and axis is not None:
                    start, done[name] = done[name], done[name] + found[name].shape[axis]
                    made[name][(slice(None),) * axis + (slice(start, done[name]),)] = found[name]
            if streamed is not None:
                yield np.ascontiguousarray(found[streamed]).reshape(-1).view(np.uint8)
            part = next(chunks, None)
            if part is None:
                return
            found = self.encode(part)


def of_all_rows(source: Source, recipe: Callable[[Source], Recipe]) -> AllRows:
    """What several matrices [E, N, K] become: that of one with all their rows, whose tensors have
    the matrices' axis in front.

    Raises
    ------
    ValueError
        Where rows of two matrices, or all of them, share scales.
    """
    fmt, (count, rows, _) = source.format, source.shape
    tall = fmt.rule.block[0] if isinstance(fmt.rule.block, tuple) else 1
    if rows % tall or fmt.rule.block == "tensor" or fmt.rule.nested:
        raise ValueError(f"{fmt} of several matrices has scales that they share")
    made = recipe(_one_matrix(source))
    specs = {
        name: (kind, (count, first // count, *rest) if rest and count else (first, *rest))
        for name, (kind, (first, *rest)) in made.specs.items()
    }

    return AllRows(specs, made.encode, made.words, made.said, made.module, made.axes, made)


@dataclass(frozen=True)
class AllRows(Recipe):
    """What several matrices become: `matrix` is of one with all their rows; `given` is as it is."""

    matrix: Recipe | None = None
    given: Mapping[str, np.ndarray] = field(default_factory=dict)

    def tensors(self, source: Source) -> dict[str, np.ndarray | Iterator[np.ndarray]]:
        """As a Recipe's; arrays have the matrices' axis in front."""
        assert self.matrix is not None  # of_all_rows has set it
        found = self.matrix.tensors(_one_matrix(source))
        shaped = {
            name: part if isinstance(part, Iterator) else part.reshape(self.specs[name][1])
            for name, part in found.items()
            if name not in self.given
        }
        return {**shaped, **self.given}


def _one_matrix(source: Source) -> Source:
    shape = (math.prod(source.shape[:-1]), source.shape[-1])
    return replace(source, shape=shape, read=lambda: flattened(source.read()), rows=None)


def flattened(q: QuantArray) -> QuantArray:
    """A matrix of all rows of an array [E, N, K], whose blocks lie in rows."""
    shape = (math.prod(q.shape[:-1]), q.shape[-1])
    wanted = {part.name: part.shape for part in q.format.components(shape)}
    parts = {name: part.reshape(wanted[name]) for name, part in q.arrays().items()}
    return QuantArray(q.format, shape, q.dtype, parts, (0, 1))


def _whole(spec: tuple[Any, tuple[int, ...]], piece: np.ndarray) -> tuple[int, ...]:
    """The shape of an array that holds a whole tensor: of blocks, rows are in bytes."""
    kind, shape = spec
    return (*shape[:-1], piece.shape[-1]) if isinstance(kind, GgufType) else shape


def row_chunks(source: Source) -> Iterator[QuantArray]:
    """A matrix by rows, of about CHUNK elements: a multiple of 32 rows; else the whole array."""
    if len(source.shape) != 2:
        yield source.read()
        return
    count, columns = source.shape
    rows = max(CHUNK // max(columns, 1) // 32, 1) * 32
    if count <= rows:
        yield source.read()
        return
    whole = None if source.rows else source.read()
    for start in range(0, count, rows):
        stop = min(start + rows, count)
        if whole is not None:
            yield whole[start:stop]
        else:
            assert source.rows is not None  # above
            yield source.rows(start, stop)


class Writer(Protocol):
    """The side of a kind that writes: a module of this folder."""

    @property
    def KIND(self) -> str:
        """Its name."""
        ...

    @property
    def NEAREST(self) -> Mapping[int, str]:
        """Formats that the kind holds, by bits: what an array it cannot hold may become."""
        ...

    def recipe(self, source: Source) -> Recipe:
        """What an array becomes; ValueError says what would be lost."""
        ...

    def configuration(self, recipes: Sequence[Recipe], plain: Sequence[str]) -> dict[str, Any]:
        """What config.json says of a checkpoint; `plain`: modules that are not quantized.

        ValueError where the arrays cannot lie in one checkpoint.
        """
        ...


class Integers(NamedTuple):
    """Integers with a scale, (code - zero) * scale.

    Attributes
    ----------
    bits
        Of a code.
    group
        Columns that share a scale.
    zero
        The code of 0 in all groups; None where each has its own.
    """

    bits: int
    group: int
    zero: int | None


def integers_of(fmt: Format, shape: tuple[int, ...]) -> Integers | None:
    """A format whose numbers are (code - zero) * scale; None for others.

    >>> from cuquant.formats import get_format
    >>> integers_of(get_format("int4"), (8, 256)), integers_of(get_format("nf4"), (8, 256))
    (Integers(bits=4, group=128, zero=8), None)
    """
    scale = fmt.scale
    if not isinstance(fmt.codec, Uniform) or scale is None or scale.nested:
        return None
    if fmt.is_blocks and fmt.name not in GGML_INTEGERS:
        return None
    if fmt.offset not in (None, "zero_point") or scale.dtype not in FLOATS:
        return None
    if isinstance(scale.block, tuple):
        return None
    wide = min(scale.tile(1, shape[-1])[1], max(shape[-1], 1))
    return Integers(fmt.bits, wide, None if fmt.offset else fmt.codec.offset)


def codes_of(q: QuantArray) -> np.ndarray:
    """uint8 codes [rows, K]."""
    return q.codes().reshape(-1, q.shape[-1])


def group_scales(q: QuantArray, group: int) -> np.ndarray:
    """Scales [rows, ceil(K / group)], one for each group also where the whole array has one."""
    return _by_group(np.asarray(q.scale), q.shape, group)


def group_zeros(q: QuantArray, group: int) -> np.ndarray:
    """Zero points uint8 [rows, ceil(K / group)]."""
    found = integers_of(q.format, q.shape)
    assert found is not None
    zero = q.zero_point if found.zero is None else np.uint8(found.zero)
    return _by_group(np.asarray(zero), q.shape, group)


def group_minimums(q: QuantArray, group: int) -> np.ndarray:
    """Minimums [rows, ceil(K / group)]."""
    return _by_group(np.asarray(q.minimum), q.shape, group)


def _by_group(values: np.ndarray, shape: tuple[int, ...], group: int) -> np.ndarray:
    rows, groups = int(np.prod(shape[:-1], dtype=np.int64)), -(-shape[-1] // group)
    if not values.ndim:
        return np.broadcast_to(values, (rows, groups))
    there = values.reshape(rows, values.shape[-1])
    if there.shape[1] == groups:
        return there
    return np.repeat(there, -(-groups // there.shape[1]), axis=1)[:, :groups]


def finer(group: int, columns: int, size: int) -> bool:
    """Whether groups of `size` columns lie within groups of `group`, or of a whole row."""
    return group % size == 0 or group >= columns


def common_zero(source: Source, found: Integers) -> int | None:
    """The zero point that all groups of an array have; None where they differ.

    Raises
    ------
    ValueError
        For one that is beyond the bits of a code, of which kinds pack zero points.
    """
    if found.zero is not None:
        return found.zero
    zeros = np.asarray(source.read().zero_point)
    if (largest := int(zeros.max(initial=0))) >> found.bits:
        raise ValueError(f"a zero point is {largest}, which {found.bits} bits do not hold")
    return int(zeros.flat[0]) if zeros.size and (zeros == zeros.flat[0]).all() else None


def holds(dtype: np.dtype, values: np.ndarray) -> bool:
    """Whether a dtype has all these numbers; NaN is none of them."""
    with np.errstate(over="ignore"):
        return bool((values.astype(dtype).astype(np.float32) == values.astype(np.float32)).all())


def scale_tag(source: Source, tags: Iterable[str] = ("F16", "BF16", "F32")) -> str:
    """The first dtype of a kind that holds an array's scales; it is read where that is not known.

    Raises
    ------
    ValueError
        Where none does.
    """
    tags = tuple(tags)
    if (stored := FLOATS.get(source.format.rule.dtype)) in tags and stored in SCALE_TAGS:
        return stored
    narrow = [tag for tag in tags if tag in SCALE_TAGS]
    if narrow and source.shape and 0 not in source.shape:
        scales = np.asarray(source.read().scale)
        for tag in narrow:
            if holds(SCALE_TAGS[tag], scales):
                return tag
    if "F32" in tags:
        return "F32"
    raise ValueError(f"its {source.format.rule.dtype} scales are not those of {' or '.join(tags)}")


def as_tag(scales: np.ndarray, tag: str) -> np.ndarray:
    """Scales in the dtype that `scale_tag` has chosen."""
    return np.ascontiguousarray(scales.astype(SCALE_TAGS.get(tag, np.dtype(np.float32))))


def dense_words(q: QuantArray, pad: int) -> np.ndarray:
    """int32 [rows, words]: the codes of a matrix densely in words; `pad` fills the last one."""
    packing, (_, columns) = q.format.row_packing, q.shape
    dense = Packing(packing.bits, "dense")
    is_dense = packing == dense or packing == Packing(packing.bits, "low")
    if (
        is_dense
        and q.format.is_plain
        and not q.format.is_blocks
        and columns * packing.bits % 32 == 0
    ):
        return words_of(q.arrays()["packed"])
    return words_of(dense.pack(codes_of(q), pad))


def words_of(packed: np.ndarray) -> np.ndarray:
    """Packed rows, of bytes or words, as int32 words; rows are whole words."""
    return np.ascontiguousarray(packed).view(np.int32)


def same(recipes: Sequence[Recipe], key: str, kind: str) -> Any:
    """What all arrays say under a key; ValueError where two differ."""
    found = {recipe.said[key]: recipe for recipe in recipes}
    if len(found) > 1:
        (a, one), (b, other) = list(found.items())[:2]
        raise ValueError(
            f"{kind} has one {key} for all arrays: {one.module} has {a}, {other.module} has {b}"
        )
    return next(iter(found), None)


def group_size_of(recipes: Sequence[Recipe]) -> int:
    """The columns of a group that most arrays have; -1 where all have one for a row, of any length.

    `said` holds "group_size", columns, and "groups" of a row.
    """
    sizes = [made.said["group_size"] for made in recipes if made.said["groups"] > 1]
    if not sizes:
        whole = {made.said["group_size"] for made in recipes}
        return whole.pop() if len(whole) == 1 else -1
    return max(dict.fromkeys(sizes), key=sizes.count)


def fits_group(made: Recipe, size: int) -> bool:
    """Whether an array has groups of `size`, -1 for a row."""
    return made.said["group_size"] == size or (size == -1 and made.said["groups"] == 1)
