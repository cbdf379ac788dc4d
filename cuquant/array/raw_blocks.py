"""RawBlocks: a tensor of a GGUF file whose type has no codec here: its bytes, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

from cuquant import interop


@dataclass(frozen=True, eq=False, repr=False)
class RawBlocks:
    """Bytes of a type of ggml's that cuquant does not decode; they can be inspected and written.

    Attributes
    ----------
    type
        ggml's name, such as "IQ2_XS".
    shape
        Of the tensor.
    blocks
        uint8 [rows..., bytes of a row].
    """

    type: str
    shape: tuple[int, ...]
    blocks: Any

    @property
    def nbytes(self) -> int:
        """Of the blocks."""
        return math.prod(tuple(self.blocks.shape))

    @property
    def bits_per_element(self) -> float:
        """8 * nbytes / elements; 0 for an empty tensor."""
        size = math.prod(self.shape)
        return self.nbytes * 8 / size if size else 0.0

    @property
    def device(self) -> str:
        """ "cpu", "cuda:0", ..."""
        return interop.device(self.blocks)

    def dequantize(self, *_: object, **__: object) -> NoReturn:
        """TypeError: cuquant has no codec of this type."""
        raise TypeError(
            f"{self.type} is a type of ggml's that cuquant does not decode yet; "
            "gguf.quants.dequantize(q.blocks, gguf.GGMLQuantizationType.NAME) does"
        )

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        self.dequantize()

    def __repr__(self) -> str:
        return (
            f"RawBlocks({self.type}, shape={self.shape}, "
            f"{self.bits_per_element:.4g} bits/element, device={self.device})"
        )
