"""Kernels from text to cubin: sources, keys, NVRTC, the cache, and what a cubin says."""

import os
import re
import shutil
import stat
import struct
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from planted import AFFINE, FACTS, FORMAT, KERNEL, SCALE, failing, files

import cuquant as cq
from cuquant import disk
from cuquant.gpu import cubins, elf, jit
from cuquant.gpu import source as sources
from cuquant.gpu.cubins import CacheWarning, Compiled
from cuquant.gpu.jit import Program

# ---- sources ------------------------------------------------------------------------------------


def test_each_header_is_inlined_once_under_its_true_name(kernels):
    text = jit.source(AFFINE)
    assert text.count("using i64") == text.count("int scaled") == text.count(FACTS) == 1
    assert "#include" not in text and "#pragma once" not in text
    assert str(kernels) not in text
    order = ["using i64", '#line 1 "facts"\nstruct twice', "int scaled", "void __launch_bounds__"]
    assert sorted(order, key=text.index) == order


def true_line(text: str, needle: str) -> tuple[str, int]:
    """File and line that a compiler would name for the line with `needle`."""
    name, number = "", 0
    for line in text.splitlines():
        if found := re.fullmatch(r'#line (\d+) "(.*)"', line):
            name, number = found[2], int(found[1]) - 1
        else:
            number += 1
            if needle in line:
                return name, number
    raise AssertionError(needle)


@pytest.mark.parametrize(
    ("needle", "name", "content"),
    [
        ("using i64", "kernels/format.cuh", FORMAT),
        ("int scaled", "kernels/deep/scale.cuh", SCALE),
        ("// y = factor", "kernels/affine.cu", KERNEL),
        ("__launch_bounds__", "kernels/affine.cu", KERNEL),
        ("struct twice", "facts", FACTS),
    ],
)
def test_lines_keep_their_numbers(kernels, needle, name, content):
    number = next(i for i, line in enumerate(content.splitlines(), 1) if needle in line)
    assert true_line(jit.source(AFFINE), needle) == (name, number)


def test_system_headers_stay(kernels):
    (kernels / "sum.cu").write_text('#include "format.cuh"\n  # include <cub/cub.cuh>\n')
    text = jit.source(Program("sum.cu", "sum"))
    assert sources.needs_system_headers(text)
    assert not sources.needs_system_headers(jit.source(AFFINE))


@pytest.mark.parametrize("name", ["none.cuh", "../outside.cuh"])
def test_a_missing_header_is_named_with_its_line(kernels, name):
    kernels.with_name("outside.cuh").write_text("")
    (kernels / "wrong.cu").write_text(f'\n#include "{name}"\n')
    with pytest.raises(cq.CompileError, match=re.escape(f'kernels/wrong.cu(2): "{name}"')):
        jit.source(Program("wrong.cu", "wrong"))
    with pytest.raises(cq.CompileError, match=r'"absent\.cu" is no file'):
        jit.source(Program("absent.cu", "absent"))


def test_the_packaged_sources_are_found():
    assert (jit.kernel_folder() / "format.cuh").is_file()


# ---- names and keys -----------------------------------------------------------------------------


def name_of(program=AFFINE, arch=90):
    return jit.cubin_name(program, jit.source(program), arch)


def test_the_key_is_the_content(kernels, tmp_path, monkeypatch):
    first = name_of()
    moved = tmp_path / "elsewhere"
    kernels.rename(moved)
    monkeypatch.setattr(jit, "kernel_folder", lambda: moved)
    assert name_of() == first
    (moved / "affine.cu").write_bytes(KERNEL.replace("\n", "\r\n").encode())
    assert name_of() == first, "a checkout with Windows' line ends"
    (moved / "deep" / "scale.cuh").write_text(SCALE.replace("x *", "2 * x *"))
    assert name_of() != first, "a header was edited"


def test_all_that_decides_a_kernel_is_in_its_key(kernels):
    changes = [
        {"arguments": ("formats::twice", 4)},
        {"facts": FACTS.replace("2;", "3;")},
        {"features": True},
        {"contract": True},
    ]
    names = {name_of(replace(AFFINE, **change)) for change in changes}
    assert len({name_of(), name_of(arch=80), *names}) == 6


