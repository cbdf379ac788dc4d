"""The safetensors container: a bounded reader for untrusted files, a streaming atomic writer.

A file is 8 bytes (header length, little-endian), a JSON header, then the data section. This module
knows names, dtypes and bytes; what a group of tensors means is decided elsewhere.
Source of the format: https://github.com/huggingface/safetensors#format
"""

from cuquant.io.container.safetensors.header import MAX_HEADER_BYTES, MAX_TENSORS
from cuquant.io.container.safetensors.reader import SafetensorsReader
from cuquant.io.container.safetensors.tensors import TensorInfo, numpy_dtype, tag_of
from cuquant.io.container.safetensors.writer import DATA_ALIGNMENT, SafetensorsWriter

__all__ = [
    "DATA_ALIGNMENT",
    "MAX_HEADER_BYTES",
    "MAX_TENSORS",
    "SafetensorsReader",
    "SafetensorsWriter",
    "TensorInfo",
    "numpy_dtype",
    "tag_of",
]
