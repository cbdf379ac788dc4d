"""What a file is that is no safetensors file, and what to type instead."""

import json
import os
import re
from pathlib import Path
from typing import BinaryIO

from cuquant.io.container import downloads

HEAD = 512  # bytes that are looked at
MAX_INDEX_BYTES = 1 << 26
NAMED = 5  # files that a message lists

SAVE = "python -c \"import cuquant, {}; cuquant.save('OUT.safetensors', {})\""
FROM_TORCH = SAVE.format(  # training's checkpoints have the weights under a name, or are lists
    "torch; s = lambda d: d.state_dict() if hasattr(d, 'state_dict') else d; "
    "d = s(torch.load(open('{}', 'rb'), map_location='cpu', weights_only=True)); "
    "d = {{f'{{i}}.{{n}}': t for i, e in enumerate(d) for n, t in s(e).items()}} "
    "if isinstance(d, (list, tuple)) else "
    "s(next((d[k] for k in ('state_dict', 'model_state_dict', 'model') if k in d), d))",
    "{{n: t.detach() for n, t in d.items() if torch.is_tensor(t)}}",
)
FROM_NPZ = SAVE.format("numpy", "dict(numpy.load('{}'))")
FROM_NPY = SAVE.format("numpy", "{{'array': numpy.load('{}')}}")
TORCH = (
    "is a pickle of PyTorch, which may run code when it is loaded (where torch refuses it because "
    "it holds a whole nn.Module, say weights_only=False if you trust the file); "
    f"convert it: {FROM_TORCH}"
)

# First bytes, and what a message says of the file called {}.
MAGICS = (
    (b"GGUF", "is a GGUF file; give the safetensors files that it was made from"),
    (b"\x93NUMPY", f"is one array of NumPy; convert it: {FROM_NPY}"),
    (b"\x80\x02", TORCH), (b"\x80\x03", TORCH), (b"\x80\x04", TORCH), (b"\x80\x05", TORCH),
    (b"\x89HDF\r\n", "is an HDF5 file, such as Keras writes; export it to safetensors"),
    *downloads.MAGICS,
)  # fmt: skip


def other_kind(file: BinaryIO, path: Path) -> str | None:
    """What a file that is no safetensors file is and what to do with it; None if unknown."""
    file.seek(0)
    head = file.read(HEAD) or b""
    length, size = int.from_bytes(head[:8], "little"), os.fstat(file.fileno()).st_size
    if head[8:9] in (b"{", b" ", b"\t", b"\n", b"\r") and length <= size - 8:
        return None  # a safetensors file, though a damaged one
    name = str(path) if re.fullmatch(r"[\w./+-]+", str(path)) else "IN"  # it goes into a command
    for magic, text in MAGICS:
        if head.startswith(magic):
            return text.format(name)
    if head.startswith(b"PK\x03\x04"):
        return _archive(head, name)
    if head[257:262] == b"ustar":
        return "is a tar archive; unpack it first"
    if head.lstrip()[:1] in (b"{", b"["):
        return _json(file)
    if path.suffix.lower() == ".onnx":
        return "is an ONNX model; give the safetensors files that it was exported from"
    return None


def _archive(head: bytes, name: str) -> str:
    """A zip file: NumPy's or PyTorch's, by the name of its first entry."""
    entry = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    if entry.endswith(b".npy"):
        return f"is a .npz file of NumPy; convert it: {FROM_NPZ.format(name)}"
    if entry.endswith((b"/data.pkl", b"/.format_version", b"/byteorder")):
        return TORCH.format(name)
    return "is a zip archive; unpack it first"


def _json(file: BinaryIO) -> str:
    """The index of a sharded checkpoint, or other JSON."""
    file.seek(0)
    try:
        mapped = json.loads(file.read(MAX_INDEX_BYTES))["weight_map"]
        shards = {name for name in mapped.values() if isinstance(name, str)}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return "is a JSON file; give a .safetensors file, or the folder of a model"
    return (
        "is the index of a sharded checkpoint and holds no tensors; "
        f"give its folder, or its shards one by one: {named(shards)}"
    )


def folder_advice(folder: Path) -> str:
    """What a message says of a folder."""
    found = {path.name for path in folder.glob("*.safetensors")}
    if found:
        return f"is a directory; give a file in it: {named(found)}"
    return "is a directory without .safetensors files; give one .safetensors file"


def named(names: set[str]) -> str:
    """The first names in order, and how many there are.

    >>> named({"b", "a"}), named(set("abcdefg"))
    ('a, b', 'a, b, c, d, e and 2 more')
    """
    shown = ", ".join(name[:80] for name in sorted(names)[:NAMED])
    return shown + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
