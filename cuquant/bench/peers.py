"""Other libraries at the same work: same process, same data, timed in the same way.

None of them is a dependency. bitsandbytes brings torch, which is not imported here by name:
cuquant does not need it.
"""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from cuquant.bench.report import PeerTiming
from cuquant.bench.timing import Call, Engine, measure
from cuquant.formats import Format


class Peer(Protocol):
    """A library that does some of what is measured."""

    @property
    def name(self) -> str:
        """With its version."""
        ...

    @property
    def engine(self) -> Engine:
        """Its clock."""
        ...

    def calls(self, operation: str, fmt: Format, xs: Sequence[Any]) -> list[Call] | None:
        """One call for each array, or None where it has no such operation."""
        ...


def reason(error: Exception) -> str:
    """An error as one line."""
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


def time_peer(
    peer: Peer, operation: str, fmt: Format, xs: Sequence[Any], repeats: int
) -> PeerTiming | None:
    """A peer's timing; None where it has no such operation. Its errors are a part of the result."""
    try:
        calls = peer.calls(operation, fmt, xs)
        if calls is None:
            return None
        return PeerTiming(peer.name, measure(peer.engine, calls, repeats))
    except Exception as error:  # whatever another library raises is no reason to stop
        return PeerTiming(peer.name, None, reason(error))


def find_peers() -> tuple[list[Peer], list[str]]:
    """The peers that can be imported, and why others cannot."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return [], ["bitsandbytes is not installed: no peer beside the figures"]
    try:
        return [Bitsandbytes()], []
    except Exception as error:  # its import loads libraries, which may fail in any way
        return [], [f"bitsandbytes cannot be used: {reason(error)}"]


class TorchEngine:
    """torch's side of `timing.Engine`."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def capture(self, run: Call) -> Call:
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            run()
        return graph.replay

    def elapsed(self, run: Call) -> float:
        torch = self._torch
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3


class TorchPeer:
    """What peers share that take torch's tensors."""

    def __init__(self) -> None:
        self.torch = importlib.import_module("torch")
        if not self.torch.cuda.is_available():
            raise RuntimeError("its torch has no CUDA")
        self.engine = TorchEngine(self.torch)

    def tensor(self, x: Any) -> Any:
        """A CuPy array as a tensor, on the same memory; bfloat16 goes as int16."""
        name = str(x.dtype)
        array = x.view(np.int16) if name == "bfloat16" else x
        tensor = self.torch.as_tensor(array, device=f"cuda:{x.device.id}")
        return tensor.view(self.torch.bfloat16) if name == "bfloat16" else tensor


class Bitsandbytes(TorchPeer):
    """nf4, fp4 and the dynamic 8-bit map of bitsandbytes."""

    def __init__(self) -> None:
        super().__init__()
        self._functional = importlib.import_module("bitsandbytes").functional
        self.name = f"bitsandbytes {importlib.metadata.version('bitsandbytes')}"

    def calls(self, operation: str, fmt: Format, xs: Sequence[Any]) -> list[Call] | None:
        if fmt.scale is None or fmt.scale.nested or not isinstance(fmt.block_size, int):
            return None
        tensors = [self.tensor(x) for x in xs]
        block, functional = fmt.block_size, self._functional
        if fmt.name in ("nf4", "fp4"):
            options = {"blocksize": block, "quant_type": fmt.name}
            forward, backward = functional.quantize_4bit, functional.dequantize_4bit
        elif fmt.name == "dynamic8" and operation == "quantize":
            return None  # it launches on the default stream, which no graph records
        elif fmt.name == "dynamic8":
            options = {"blocksize": block}
            forward, backward = functional.quantize_blockwise, functional.dequantize_blockwise
        else:
            return None
        if operation == "quantize":
            return [lambda x=x: forward(x, **options) for x in tensors]
        states = [forward(x, **options) for x in tensors]
        return [lambda packed=packed, state=state: backward(packed, state)
                for packed, state in states]  # fmt: skip
