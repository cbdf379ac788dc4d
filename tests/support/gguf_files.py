"""Files for the tests of the GGUF container: bytes by hand, and what `gguf` makes."""

import struct

import numpy as np

from cuquant.io.container.gguf import TYPES, GgufReader, GgufWriter, Strings

# Letters of `struct` by the number of the value type.
LETTERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


def text(value, order="<"):
    """A string as it is stored."""
    value = value.encode() if isinstance(value, str) else value
    return struct.pack(order + "Q", len(value)) + value


def scalar(key, kind, value, order="<"):
    """A metadata entry of a number."""
    return text(key, order) + struct.pack(f"{order}I{LETTERS[kind]}", kind, value)


def string(key, value, order="<"):
    return text(key, order) + struct.pack(order + "I", 8) + text(value, order)


def array(key, kind, count, stored=b"", order="<"):
    """A metadata entry of an array, whose elements are given as they are stored."""
    return text(key, order) + struct.pack(order + "IIQ", 9, kind, count) + stored


def tensor(name, dims=(4,), kind=0, offset=0, order="<"):
    """A tensor's entry; dims are the fastest first, as in the file."""
    axes = struct.pack(f"{order}I{len(dims)}Q", len(dims), *dims)
    return text(name, order) + axes + struct.pack(order + "IQ", kind, offset)


def container(
    entries=(), tensors=(), data=b"", *, magic=b"GGUF", version=3, counts=None, order="<", align=32
):
    """The bytes of a file; `counts` are the tensors and entries that it tells of, if not these."""
    told = counts or (len(tensors), len(entries))
    header = magic + struct.pack(order + "IQQ", version, *told)
    header += b"".join(entries) + b"".join(tensors)
    return header + bytes(-len(header) % align) + data if data else header


def sample(kind, shape, seed=0):
    """Random bytes as the array that holds a tensor of a type."""
    shape = kind.stored_shape(shape)
    size = int(np.prod(shape)) * kind.dtype.itemsize
    codes = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return codes.view(kind.dtype).reshape(shape)


def samples_of_all_types():
    """(type, array) by name, two rows of two blocks each, and plain numbers."""
    kinds = {kind.name.lower(): kind for kind in TYPES.values()}
    return {
        name: (kind, sample(kind, (2, 2 * kind.elements), kind.id)) for name, kind in kinds.items()
    }


def write_file(path, arrays, metadata=None, **options):
    """Write (type, array) by name; the paths of the files."""
    specs = {name: (kind, shape_of(kind, array)) for name, (kind, array) in arrays.items()}
    with GgufWriter(path, specs, metadata, **options) as writer:
        for name, (_, array) in arrays.items():
            writer.write(name, array)
    return writer.paths


def shape_of(kind, array):
    """In elements, of the array that holds a tensor."""
    if kind.is_plain:
        return array.shape
    return (*array.shape[:-1], array.shape[-1] // kind.nbytes * kind.elements)


def copy_file(source, target, **options):
    """Read a file and write what it holds."""
    with GgufReader(source) as reader:
        specs = {name: (info.type, info.shape) for name, info in reader.tensors.items()}
        with GgufWriter(target, specs, reader.metadata, **options) as writer:
            for name in reader.tensors:
                writer.write_raw(name, reader.chunks(name))
    return writer.paths


def plain(value):
    """A metadata value in Python's own types, to compare with what another reader gives."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, (Strings, tuple)):
        return [plain(element) for element in value]
    return value


def contents(path):
    """What a reader of ours finds: metadata with their types, and the tensors' bytes."""
    with GgufReader(path) as reader:
        tensors = {
            name: (info.type.name, info.shape, reader.raw(name).tobytes())
            for name, info in reader.tensors.items()
        }
        return {key: typed(value) for key, value in reader.metadata.items()}, tensors


def typed(value):
    """A value with what tells its type, and floats by their bits."""
    if isinstance(value, (np.generic, np.ndarray)):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, (Strings, tuple)):
        return type(value).__name__, [typed(element) for element in value]
    return type(value).__name__, value
