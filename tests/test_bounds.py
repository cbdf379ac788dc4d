"""Time and memory follow the data: arrays without elements, and blocks larger than the array.

In a process of its own, with little memory and a clock that rings: what goes wrong here hangs.
"""

import json
import struct
import subprocess
import sys

import numpy as np
import pytest

import cuquant as cq

resource = pytest.importorskip("resource", reason="Windows limits no process's memory")

PRELUDE = """
import resource, signal, sys, tempfile
import numpy as np, cuquant as cq
room = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (room + (1 << 30),) * 2)
def late(*_):
    raise SystemExit(f"still at work: {doing}")
signal.signal(signal.SIGALRM, late)
def each(*calls):
    global doing
    for doing, call in calls:
        signal.alarm(60)
        call()
        signal.alarm(0)
path = tempfile.mkdtemp() + "/file"
def through_file(arrays):
    cq.save(path, arrays)
    return cq.load(path)
"""

EMPTY = """
for name in names:
    for shape in shapes:
        x = np.empty(shape, np.float32)
        how = f"{name} {shape}"
        q = cq.quantize(x, name)
        block = q.format.block_size
        tall = block[0] if isinstance(block, tuple) else 1
        none = np.empty((0, shape[-1]), np.float32)
        each(
            (f"quantize {how}", lambda: cq.quantize(x, name)),
            (f"quantize raise {how}", lambda: cq.quantize(x, name, nonfinite="raise")),
            (f"quantize out {how}", lambda: cq.quantize(x, name, out=q)),
            (f"dequantize {how}", lambda: q.dequantize("float16")),
            (f"codes {how}", lambda: (q.codes(), q.packed, q.scale, q.minimum)),
            (f"rows {how}", lambda: q[0:5] if tall == 1 or not shape[0] else q[0:tall]),
            (f"some rows {how}", lambda: tall > 1 or (q[::-2], q[[0, 0]] if shape[0] else q)),
            (f"columns {how}", lambda: q[..., 0:256]),
            (f"join {how}", lambda: cq.concatenate([q[0:tall], q[0:tall]])),
            (f"file {how}", lambda: through_file({"w": q, "p": cq.prepack(q)})["w"].dequantize()),
            (f"prepack {how}", lambda: cq.unpack(cq.prepack(q)).codes()),
            (f"error {how}", lambda: cq.error(x, q)),
        )
        if len(shape) == 2:
            each(
                (f"linear {how}", lambda: cq.linear(none, q)),
                (f"linear packed {how}", lambda: cq.linear(none, cq.prepack(q))),
                (f"matmul {how}", lambda: cq.matmul(none, q.T)),
                (f"swiglu {how}", lambda: cq.swiglu(none, q, q)),
            )
        assert q.dequantize().shape == q.codes().shape == shape and q.nbytes < 100
"""


def run(code: str, **names: object) -> None:
    given = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + given + code], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, (done.stderr or done.stdout)[-2000:]


def by_blocks() -> list[str]:
    """Every format, with blocks whose scales are not one a row: a row without elements has one."""
    found = []
    for name in cq.list_formats():
        found.append(f"{name}:64" if cq.get_format(name).block_size == "row" else name)
    return found


def test_arrays_without_elements_return_at_once():
    shapes = [(2**54, 0), (0, 2**54), (4, 2**50, 0), (2**20, 0, 2**20)]
    names = [*by_blocks(), "nf4+dq", "int8:tensor", "fp8_e4m3:128x128", "k3+word", "k5+planes"]
    run(EMPTY, names=names, shapes=shapes)


def test_the_most_rows_that_numpy_holds():
    shapes = [(2**60, 0), (0, 2**60)]
    run(EMPTY, names=["nf4", "k3"], shapes=shapes)
    with pytest.raises(ValueError, match="more than NumPy's arrays can be"):  # 18 bytes a block
        cq.quantize(np.empty((2**60, 0), np.float32), "q4_0")


def test_blocks_larger_than_the_array_take_no_memory():
    code = """
top = 2**31 - 8
for name in ("nf4", "int8", "uint4", "k3", "int1", "mxfp4", "nvfp4", "fp6_e2m3"):
    for block in (top, (top, 8), (8, top), (top, top), (1, top), (top, 1)):
        for shape in ((2, 64), (64, 2), (3, 2, 64), (1, 1), (0, 8)):
            fmt = cq.get_format(name, block_size=block)
            x = np.ones(shape, np.float32)
            q = cq.quantize(x, fmt)
            each(
                (f"stochastic {fmt} {shape}", lambda: cq.quantize(x, fmt, stochastic=True)),
                (f"dequantize {fmt} {shape}", lambda: (q.dequantize(), q.codes())),
                (f"file {fmt} {shape}", lambda: through_file({"w": q})["w"].dequantize()),
                (f"slice {fmt} {shape}", lambda: q[0 : shape[0]].dequantize()),
                (f"prepack {fmt} {shape}", lambda: cq.unpack(cq.prepack(q)).codes()),
            )
            assert len(np.unique(q.dequantize())) <= 1, fmt
            if len(shape) == 2:
                each((f"linear {fmt} {shape}", lambda: cq.linear(x, q)))
                each((f"linear {fmt} {shape}", lambda: cq.linear(x, cq.prepack(q))))
"""
    run(code)


@pytest.mark.parametrize(
    ("fmt", "shape", "options", "parts"),
    [
        ("nf4", [2**58, 0], {}, {"packed": ("U8", [2**58, 0]), "scale": ("F32", [2**58, 0])}),
        ("nf4", [0, 2**58], {}, {"packed": ("U8", [0, 2**57]), "scale": ("F32", [0, 2**52])}),
        (
            "nf4",
            [2, 64],
            {"block_size": [2**31 - 8, 8]},
            {"packed": ("U8", [2, 32]), "scale": ("F32", [1, 8])},
        ),
    ],
)
def test_small_files_with_large_shapes(fmt, shape, options, parts, tmp_path):
    """A few hundred bytes that claim 2^58 rows, or a block of 2^31 rows."""
    header, components, at = {}, {}, 0
    for name, (dtype, extents) in parts.items():
        size = {"U8": 1, "F32": 4}[dtype]
        for extent in extents:
            size *= extent
        components[name] = {"dtype": {"U8": "uint8", "F32": "float32"}[dtype], "shape": extents}
        header[f"w.{name}"] = {"dtype": dtype, "shape": extents, "data_offsets": [at, at + size]}
        at += size
    said = {"format": fmt, "options": options, "shape": shape, "axes": [0, 1], "dtype": "float32"}
    entries = {"version": 1, "arrays": {"w": {**said, "components": components}}}
    header["__metadata__"] = {"cuquant": json.dumps(entries)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = tmp_path / "f"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    assert path.stat().st_size < 1000
    code = "q = cq.load(where)['w']\neach(('decode', lambda: (q.dequantize(), q.codes())))"
    run(code, where=str(path))
