"""cuBLAS by its C interface: functions on NumPy, and a library that g++ makes, in its place."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emulator import compiler
from emulator.cublas import Library
from oracle import DTYPES
from products import normal, values

from cuquant.gpu import arrays as gpu
from cuquant.gpu import cublas, jit
from cuquant.gpu.backend import Gemm, Matrix

F32 = np.float32
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no g++ to compile a library with")


def matrix(array: np.ndarray) -> Matrix:
    return Matrix(array.ctypes.data, array.strides[0] // array.itemsize, array.dtype.name)


def test_gemm_multiplies_rows_and_sets_what_it_needs():
    fake = Library()
    handle = cublas.Cublas(fake)
    x, w = normal((7, 24), "float16")[:, :20], normal((5, 20), "float16")
    out = np.full((7, 8), 7, F32)
    factors = np.array([0.5, 0], F32)
    for at, factor in ((0, 1), (factors.ctypes.data, 0.5), (0, 1)):
        handle.gemm(42, Gemm((7, 5, 20), matrix(x), matrix(w), matrix(out), at, (1024, 99)))
        assert np.allclose(out[:, :5], factor * values(x) @ values(w).T, atol=1e-5)
        assert (out[:, 5:] == 7).all()
    assert (fake.stream, fake.workspace) == (42, (1024, 99))
    assert fake.math == cublas.NO_REDUCED_REDUCTION


# A shared library with the declarations of cublas_v2.h, for float32.
STUB = """
#include <stddef.h>
extern "C" {
static void *set_stream, *workspace;
static size_t room;
static int device_pointers;
int cublasCreate_v2(void** handle) { *handle = &room; return 0; }
int cublasSetMathMode(void* handle, int mode) { return handle != &room || mode != 16; }
int cublasSetPointerMode_v2(void* handle, int mode) {
    device_pointers = mode;
    return handle != &room;
}
int cublasSetStream_v2(void* handle, void* stream) { set_stream = stream; return handle != &room; }
int cublasSetWorkspace_v2(void* handle, void* at, size_t nbytes) {
    workspace = at; room = nbytes;
    return handle != &room;
}
int cublasGemmEx(void* handle, int a_order, int b_order, int m, int n, int k, const void* alpha,
                 const void* A, int a_type, int lda, const void* B, int b_type, int ldb,
                 const void* beta, void* C, int c_type, int ldc, int compute, int algorithm) {
    if (handle != &room || a_order != 1 || b_order != 0 || a_type || b_type || c_type) return 2;
    if (!device_pointers || *(const float*)beta || compute != 68 || algorithm != -1) return 3;
    if ((size_t)set_stream != 0x700000000042 || (size_t)workspace != 0x710000000000) return 4;
    if (room != (size_t)1 << 33) return 5;
    for (int i = 0; i < m; ++i)
        for (int j = 0; j < n; ++j) {
            float sum = 0;
            for (int l = 0; l < k; ++l)
                sum += ((const float*)A)[i * lda + l] * ((const float*)B)[j * ldb + l];
            ((float*)C)[j * ldc + i] = *(const float*)alpha * sum;
        }
    return 0;
}
}
"""


@needs_compiler
def test_the_c_interface(tmp_path, monkeypatch):
    """Arguments arrive in their places and widths; the library is found beside NVIDIA's wheels."""
    source, made = tmp_path / "stub.cpp", tmp_path / "libcublas.so.77"
    source.write_text(STUB)
    subprocess.run([compiler() or "", "-shared", "-fPIC", source, "-o", made], check=True)
    monkeypatch.setattr(cublas, "_wheel_folders", lambda major: [tmp_path / "none", tmp_path])
    found = cublas.library.__wrapped__(77)
    assert found is not None
    x, w, out = normal((7, 24)), normal((5, 30)), np.full((7, 8), 7, F32)
    factors = np.array([0.5, 0], F32)
    at = factors.ctypes.data
    gemm = Gemm((7, 5, 20), matrix(x), matrix(w), matrix(out), at, (0x710000000000, 1 << 33))
    cublas.Cublas(found).gemm(0x700000000042, gemm)
    assert np.allclose(out[:, :5], 0.5 * x[:, :20] @ w[:, :20].T, atol=1e-5)
    assert (out[:, 5:] == 7).all()
    made.unlink()
    with pytest.raises(cublas.CublasError, match="status 4"):
        cublas.Cublas(found).gemm(0x42, gemm)


def test_what_cublas_refuses_is_an_error():
    handle = cublas.Cublas(Library())
    x, out = normal((4, 16), "float16"), np.zeros((4, 4), DTYPES["bfloat16"])
    with pytest.raises(cublas.CublasError, match="cublasGemmEx of cuBLAS returned status 15"):
        handle.gemm(0, Gemm((4, 4, 16), matrix(x), matrix(x), matrix(out), 0, (0, 0)))
    with pytest.raises(cublas.CublasError, match="cublasCreate_v2"):
        cublas.Cublas(Library(broken=True))


def test_cublas_is_looked_for_once_and_may_be_missing(monkeypatch):
    """Not installed, too old, or one that makes no handle: there is none, and no error."""
    runtime = SimpleNamespace(runtimeGetVersion=lambda: 12090)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(jit, "is_capturing", lambda stream: False)
    for library, there in ((None, False), (Library(broken=True), False), (Library(), True)):
        asked: list[int] = []

        def find(major: int, found: Any = library, asked: list[int] = asked) -> Any:
            asked.append(major)
            return found

        monkeypatch.setattr(gpu, "library", find)
        monkeypatch.setattr(gpu, "_vendors", {})
        backend = gpu.CupyBackend(0, 0)
        assert backend.has_vendor is backend.has_vendor is there
        assert asked == [12]
    assert cublas.library(99) is None


def test_cublas_is_not_started_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(jit, "is_capturing", lambda stream: True)
    monkeypatch.setattr(gpu, "library", lambda major: Library())
    monkeypatch.setattr(gpu, "_vendors", {})
    runtime = SimpleNamespace(runtimeGetVersion=lambda: 12090)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    with pytest.raises(RuntimeError, match="cuBLAS is used for the first time while"):
        _ = gpu.CupyBackend(0, 5).has_vendor
    assert not gpu._vendors
