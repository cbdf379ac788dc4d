"""PyTorch: linear layers with quantized weights, which gradients flow through.

`quantize_` swaps the nn.Linear layers of a model for `QuantLinear` in one call, and `load_` loads a
file of quantized weights into a model. They need torch, which `import cuquant` does not: import
this module by its name.

>>> import torch
>>> import cuquant.torch
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
>>> model = cuquant.torch.quantize_(model, "nf4")
>>> model(torch.zeros(2, 64)).shape
torch.Size([2, 8])

Behind them are operators, `torch.ops.cuquant.linear` and others (cuquant/torch/operators.py).
"""

from cuquant.errors import pip_install

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"cuquant.torch needs PyTorch: {pip_install('torch')}, or torch as pytorch.org says"
    ) from error

from cuquant.torch import functions as _functions  # noqa: F401 - all operators, for torch.ops
from cuquant.torch.back import dequantize_, prepack_
from cuquant.torch.conv import QuantConv2d
from cuquant.torch.embedding import QuantEmbedding
from cuquant.torch.experts import QuantExperts, QuantStack
from cuquant.torch.llm_int8_linear import LLMInt8Linear
from cuquant.torch.load import load_
from cuquant.torch.module import QuantLinear
from cuquant.torch.report import Plan, Report, report
from cuquant.torch.swap import plan, quantize_

__all__ = [
    "LLMInt8Linear",
    "Plan",
    "QuantConv2d",
    "QuantEmbedding",
    "QuantExperts",
    "QuantLinear",
    "QuantStack",
    "Report",
    "dequantize_",
    "load_",
    "plan",
    "prepack_",
    "quantize_",
    "report",
]
