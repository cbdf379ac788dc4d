"""Arrays of more than 2^31 elements on a GPU: the rows around the edges are as NumPy's."""

import kernel_cases as cases
import numpy as np
import pytest
from kernel_cases import differences, same_values

import cuquant as cq

pytestmark = pytest.mark.gpu

LONG, EDGE = 4096, 2**31 // 4096  # elements a row; the row that begins with element 2^31


@pytest.fixture
def large(gpu):
    """float16 [rows, LONG] of zeros but for rows here and there, and these."""
    free, _ = gpu.cuda.runtime.memGetInfo()
    if free < 16 << 30:
        pytest.skip(f"{free >> 30} GB of GPU memory are free; 16 are needed")
    rows = EDGE + 5
    x = gpu.zeros((rows, LONG), gpu.float16)
    picked = [0, 1, EDGE // 2 - 1, EDGE // 2, EDGE - 1, EDGE, rows - 1]
    values = cases.normal((len(picked), LONG), np.dtype(np.float16))
    for row, line in zip(picked, values, strict=True):
        x[row] = gpu.asarray(line)
    yield x, picked, values
    del x
    gpu.get_default_memory_pool().free_all_blocks()


@pytest.mark.parametrize("name", ["nf4", "int8", "uint4", "q4_0", "k3"])
def test_more_than_two_to_the_31_elements(name, large):
    x, picked, values = large
    q, wanted = cq.quantize(x, name), cq.quantize(values, name)
    for i, row in enumerate(picked):
        assert not differences(q[row : row + 1].numpy(), wanted[i : i + 1])
    assert not int((q[2 : picked[2]].scale != 0).sum())
    y = q.dequantize()
    for i, row in enumerate(picked):
        assert same_values(y[row].get(), wanted[i].dequantize())
    assert not bool(y[2 : picked[2]].any()) and not bool(y[EDGE + 1 : -1].any())


@pytest.mark.parametrize("name", ["nf4", "uint4"])
def test_more_than_two_to_the_31_elements_that_lie_anywhere(name, large):
    """The kernels that take any strides, there and back; and the search for NaN."""
    x, picked, values = large
    q, wanted = cq.quantize(x[:, 1:], name), cq.quantize(values[:, 1:], name)
    y = q.dequantize()
    for i, row in enumerate(picked):
        assert not differences(q[row : row + 1].numpy(), wanted[i : i + 1])
        assert same_values(y[row].get(), wanted[i].dequantize())
    x[EDGE + 3, 7] = np.inf
    with pytest.raises(ValueError, match=f"flat index {(EDGE + 3) * LONG + 7} of"):
        cq.quantize(x, name, nonfinite="raise")


def test_more_than_two_to_the_31_elements_along_an_axis(large):
    x, picked, _ = large
    columns = x.reshape(64, -1)
    q = cq.quantize(columns, "nf4", axis=0)
    width = columns.shape[1]
    for row in picked:  # where its elements are now
        start = min(row * LONG % width, width - LONG)
        part = columns[:, start : start + LONG].get()
        assert part.any()
        wanted = cq.quantize(part, "nf4", axis=0)
        assert not differences(q.T[start : start + LONG].numpy(), wanted.T)
