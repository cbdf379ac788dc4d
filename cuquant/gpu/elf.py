"""What a compiled kernel says about itself: name, registers, memory and parameters.

A cubin is an ELF file. Beside the usual sections it has `.nv.info` (a list of attributes of all
functions) and `.nv.info.NAME` (of one); both are read here, so that a kernel's resources are known
on a machine without a GPU.
"""

import importlib.util
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cuquant.errors import FormatError

_ELF = b"\x7fELF\x02"  # of 64 bits
_ENTRY = 0x10  # in a symbol's st_other: a kernel, not a function that kernels call
_REGISTERS, _FRAME, _STACK = 0x2F, 0x11, 0x12  # attributes of `.nv.info`: symbol, number
_MAX_THREADS, _PARAMETER = 0x05, 0x17  # attributes of `.nv.info.NAME`
_RESERVED = b".nv.reservedSmem.offset0"  # a symbol: the driver's 1024 bytes are counted as shared
_MOST_THREADS, _REGISTER_FILE = 1024, 65536


@dataclass(frozen=True)
class Resources:
    """What a kernel takes.

    Attributes
    ----------
    name
        The mangled name, by which the driver finds it.
    registers
        Of one thread.
    local_bytes
        Of one thread: arrays that are not in registers, spilled registers and the calls' stack.
    shared_bytes
        Of one block, without the dynamic ones.
    threads_limit
        The most threads of a block: launch bounds, or what the registers suffice for.
    parameters
        The size of each parameter in bytes; empty where it is not known.
    """

    name: str
    registers: int
    local_bytes: int
    shared_bytes: int
    threads_limit: int
    parameters: tuple[int, ...] = ()


def completed(cubin: bytes) -> bytes:
    """The cubin with its last byte, a zero, which CuPy 14 takes for the end of a string.

    Whether it lacks one is seen from where the program headers end, the last thing in the file.
    """
    (start,) = struct.unpack_from("<Q", cubin, 32)
    size, count = struct.unpack_from("<HH", cubin, 54)
    return cubin + bytes(max(0, start + size * count - len(cubin)))