def test_other_versions_of_nvrtc_share_the_exported_name_only(nvrtc, monkeypatch):
    text = jit.source(AFFINE)
    before = jit.cache_name(AFFINE, text, 90)
    newer = SimpleNamespace(getVersion=lambda: (99, 0), getSupportedArchs=nvrtc.getSupportedArchs)
    monkeypatch.setattr(jit, "nvrtc", lambda: newer)
    assert jit.cache_name(AFFINE, text, 90) != before
    assert before.startswith("affine-") and jit.cubin_name(AFFINE, text, 90).startswith("affine-")


# ---- NVRTC --------------------------------------------------------------------------------------


def test_a_kernel_compiles_and_says_what_it_takes(nvrtc):
    made = jit.compiled(AFFINE, 90)
    found = elf.resources(made.code, "affine")
    assert made.fresh and made.log == "" and made.code.startswith(b"\x7fELF")
    assert found.name.startswith("_ZN7cuquant6affineI")
    assert found.parameters == (8, 8, 8, 1)
    assert (found.local_bytes, found.shared_bytes, found.threads_limit) == (0, 128, 128)
    assert 4 < found.registers < 64


def test_a_cubin_is_whole(nvrtc):
    """CuPy drops the last byte, a zero, and what is left may end with a zero, too."""
    code = jit.compiled(AFFINE, 90).code
    start, size, count = (*struct.unpack_from("<Q", code, 32), *struct.unpack_from("<HH", code, 54))
    assert start + size * count == len(code)
    assert elf.completed(code) == elf.completed(code[:-1]) == code


@pytest.mark.parametrize("arch", [75, 80, 90, 100, 120])
def test_local_memory_is_seen_on_every_architecture(nvrtc, arch):
    found = elf.resources(jit.compiled(Program("spilling.cu", "spilling", (40,)), arch).code)
    assert found.local_bytes >= 160 and found.shared_bytes == 0 and found.threads_limit == 1024
    clean = elf.resources(jit.compiled(AFFINE, arch).code)
    assert (clean.local_bytes, clean.shared_bytes, clean.parameters) == (0, 128, (8, 8, 8, 1))


def test_architecture_features_only_where_asked(nvrtc):
    plain = elf_flags(jit.compiled(AFFINE, 90).code)
    special = replace(AFFINE, features=True)
    assert elf_flags(jit.compiled(special, 90).code) != plain
    assert jit._target(special, 80) == "sm_80"


def elf_flags(cubin: bytes) -> int:
    return struct.unpack_from("<I", cubin, 48)[0]


def test_a_newer_gpu_gets_ptx_and_an_older_one_advice(nvrtc, monkeypatch):
    made = jit.compiled(AFFINE, 990)
    newest = max(nvrtc.getSupportedArchs())
    assert f".target sm_{newest}".encode() in made.code and made.code.endswith(b"\0")
    assert jit.compiled(AFFINE, 990) == made._replace(fresh=False)
    with pytest.raises(cq.BackendUnavailable, match=r"sm_20; pip install"):
        jit.compiled(AFFINE, 20)


def test_errors_name_kernel_file_and_line(nvrtc, kernels):
    (kernels / "deep" / "scale.cuh").write_text(SCALE.replace("return x", "return unknown"))
    with pytest.raises(cq.CompileError) as caught:
        jit.compiled(AFFINE, 90)
    message = str(caught.value)
    assert message.startswith('kernels/deep/scale.cuh(5): error: identifier "unknown"')
    assert "cuquant::affine<formats::twice, 3>" in message and "CUQUANT_PRINT_SOURCE" in message
    wrong = Program(
        "affine.cu", "affine", ("formats::twice", 3), "struct twice {};\nstruct y : z {};"
    )
    (kernels / "deep" / "scale.cuh").write_text(SCALE)
    with pytest.raises(cq.CompileError, match=r"^facts\(2\): error: not a class"):
        jit.compiled(wrong, 90)
    assert files(kernels.with_name("cache")) == []


