"""Patches of images under a filter as a side of a product of codes: a convolution."""

import struct
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from cuquant.ops.matmul.coded import Coded


class Window(NamedTuple):
    """How a filter moves over images, as (down, across) each.

    Attributes
    ----------
    image, taps
        Sizes of an image and of the filter.
    stride
        From patch to patch.
    padding
        Zeros around an image.
    """

    image: tuple[int, int]
    taps: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @property
    def out(self) -> tuple[int, int]:
        """The output's size; below 1 where the filter does not fit."""
        down, across = (
            (size + 2 * pad - tap) // step + 1 for size, tap, step, pad in zip(*self, strict=True)
        )
        return down, across


@dataclass(frozen=True)
class Patches:
    """The struct of the same name in matmul/patches.cuh.

    Attributes
    ----------
    side
        Pixels as rows.
    window
        How the filter moves.
    channels
        Bytes of a pixel that are multiplied, a multiple of 16.
    """

    side: Coded
    window: Window
    channels: int

    struct: ClassVar[str] = "Patches"

    @property
    def kind(self) -> str:
        return self.side.kind

    def pack(self) -> bytes:
        """The struct's 168 bytes."""
        image, taps, stride, padding = self.window
        down, across = self.window.out
        divisors = down * across, across, max(self.channels, 1), taps[1]
        numbers = struct.pack("<6i", *image, *stride, *padding)
        return self.side.pack() + numbers + b"".join(map(_divisor, divisors))


def _divisor(n: int) -> bytes:
    """matmul/patches.cuh's Divisor."""
    shift = (n - 1).bit_length()
    factor = ((1 << 32) * ((1 << shift) - n)) // n + 1
    return struct.pack("<3I", n, factor, shift)
