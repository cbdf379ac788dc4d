"""What torch expects of others: gradients, versions, compilers and pickles."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from cuquant.interop.arrays import dtype_of, kind, viewed

F = TypeVar("F", bound=Callable[..., Any])


def is_negated(x: Any) -> bool:
    """Whether an array is a view that torch negates when it is read."""
    return kind(x) == "torch" and x.is_neg()


def mark_written(x: Any) -> None:
    """Tell torch that a tensor changes, as its own operations in place do: what autograd has saved
    of it is out of date."""
    if kind(x) == "torch" and not x.is_inference():
        sys.modules["torch"].autograd.graph.increment_version(x)


def wants_gradient(*arrays: Any) -> bool:
    """Whether torch would expect a gradient to flow back to one of `arrays`, or forward from it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    backward, forward = torch.is_grad_enabled(), torch.autograd.forward_ad
    if not backward and forward._current_level < 0:
        return False
    tensors = [x for x in arrays if kind(x) == "torch"]
    if backward and any(x.requires_grad for x in tensors):
        return True
    return forward._current_level >= 0 and any(
        forward.unpack_dual(x).tangent is not None for x in tensors
    )


def refuse_gradient(x: Any, name: str) -> None:
    """RuntimeError where torch would expect a gradient of `x`, and there is none."""
    if wants_gradient(x):
        raise RuntimeError(
            f"{name} requires grad, and no gradient flows back to it; call under torch.no_grad(), "
            f"or pass {name}.detach()"
        )


# Gives a function of cuquant.torch.functions by its name. That layer is above all others and
# imports torch, so that it is imported when it is needed, and the layer above it puts this here.
OPERATORS: list[Callable[[str], Callable[..., Any]]] = []


def by_operator(name: str) -> Callable[..., Any]:
    """The function that stands for an operation of that name where gradients are wanted, or where
    torch.compile looks: by an operator that torch knows."""
    return OPERATORS[0](name)


def is_followed() -> bool:
    """Whether torch.compile follows this call to make a graph of it."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def is_operator_of_dynamo(function: Any) -> bool:
    """Whether torch.compile follows what may have been @: it makes a method's call of that, with
    the tensor first wherever it stood. torch.export does not."""
    torch = sys.modules["torch"]
    return torch.compiler.is_dynamo_compiling() and function is torch.Tensor.matmul


def untraced(function: F) -> F:
    """The function, into which torch.compile does not look: a graph ends before a call of it, and
    another one begins behind."""
    return _hidden(function, False)


def traced(function: F) -> F:
    """The function, in whose place torch.compile sees an operator, where one takes the arguments;
    `untraced` otherwise."""
    return _hidden(function, True)


def _hidden(function: F, is_operator: bool) -> F:
    hidden: Any = None
    name = function.__name__

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal hidden
        if sys.modules.get("torch._dynamo") is None or not _is_under_a_compiler():
            return function(*args, **kwargs)
        if is_operator and is_followed():
            found = by_operator("traced")(name, args, kwargs)
            if found is not None:
                return found
        if hidden is None:
            hidden = sys.modules["torch"].compiler.disable(function)
        return hidden(*args, **kwargs)

    # torch.compile keeps what it makes of a function by its code, which these would have in common.
    made: Any = called
    made.__code__ = made.__code__.replace(co_name=function.__name__)
    return made


def _is_under_a_compiler() -> bool:
    """Whether torch.compile looks at what runs now: it follows a call, or makes it in passing."""
    torch = sys.modules["torch"]
    watching = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return torch.compiler.is_compiling() or watching is None or watching() is not None


def to_pickle(x: Any) -> Any:
    """`x`, or the int32 view of torch's uint32, which torch pickles but does not unpickle."""
    return viewed(x, np.int32) if kind(x) == "torch" and dtype_of(x) == np.uint32 else x


def from_pickle(x: Any, dtype: np.dtype) -> Any:
    """What `to_pickle` took, of the dtype it had."""
    return viewed(x, np.uint32) if kind(x) == "torch" and dtype == np.uint32 else x