def test_subnormals_survive_and_products_are_not_fused(nvrtc, kernels):
    """What -ftz=false and -fmad=false mean, in the PTX."""
    text = "namespace cuquant { __global__ void f(float* x) { x[0] = x[1] * x[2] + x[3] / x[4]; } }"
    (kernels / "f.cu").write_text(text)
    ptx = jit.compiled(Program("f.cu", "f"), 990).code
    assert (
        b"mul.rn.f32" in ptx and b"fma" not in ptx and b"div.rn.f32" in ptx and b".ftz" not in ptx
    )
    assert b"fma.rn.f32" in jit.compiled(Program("f.cu", "f", contract=True), 990).code


def test_cub_is_found(nvrtc, kernels):
    (kernels / "sum.cu").write_text(
        "#include <cub/warp/warp_reduce.cuh>\n#include <cuda_fp16.h>\nnamespace cuquant {\n"
        "__global__ void sum(float* x) { __shared__ cub::WarpReduce<float>::TempStorage s;\n"
        "x[0] = cub::WarpReduce<float>(s).Sum(x[threadIdx.x]); } }\n"
    )
    try:
        sources.fitting_headers(nvrtc.getVersion())
    except cq.BackendUnavailable as error:
        pytest.skip(str(error))
    assert elf.resources(jit.compiled(Program("sum.cu", "sum"), 90).code, "sum").registers


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (lambda: (12, 8), r"12\.8 is too old, 12\.9 .*pip install --upgrade nvidia-cuda-nvrtc-cu"),
        (lambda: 1 / 0, r"cannot be loaded \(division by zero\); pip install"),
    ],
)  # fmt: skip
def test_an_nvrtc_that_does_not_do_is_refused(kernels, monkeypatch, version, message):
    fake = SimpleNamespace(cuda=SimpleNamespace(nvrtc=SimpleNamespace(getVersion=version)))
    monkeypatch.setattr(jit, "_cupy", lambda: fake)
    with pytest.raises(cq.BackendUnavailable, match=message):
        jit.compiled(AFFINE, 90)


