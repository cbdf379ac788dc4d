"""Every quantization format as a value: `Format`, its pieces and the catalogue."""

from cuquant.formats.catalogue import ALIASES, MAPS, get_format, list_formats
from cuquant.formats.codecs import Codebook, Minifloat, Uniform
from cuquant.formats.format import Component, Format
from cuquant.formats.packing import Packing
from cuquant.formats.scales import Scale

__all__ = [
    "ALIASES",
    "MAPS",
    "Codebook",
    "Component",
    "Format",
    "Minifloat",
    "Packing",
    "Scale",
    "Uniform",
    "get_format",
    "list_formats",
]
