"""What an operator of torch's is made of: a schema, a kernel, the fake's shape and a backward.

An `Operator` is one row of `TABLE`, and stands where its functions do; making it registers
`torch.ops.cuquant.NAME` for CPU and CUDA tensors and, as a calculation of the result's shape, for
fake and meta ones. torch.compile, export, checkpointing and CUDA graphs see one operator and do not
look inside.

The backward is made of operators that have gradients themselves, so that a gradient of a gradient
is right. There is no forward mode, and torch.func's transforms take no gradients.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cuquant import interop

_C: Any = torch._C
# What is asked for at every call, by the shortest way.
_dispatch_modes, _function_modes = _C._len_torch_dispatch_stack, _C._len_torch_function_stack
_transform, _tracing = _C._functorch.peek_interpreter_stack, _C._get_tracing_state
_is_profiled, _forward = _C._autograd._profiler_enabled, torch.autograd.forward_ad
_DEVICES = ("CPU", "CUDA")
PLAIN = (torch.Tensor, torch.nn.Parameter)

Arguments = tuple[Any, ...]

TABLE: dict[str, "Operator"] = {}  # all of them, by name
_library = torch.library.Library("cuquant", "FRAGMENT")


@dataclass(frozen=True)
class Backward:
    """How gradients flow back through an operator.

    Attributes
    ----------
    keep
        What of the operator's arguments the backward reads: a tuple of tensors, lists of tensors
        and words. What it does not name may be freed, as x where only its dtype matters.
    gradients
        Of what was kept, the gradient of the result, and of each argument whether one is wanted:
        by the argument's place, the gradients that are.
    """

    keep: Callable[..., Arguments]
    gradients: Callable[[Arguments, torch.Tensor, tuple[bool, ...]], dict[int, Any]]


class Operator:
    """An operator, registered as torch.ops.cuquant.NAME.

    Parameters
    ----------
    schema
        "NAME(...) -> ...", in torch's words.
    kernel
        For tensors of CPU and CUDA; takes the arguments in the schema's order.
    fake
        The same for tensors without values: checks shapes, and allocates.
    backward
        None: nothing flows back. A tensor that requires a gradient is then an error, unless all
        that comes out are codes.
    is_codes
        Whether what comes out are integers, which have no gradient.
    """

    def __init__(
        self,
        schema: str,
        kernel: Callable[..., Any],
        fake: Callable[..., Any],
        backward: Backward | None = None,
        is_codes: bool = False,
    ) -> None:
        self.name = name = schema.partition("(")[0]
        self.kernel, self.backward, self.is_codes = kernel, backward, is_codes
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in _DEVICES:
            _library.impl(name, kernel, device)
        _library.impl(name, self._at_autograd, "Autograd")
        torch.library.register_fake(f"cuquant::{name}", fake, lib=_library)
        self.overload = getattr(torch.ops.cuquant, name).default
        arguments = self.overload._schema.arguments
        self._names = [argument.name for argument in arguments]
        self._defaults = [argument.default_value for argument in arguments]
        TABLE[name] = self

    def __call__(self, *args: Any) -> Any:
        """The operator's result, by the shortest way; all arguments, in order.

        From Python through torch's dispatcher and back takes the host longer than a small product.
        """
        if torch.compiler.is_compiling() or is_watched(*args):  # which Dynamo does not follow
            return self.overload(*args)
        if torch.is_grad_enabled() and _require_gradients(args):
            return self.differentiable(args)
        return self.kernel(*args)

    def differentiable(self, args: Arguments, run: Callable[..., Any] | None = None) -> Any:
        """The result, from which gradients flow back to what requires one.

        `run` computes it without autograd; None: the kernel, where nobody watches.
        """
        run = run or self.kernel
        if self.backward is not None:
            return _Node.apply(self, run, *args)
        for name, value in zip(self._names, args, strict=True) if not self.is_codes else ():
            if isinstance(value, torch.Tensor):
                interop.refuse_gradient(value, name)
        with torch.no_grad():
            return run(*args)

    def _at_autograd(self, *given: Any, **named: Any) -> Any:
        """Where autograd looks at a call of the dispatcher's, which leaves out defaults."""
        args = (*given, *self._defaults[len(given) :])
        if named:
            args = tuple(named.get(n, v) for n, v in zip(self._names, args, strict=True))
        if torch.is_grad_enabled() and _require_gradients(args):
            if _C._functorch.peek_interpreter_stack() is not None:
                raise RuntimeError(_NO_TRANSFORMS.format(self.name))
            return self.differentiable(args, self._below)
        if not self.is_codes and _has_tangent(args):
            raise RuntimeError(_NO_FORWARD_MODE.format(self.name))
        return self._below(*args)

    def _below(self, *args: Any) -> Any:
        """The result without autograd: of the kernel, or of who watches."""
        if not is_watched(*args):
            return self.kernel(*args)
        with _C._AutoDispatchBelowAutograd():
            return self.overload(*args)