def disassembled(cubin: bytes) -> str | None:
    """The SASS of a cubin; None where there is neither nvdisasm nor cuobjdump.

    They are looked for on the path, in NVIDIA's wheels (pip install nvidia-cuda-nvdisasm) and in
    /usr/local/cuda.
    """
    command = next((c for c in (_tool("nvdisasm", "-c"), _tool("cuobjdump", "-sass")) if c), None)
    if command is None or not cubin.startswith(_ELF):
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        done = subprocess.run([*command, str(file)], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _tool(name: str, option: str) -> list[str] | None:
    spec = importlib.util.find_spec("nvidia")  # a namespace: nothing of it is run
    roots = (spec.submodule_search_locations or ()) if spec else ()
    wheels = [str(folder) for root in roots for folder in Path(root).glob("cu*/bin")]
    path = os.pathsep.join([os.environ.get("PATH", ""), *wheels, "/usr/local/cuda/bin"])
    found = shutil.which(name, path=path)
    return [found, option] if found else None


class _Section(NamedTuple):
    name: str
    offset: int
    size: int
    linked: int  # the section that holds a symbol table's names
    bits: bool  # whether it has bytes in the file


def resources(cubin: bytes, entry: str | None = None) -> Resources:
    """Read a cubin.

    Parameters
    ----------
    cubin
        The file's bytes.
    entry
        The kernel's name in namespace cuquant, without template arguments; None where the file has
        one kernel.

    Raises
    ------
    FormatError
        Where the bytes are no cubin, or it does not have exactly one such kernel.
    """
    try:
        return _resources(cubin, entry)
    except FormatError:
        raise
    except (struct.error, LookupError, ValueError) as error:
        raise FormatError(f"a cubin that cannot be read: {error}") from error


def _resources(cubin: bytes, entry: str | None) -> Resources:
    sections = {section.name: section for section in _sections(cubin)}
    symbols = _symbols(cubin, sections)
    start = f"_ZN7cuquant{len(entry)}{entry}" if entry else ""
    kernels = [
        (number, name)
        for number, (name, other) in enumerate(symbols)
        if other & _ENTRY and name.startswith(start)
    ]
    if len(kernels) != 1:
        found = ", ".join(name for _, name in kernels) or "none"
        raise FormatError(f"a cubin must have one kernel {entry or ''}, and has: {found}")
    number, name = kernels[0]
    sizes = {attribute: 0 for attribute in (_REGISTERS, _FRAME, _STACK)}
    for attribute, value in _attributes(cubin, sections[".nv.info"]):
        if attribute in sizes:
            symbol, size = struct.unpack_from("<II", value)
            if symbol == number:
                sizes[attribute] = size
    own = list(_attributes(cubin, sections[f".nv.info.{name}"]))
    shared = sections[f".nv.shared.{name}"].size if f".nv.shared.{name}" in sections else 0
    reserved = 1024 if shared and any(n.encode() == _RESERVED for n, _ in symbols) else 0
    registers = sizes[_REGISTERS]
    return Resources(
        name,
        registers,
        max(sizes[_FRAME], sizes[_STACK]),
        shared - reserved,
        _threads_limit(own, registers),
        _parameters(own),
    )


def _sections(cubin: bytes) -> Iterator[_Section]:
    if not cubin.startswith(_ELF):
        raise FormatError("no cubin: it does not start as a 64-bit ELF file does")
    (start,) = struct.unpack_from("<Q", cubin, 40)
    entry_size, count, names_at = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQII", cubin, start + i * entry_size) for i in range(count)]
    names = headers[names_at][4]
    for name, kind, _, _, offset, size, linked, _ in headers:
        has_bits = kind != 8
        if has_bits and offset + size > len(cubin):
            raise FormatError("a cubin that ends before its sections do")
        yield _Section(_text(cubin, names + name), offset, size, linked, has_bits)


def _symbols(cubin: bytes, sections: dict[str, _Section]) -> list[tuple[str, int]]:
    """Name and st_other of each symbol."""
    table, names = sections[".symtab"], sections[".strtab"]
    found = []
    for at in range(table.offset, table.offset + table.size, 24):
        name, _, other = struct.unpack_from("<IBB", cubin, at)
        found.append((_text(cubin, names.offset + name), other))
    return found


def _attributes(cubin: bytes, section: _Section) -> Iterator[tuple[int, bytes]]:
    """(attribute, value) of a `.nv.info` section.

    Each starts with the kind of its value: 4 is a 16-bit length and that many bytes, the others
    are two bytes in place of the length.
    """
    at, end = section.offset, section.offset + section.size
    while at < end:
        kind, attribute, short = struct.unpack_from("<BBH", cubin, at)
        at += 4
        length = short if kind == 4 else 0
        yield attribute, cubin[at : at + length] if length else struct.pack("<H", short)
        at += length


def _threads_limit(own: list[tuple[int, bytes]], registers: int) -> int:
    for attribute, value in own:
        if attribute == _MAX_THREADS:
            x, y, z = struct.unpack_from("<III", value)
            return x * y * z
    per_warp = 32 * max(8, -(-registers // 8) * 8)  # registers are given out by eights
    return min(_MOST_THREADS, _REGISTER_FILE // per_warp * 32)


def _parameters(own: list[tuple[int, bytes]]) -> tuple[int, ...]:
    """Sizes by position; an attribute is: an index, position and offset, and size << 18 | flags."""
    sizes = {}
    for attribute, value in own:
        if attribute == _PARAMETER:
            _, position, _, flags = struct.unpack_from("<IHHI", value)
            sizes[position] = flags >> 18
    return tuple(sizes[position] for position in sorted(sizes))


def _text(cubin: bytes, start: int) -> str:
    return cubin[start : cubin.index(b"\0", start)].decode()
