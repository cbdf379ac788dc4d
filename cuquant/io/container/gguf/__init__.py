"""The GGUF container of llama.cpp: a bounded reader for untrusted files, a streaming atomic writer.

A file is a header (metadata of 13 value types, then names, shapes, types and offsets of tensors)
and aligned data; it may be split over several files. This module knows types, blocks and bytes;
what a group of tensors means is decided elsewhere.
Source of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from cuquant.io.container.gguf.header import MAX_HEADER_BYTES, MAX_TENSORS
from cuquant.io.container.gguf.reader import GgufReader
from cuquant.io.container.gguf.types import TYPES, GgufTensor, GgufType, gguf_type
from cuquant.io.container.gguf.values import Strings, Value
from cuquant.io.container.gguf.writer import GgufWriter

__all__ = [
    "MAX_HEADER_BYTES",
    "MAX_TENSORS",
    "TYPES",
    "GgufReader",
    "GgufTensor",
    "GgufType",
    "GgufWriter",
    "Strings",
    "Value",
    "gguf_type",
]