class _Node(torch.autograd.Function):
    """A call in autograd's graph. The old kind of Function takes the host a third of the time."""

    @staticmethod
    def forward(ctx: Any, operator: Operator, run: Callable[..., Any], *args: Any) -> Any:
        assert operator.backward is not None
        ctx.operator = operator
        tensors: list[torch.Tensor] = []
        ctx.kept = _apart(operator.backward.keep(*args), tensors)
        ctx.save_for_backward(*tensors)
        return run(*args)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved = iter(ctx.saved_tensors)  # which checkpointing lets be read once
        kept = _together(ctx.kept, saved)
        needs = ctx.needs_input_grad[2:]
        found = ctx.operator.backward.gradients(kept, gradients[0], needs)
        return None, None, *(found.get(at) for at in range(len(needs)))

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        """torch makes zeros of tangents where a Function has no jvp, and says nothing."""
        raise RuntimeError(_NO_FORWARD_MODE.format(ctx.operator.name))


_NO_FORWARD_MODE = (
    "cuquant::{} has no forward-mode derivative (torch.func.jvp, jacfwd, dual tensors); use "
    "backward, torch.autograd.grad, or what torch.autograd.functional does with them"
)
_NO_TRANSFORMS = (
    "cuquant::{} has no gradient in torch.func's transforms (grad, vjp, jacrev); use "
    "x.requires_grad_() and torch.autograd.grad"
)
_SAVED = object()  # stands for a tensor that autograd has saved


def _apart(kept: Arguments, tensors: list[torch.Tensor]) -> list[Any]:
    """What is kept, with tensors moved to `tensors`.

    Those made in inference mode stay, which autograd does not save; nothing can change them.
    """

    def held(value: Any) -> Any:
        if isinstance(value, list):
            return [held(part) for part in value]
        if not isinstance(value, torch.Tensor) or value.is_inference():
            return value
        tensors.append(value)
        return _SAVED

    return [held(value) for value in kept]


def _together(kept: list[Any], saved: Any) -> Arguments:
    """What `_apart` took apart."""
    return tuple(
        next(saved)
        if value is _SAVED
        else list(_together(value, saved))
        if isinstance(value, list)
        else value
        for value in kept
    )


def _require_gradients(args: Arguments) -> bool:
    """Whether one of the tensors requires a gradient; lists hold bytes, which cannot."""
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)


def _has_tangent(args: Arguments) -> bool:
    forward: Any = torch.autograd.forward_ad
    return forward._current_level >= 0 and any(
        isinstance(value, torch.Tensor) and forward.unpack_dual(value).tangent is not None
        for value in args
    )


def is_watched(*args: Any) -> bool:
    """Whether someone must see the operator that is called: a subclass of Tensor, torch.compile or
    another tracer, a mode, a transform such as vmap, a tangent, the profiler, or who only asks for
    a shape."""
    for value in args:
        part = value[0] if type(value) is list and value else value  # all of a list are alike
        if isinstance(part, torch.Tensor) and (type(part) not in PLAIN or part.is_meta):
            return True
    return (
        torch.compiler.is_compiling()
        or _dispatch_modes() > 0
        or _function_modes() > 0
        or _transform() is not None
        or _tracing() is not None
        or _is_profiled()
        or _forward._current_level >= 0
    )
