"""QuantEmbedding: a table whose rows are decoded as they are looked up."""

from typing import Any

import torch
from torch import nn

from cuquant.array.packed_weight import ROWS_LAYOUT, PackedWeight, unpack
from cuquant.formats import Format, get_format
from cuquant.formats.names import FormatName, FormatOptions, Unpack
from cuquant.torch import codes
from cuquant.torch.holder import Holder, quantized_weight
from cuquant.torch.spec import Weight, WeightSpec
from cuquant.torch.weight import QuantWeight


class QuantEmbedding(Holder, nn.Embedding):  # pyright: ignore[reportIncompatibleVariableOverride]
    """The rows of a quantized table by their numbers: `cuquant.embedding`.

    A lookup reads and decodes the rows that are asked for. The components are frozen parameters, as
    a `QuantLinear`'s are, and state_dicts look the same. With a head it is one array where the head
    has its weight: `head.weight = embedding.weight`, as in torch, and so `quantize_` makes it. What
    is looked up has the weight's dtype, which `.to(dtype)` changes, and mixed precision does not.

    Parameters
    ----------
    weight
        QuantArray [V, D] (V = num_embeddings, D = embedding_dim), of NumPy, CuPy or torch arrays,
        whose memory is shared; a PackedWeight is unpacked.
    padding_idx
        As nn.Embedding has it; a frozen table looks it up as any other row.

    Attributes
    ----------
    num_embeddings, embedding_dim
        V and D.
    weight
        A tensor [V, D] that decodes where it is read.
    quantized
        The QuantArray [V, D].

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit.

    Examples
    --------
    >>> import torch
    >>> import cuquant as cq
    >>> import cuquant.torch
    >>> q = cq.quantize(torch.randn(100, 64), "q8_0")
    >>> table = cuquant.torch.QuantEmbedding(q)
    >>> table
    QuantEmbedding(100, 64, format=q8_0)
    >>> ids = torch.tensor([[3, 1]])
    >>> torch.equal(table(ids), q.dequantize()[ids])
    True
    """

    def __init__(self, weight: Weight, padding_idx: int | None = None) -> None:
        Holder.__init__(self, weight)
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, None, 2.0
        self.scale_grad_by_freq = self.sparse = False

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        format: FormatName | str | Format = "int8",
        **format_options: Unpack[FormatOptions],
    ) -> "QuantEmbedding":
        """A table that looks up what `embedding` does, its weight quantized where it lies.

        Raises
        ------
        TypeError, ValueError
            For another dtype, a `max_norm`, or where the format cannot hold the shape.

        Examples
        --------
        >>> import torch
        >>> import cuquant.torch
        >>> cuquant.torch.QuantEmbedding.from_embedding(torch.nn.Embedding(100, 64), "int4")
        QuantEmbedding(100, 64, format=int4)
        """
        if not isinstance(embedding, nn.Embedding) or isinstance(embedding, QuantEmbedding):
            kind = type(embedding).__name__
            raise TypeError(f"embedding must be a float nn.Embedding, got {kind}")
        if embedding.max_norm is not None:
            raise ValueError("max_norm changes the rows that are looked up; a codes' table cannot")
        fmt = get_format(format, **format_options)
        weight = quantized_weight(embedding.weight.detach(), fmt, prepack=False)
        return cls(weight, embedding.padding_idx).train(embedding.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows [*ids.shape, D] of the weight's dtype; ids are integers of any shape.

        IndexError for ids on the CPU that no row has; on a GPU they give rows of NaN.
        """
        return self._look_up(input)

    def extra_repr(self) -> str:
        """What repr says of the layer."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, {self._said()}"

    def prepack_(self) -> "QuantEmbedding":
        """Nothing: rows are read as they lie."""
        return self

    def _look_up(self, ids: Any) -> torch.Tensor:
        text, _, shape, dtype = self._words
        return codes.embedding(ids, self._parts(), text, shape, (0, 1), dtype)

    def _take(self, weight: Weight) -> None:
        super()._take(unpack(weight) if isinstance(weight, PackedWeight) else weight)

    def _share(self, weight: QuantWeight) -> None:
        by_rows = weight._held[0].layout == ROWS_LAYOUT  # as a table is read
        super()._share(weight if by_rows else QuantWeight(weight._layer.unpack_()))

    def _took(self, spec: WeightSpec) -> None:
        self.num_embeddings, self.embedding_dim = spec.shape