def test_without_cupy_the_command_is_named(kernels, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    for attempt in (lambda: jit.compiled(AFFINE, 90), lambda: jit.load(AFFINE, 0)):
        with pytest.raises(cq.BackendUnavailable, match=r"CuPy is not installed; pip install"):
            attempt()


def test_everything_can_be_written_and_printed(nvrtc, tmp_path, monkeypatch, capsys):
    jit.compiled(AFFINE, 90)
    monkeypatch.setenv("CUQUANT_DUMP", str(tmp_path / "dump"))
    monkeypatch.setenv("CUQUANT_PRINT_SOURCE", "1")
    jit.compiled(AFFINE, 90)  # although it is in the cache
    written = {path.suffix: path for path in files(tmp_path / "dump")}
    assert {".cu", ".ptx", ".cubin"} <= set(written)
    assert "int scaled" in written[".cu"].read_text()
    assert ".entry" in written[".ptx"].read_text()
    assert elf.resources(written[".cubin"].read_bytes(), "affine").registers
    assert "affine<formats::twice, 3> for sm_90" in capsys.readouterr().err


# ---- the cache ----------------------------------------------------------------------------------


def test_a_kernel_is_found_again(nvrtc, tmp_path):
    made = jit.compiled(AFFINE, 90)
    (file,) = files(tmp_path / "cache")
    assert file.name.startswith("affine-") and file.suffix == ".cubin"
    assert file.read_bytes().startswith(made.code), "a tool reads the file as a cubin"
    assert cubins.cache_size() == (1, file.stat().st_size)
    assert jit.compiled(AFFINE, 90) == made._replace(fresh=False)
    assert jit.compiled(replace(AFFINE, contract=True), 90).fresh


DAMAGES = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "one bit": lambda data: data[:700] + bytes([data[700] ^ 1]) + data[701:],
    "trailer": lambda data: data[:-1] + b"?",
    "longer": lambda data: data + b"\0",
    "another file": lambda data: b"\x7fELF" + bytes(5000),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_compiled_again(nvrtc, tmp_path, damage):
    made = jit.compiled(AFFINE, 90)
    (file,) = files(tmp_path / "cache")
    whole = file.read_bytes()
    file.write_bytes(DAMAGES[damage](whole))
    again = jit.compiled(AFFINE, 90)
    assert again.fresh and again.code == made.code
    assert file.read_bytes() == whole


def test_a_file_of_another_kernel_is_not_taken(nvrtc, tmp_path):
    jit.compiled(AFFINE, 90)
    (file,) = files(tmp_path / "cache")
    other = replace(AFFINE, contract=True)
    file.rename(file.with_name(f"{jit.cache_name(other, jit.source(other), 90)}.cubin"))
    assert jit.compiled(other, 90).fresh


@pytest.mark.parametrize("data", [b"", b"x" * 47, b"y" * 48, bytes(100)])
def test_what_is_no_kernel_of_ours_is_refused(data):
    with pytest.raises(cq.FormatError):
        cubins.unsealed("name", data)


def test_seals_bind_name_code_and_log():
    data = cubins.sealed("a", Compiled(b"code", "log"))
    assert cubins.unsealed("a", data) == Compiled(b"code", "log")
    with pytest.raises(cq.FormatError, match="checksum"):
        cubins.unsealed("b", data)
    shifted = cubins.sealed("a", Compiled(b"codel", "og"))
    assert shifted[:7] == data[:7] and shifted != data


posix = pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")


def planted(tmp_path, mode: int) -> Path:
    """A cache that holds the kernel, with these permissions."""
    jit.compiled(AFFINE, 90)
    (tmp_path / "cache").chmod(mode)
    return tmp_path / "cache"


@posix
@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_cache_that_others_can_write_is_not_read(nvrtc, tmp_path, mode):
    planted(tmp_path, mode)
    with pytest.warns(CacheWarning, match="can be written by others; set CUQUANT_CACHE_DIR"):
        assert jit.compiled(AFFINE, 90).fresh
    assert not jit.compiled(AFFINE, 90).fresh, "from memory, and without a second warning"


@posix
def test_a_foreign_cache_is_not_read(nvrtc, tmp_path, monkeypatch):
    planted(tmp_path, 0o700)
    monkeypatch.setattr(os, "getuid", lambda: (tmp_path / "cache").stat().st_uid + 1)
    with pytest.warns(CacheWarning, match="belongs to another user"):
        assert jit.compiled(AFFINE, 90).fresh


@posix
def test_a_cache_that_others_can_exchange_is_not_read(nvrtc, tmp_path):
    planted(tmp_path, 0o700)
    tmp_path.chmod(0o777)
    with pytest.warns(CacheWarning, match="exchanged by others, who can write"):
        assert jit.compiled(AFFINE, 90).fresh
    tmp_path.chmod(0o1777)
    assert not jit.compiled(AFFINE, 90).fresh


ENTRIES = {
    "a FIFO": lambda file: os.mkfifo(file),
    "a link to a device": lambda file: file.symlink_to("/dev/zero"),
    "a link to a kernel": lambda file: file.symlink_to(file.parent.parent / "outside.cubin"),
    "20 GB of holes": lambda file: (file.touch(), os.truncate(file, 20 << 30)),
    "open to others": lambda file: (shutil.copy(file.parent.parent / "outside.cubin", file),
                                    file.chmod(0o666)),
}  # fmt: skip


@posix
@pytest.mark.parametrize("entry", ENTRIES)
def test_entries_that_others_may_have_put_there_are_compiled_again(nvrtc, tmp_path, entry):
    made = jit.compiled(AFFINE, 90)
    (file,) = files(tmp_path / "cache")
    shutil.move(file, tmp_path / "outside.cubin")
    ENTRIES[entry](file)
    assert jit.compiled(AFFINE, 90) == made, "fresh, and within bounds"
    assert file.is_file() and not file.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o600 and file.stat().st_size < 1e6
    assert not jit.compiled(AFFINE, 90).fresh
    outside = (tmp_path / "outside.cubin").read_bytes()
    assert outside == file.read_bytes(), "what a link points to is not touched"


@posix
def test_an_entry_of_another_user_is_not_read(nvrtc, tmp_path, monkeypatch):
    planted(tmp_path, 0o700)
    owned = cubins.is_owned
    monkeypatch.setattr(
        cubins, "is_owned", lambda status: stat.S_ISDIR(status.st_mode) and owned(status)
    )
    assert jit.compiled(AFFINE, 90).fresh


@posix
def test_exported_kernels_that_everybody_can_write_are_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("CUQUANT_CUBINS", str(tmp_path))
    file = tmp_path / "a.cubin"
    cubins.write(file, "a", Compiled(b"code"))
    assert cubins.exported("a") == Compiled(b"code") and cubins.exported("b") is None
    for path, mode in ((tmp_path, 0o777), (tmp_path, 0o1777), (file, 0o666)):
        before = path.stat().st_mode
        path.chmod(mode)
        monkeypatch.setattr(cubins, "_warned", False)
        with pytest.warns(CacheWarning, match=r"CUQUANT_CUBINS: .* can be written by everybody"):
            assert cubins.exported("a") is None
        assert cubins.exported("a") is None, "and no second warning"
        path.chmod(before & 0o777)
    assert cubins.exported("a") == Compiled(b"code")
    monkeypatch.setattr(os, "getuid", lambda: file.stat().st_uid + 1)
    assert cubins.exported("a") == Compiled(b"code"), "of the folder's owner"


@posix
def test_exported_entries_that_are_no_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CUQUANT_CUBINS", str(tmp_path))
    os.mkfifo(tmp_path / "fifo.cubin")
    (tmp_path / "zero.cubin").symlink_to("/dev/zero")
    (tmp_path / "sparse.cubin").touch()
    os.truncate(tmp_path / "sparse.cubin", 20 << 30)
    for name, reason in (("fifo", "regular"), ("zero", "regular"), ("sparse", "larger than")):
        with pytest.raises(cq.FormatError, match=rf"{name}\.cubin: .*{reason}"):
            cubins.exported(name)


@pytest.mark.parametrize("reason", ["a file", "read-only", "full"])
def test_a_cache_that_cannot_be_written_warns_once(nvrtc, tmp_path, monkeypatch, reason):
    if reason == "a file":
        (tmp_path / "cache").write_text("")
    elif reason == "read-only":
        monkeypatch.setattr(disk.Replacement, "_create", failing(PermissionError(13, "denied")))
    else:
        monkeypatch.setattr(disk.os, "replace", failing(OSError(28, "No space left")))
    with pytest.warns(CacheWarning, match="not kept") as caught:
        assert jit.compiled(AFFINE, 90).fresh
        assert not jit.compiled(AFFINE, 90).fresh
        assert jit.compiled(replace(AFFINE, contract=True), 90).fresh
    assert len(caught) == 1
    if reason == "full":
        assert files(tmp_path / "cache") == [], "no half-written file is left"


@posix
def test_a_new_cache_is_its_users_alone(nvrtc, tmp_path):
    before = os.umask(0)
    try:
        jit.compiled(AFFINE, 90)
    finally:
        os.umask(before)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_one_thread_loads_the_library(monkeypatch):
    """CuPy does so with the first call; of two at once NVRTC 13.0 misses a part of its own."""
    inside, most = [], []

    def version():
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.005)
        inside.pop()
        return 13, 0

    cupy = SimpleNamespace(cuda=SimpleNamespace(nvrtc=SimpleNamespace(getVersion=version)))
    monkeypatch.setattr(jit, "_cupy", lambda: cupy)
    threads = [threading.Thread(target=jit.nvrtc) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 8


def test_threads_compile_once(nvrtc, tmp_path, monkeypatch):
    compilations = []
    build = jit.build
    monkeypatch.setattr(jit, "build", lambda *a: (compilations.append(a), build(*a))[1])
    start, found = threading.Barrier(32), []

    def use():
        start.wait()
        found.append(jit.compiled(AFFINE, 90).code)

    threads = [threading.Thread(target=use) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compilations) == 1 and len(found) == 32 and len(set(found)) == 1
    assert len(files(tmp_path / "cache")) == 1


def test_readers_never_see_half_a_file(tmp_path):
    """Writers of one name race with readers of it."""
    path, kernel = tmp_path / "a.cubin", Compiled(bytes(200_000), "")
    cubins.write(path, "a", kernel)
    stop = threading.Event()

    def rewrite():
        while not stop.is_set():
            cubins.write(path, "a", kernel)

    threads = [threading.Thread(target=rewrite) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(200):
            assert cubins.unsealed("a", path.read_bytes()) == kernel
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert files(tmp_path) == [path]
