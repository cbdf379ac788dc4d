"""Children of a process whose threads are at work: nothing they need is locked for ever."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows does not fork")

PRELUDE = """
import os, signal, threading, time, warnings
from dataclasses import replace
import numpy as np, cuquant as cq
warnings.simplefilter("ignore", DeprecationWarning)  # of fork with threads, from Python 3.12 on

def in_child(work):
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)  # kills it
        try:
            work()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\\n".encode())
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, "the child hangs, or fails"

rng = np.random.default_rng(0)
w, x = rng.standard_normal((64, 128), dtype=np.float32), np.ones((2, 128), np.float32)

def work():
    for name in ("int4:32", "k3", "nf4:8", "q4_0", "mxfp4", "fp8_e4m3"):
        q = cq.quantize(w, name)
        cq.linear(x, cq.prepack(q)), x @ q.T, q.dequantize("float16"), q[3:9], q.scale
        hash(replace(q.format))
    cq.get_format("k4", levels=np.arange(7.0))
"""


def run(code: str) -> None:
    # OpenBLAS' own threads do not survive a fork.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]


# What a thread of the parent is in the middle of when it forks: a function that is called there.
BUSY = {
    "a product unpacks its weight": ("cuquant.ops.matmul.check", "unpack", "cq.linear(x, p)"),
    "a format hashes": ("cuquant.formats.format", "hash", "hash(fresh)"),
}


@pytest.mark.parametrize("case", BUSY)
def test_a_child_works_while_a_thread_of_its_parent(case):
    owner, name, call = BUSY[case]
    run(
        f"""
import builtins, importlib, sys
q = cq.quantize(w, "nf4")
p, fresh = cq.prepack(q), replace(q.format)
work()
owner = importlib.import_module({owner!r})
original = getattr(owner, {name!r}, None) or getattr(builtins, {name!r})
inside, go, parent = threading.Event(), threading.Event(), threading.get_ident()

def waits(*args, **kwargs):
    if threading.get_ident() != parent and not inside.is_set():
        inside.set()
        go.wait(600)
    return original(*args, **kwargs)

setattr(owner, {name!r}, waits)
thread = threading.Thread(target=lambda: {call})
thread.start()
assert inside.wait(300), "the thread was never there"
in_child(work)
go.set()
thread.join()
"""
    )


def test_children_of_a_busy_process_work():
    run(
        """
p = cq.prepack(cq.quantize(rng.standard_normal((1024, 1024), dtype=np.float32), "nf4"))
row, busy = np.ones((1, 1024), np.float32), True
def loop():
    while busy:
        cq.linear(row, p)
thread = threading.Thread(target=loop)
thread.start()
try:
    for i in range(10):
        time.sleep(0.013 * i)
        in_child(work)
finally:
    busy = False
    thread.join()
"""
    )
