"""Kinds of layer: how one is known, which weights it has, and what is made of it.

A kind is one row of `KINDS`. `quantize_`, `report` and `dequantize_` know no layers beside them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from cuquant.formats import Format
from cuquant.torch import experts
from cuquant.torch.conv import QuantConv2d
from cuquant.torch.embedding import QuantEmbedding
from cuquant.torch.experts import LAST, QuantExperts, QuantStack
from cuquant.torch.holder import Holder
from cuquant.torch.module import QuantLinear
from cuquant.torch.spec import Weight

# What a module keeps the hooks of its calls in; their handles remove them from these very dicts.
_HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
_STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
HOLDERS = (Holder, QuantExperts)  # what is quantized already


@dataclass(frozen=True)
class Kind:
    """A kind of layer.

    Attributes
    ----------
    what
        In words: "nn.Linear".
    is_one
        Whether a module is of this kind.
    names
        Of its weights, parameters of the module.
    rows
        A weight as it is quantized, [..., N, K].
    make
        The quantized layer, of the float one and its weights.
    obstacle
        Why a layer cannot be swapped, in whatever format, beside what holds for all kinds.
    forward
        The forward that the quantized layer stands for; None: whichever the module has.
    alike
        Classes, by name, whose own forward computes the same.
    by_name
        Whether patterns must mean layers of this kind: embeddings and filters, for example.
    prepacks
        Whether the quantized layer takes a prepacked weight.
    keeps_rest
        Whether the quantized layer keeps what else the module holds.
    quantized
        The class of the quantized layer.
    back
        The float layer of a quantized one and its decoded weights.
    """

    what: str
    is_one: Callable[[nn.Module], bool]
    make: Callable[[Any, Sequence[Weight]], Any]
    quantized: type[nn.Module]
    back: Callable[[Any, Sequence[nn.Parameter]], nn.Module]
    names: Callable[[Any], Sequence[str]] = lambda _: ("weight",)
    rows: Callable[[Any, torch.Tensor], torch.Tensor] = lambda _, weight: weight
    obstacle: Callable[[Any], str | None] = lambda _: None
    forward: Any = None
    alike: Sequence[str] = ()
    by_name: bool = False
    prepacks: bool = True
    keeps_rest: bool = False


def kind_of(module: nn.Module) -> Kind | None:
    """The kind of a float layer; None for other modules, and for layers that are quantized."""
    if isinstance(module, HOLDERS):
        return None
    return next((kind for kind in KINDS if kind.is_one(module)), None)


def obstacle(module: nn.Module, kind: Kind, fmt: Format) -> str | None:
    """Why a layer cannot be swapped, whatever was asked for."""
    name = type(module).__name__
    own = kind.forward is not None and type(module).forward is not kind.forward
    if (own and name not in kind.alike) or "forward" in vars(module):
        return f"a {name} has a forward of its own"
    if why := kind.obstacle(module):
        return why
    for name in kind.names(module):
        weight = module._parameters.get(name)
        if weight is None or type(weight) is not nn.Parameter:
            return f"its {name} is no plain parameter"
        if weight.dtype not in FLOATS:
            return f"{str(weight.dtype).removeprefix('torch.')} values"
    if why := _bias_obstacle(module, kind) or _rest(module, kind):
        return why
    for shape in shapes(module, kind):
        try:
            fmt.check_shape(shape)
        except ValueError:
            return f"{shape[-1]} columns do not divide into blocks of {fmt}"
    return None


def _bias_obstacle(module: nn.Module, kind: Kind) -> str | None:
    bias = module._parameters.get("bias")
    if getattr(module, "bias", None) is not bias:
        return "its bias is no plain parameter"
    if bias is None:
        return None
    wanted = shapes(module, kind)[0][:1]
    if bias.dtype in FLOATS and tuple(bias.shape) == wanted:
        return None
    found = f"{str(bias.dtype).removeprefix('torch.')}{list(bias.shape)}"
    return f"its bias is {found}, and not floats of {list(wanted)}"


def _rest(module: nn.Module, kind: Kind) -> str | None:
    """What else a layer holds, which a quantized one would lose or misread."""
    if any(getattr(module, name) for name in _STATE_HOOKS):
        return "its state_dict has hooks"
    if kind.keeps_rest:
        return None
    known = {*kind.names(module), "bias"}
    held = {**module._parameters, **module._buffers, **module._modules}
    rest = [name for name, value in held.items() if value is not None and name not in known]
    return f"it holds {rest[0]!r} beside its weight and bias" if rest else None


def loss(module: nn.Module, kind: Kind, fmt: Format) -> str | None:
    """Why a layer should not be swapped, though it could be."""
    weights = [getattr(module, name) for name in kind.names(module)]
    sizes = [weight.numel() * weight.element_size() for weight in weights]
    found = (fmt.why_keep(s, n) for s, n in zip(shapes(module, kind), sizes, strict=True))
    return next((why for why in found if why is not None), None)


def shapes(module: nn.Module, kind: Kind) -> list[tuple[int, ...]]:
    """The shapes in which a layer's weights are quantized."""
    weights = [getattr(module, name) for name in kind.names(module)]
    return [tuple(kind.rows(module, weight.detach().to("meta")).shape) for weight in weights]


# ---- torch's own, and those that are known by their structure -----------------------------------


def _is_conv1d(module: nn.Module) -> bool:
    """GPT-2's linear layer, y = x @ weight + bias; transformers need not be there to know one."""
    weight = module._parameters.get("weight")
    named = type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)
    return named and weight is not None and weight.ndim == 2


def _no_linear(module: nn.Module) -> str | None:
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight itself"
    return None


def _no_table(module: nn.Embedding) -> str | None:
    return None if module.max_norm is None else "max_norm changes rows as they are looked up"


def _turned(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    return weight.transpose(-1, -2) if experts.is_transposed(module) else weight


def _linear(module: QuantLinear, weights: Sequence[nn.Parameter]) -> nn.Module:
    if module._like is not None:
        made = experts.without_parameters(module._like)
        _hold(made, nn.Parameter(weights[0].detach().T.contiguous()), module.bias)
    else:
        made = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
        _hold(made, weights[0], module.bias)
    activations = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}
    if module.activation is None:
        return made
    return nn.Sequential(made, activations[module.activation]())


def _conv2d(module: QuantConv2d, weights: Sequence[nn.Parameter]) -> nn.Module:
    size: Any = (module.in_channels, module.out_channels, module.kernel_size)
    how = {key: getattr(module, key) for key in ("stride", "padding", "dilation", "groups")}
    more: Any = {"padding_mode": module.padding_mode, "bias": False, "device": "meta"}
    made = nn.Conv2d(*size, **how, **more)
    _hold(made, weights[0], module.bias)
    return made


def _table(module: QuantEmbedding, weights: Sequence[nn.Parameter]) -> nn.Module:
    size = module.num_embeddings, module.embedding_dim
    made = nn.Embedding(*size, padding_idx=module.padding_idx, device="meta")
    _hold(made, weights[0], None)
    return made


def _hold(made: nn.Module, weight: nn.Parameter, bias: torch.Tensor | None) -> None:
    made.register_parameter("weight", weight)
    if bias is not None:  # of the weight's dtype, as torch's layers want it
        made.register_parameter("bias", nn.Parameter(bias.detach().to(weight.dtype)))


KINDS = (
    Kind(
        "nn.Linear",
        lambda m: isinstance(m, nn.Linear),
        lambda m, weights: QuantLinear(weights[0], m.bias),
        QuantLinear,
        _linear,
        obstacle=_no_linear,
        forward=nn.Linear.forward,
        alike=("FalconLinear",),  # transformers': it rounds before it adds the bias
    ),
    Kind(
        "Conv1D",
        _is_conv1d,
        lambda m, weights: QuantLinear(weights[0], m.bias),
        QuantLinear,
        _linear,
        rows=lambda _, weight: weight.T,
    ),
    Kind(
        "fused experts",
        experts.is_experts,
        lambda m, weights: QuantExperts(m, *weights),
        QuantExperts,
        experts.decoded,
        names=lambda m: (experts.first_of(m), LAST),
        rows=_turned,
        obstacle=experts.obstacle,
        keeps_rest=True,
    ),
    Kind(
        "nn.Embedding",
        lambda m: isinstance(m, nn.Embedding),
        lambda m, weights: QuantEmbedding(weights[0], m.padding_idx),
        QuantEmbedding,
        _table,
        obstacle=_no_table,
        forward=nn.Embedding.forward,
        by_name=True,
        prepacks=False,
    ),
    Kind(
        "nn.Conv2d",
        lambda m: isinstance(m, nn.Conv2d),
        lambda m, weights: QuantConv2d(weights[0], m),
        QuantConv2d,
        _conv2d,
        rows=lambda _, weight: weight.flatten(1),
        forward=nn.Conv2d.forward,
        by_name=True,
        prepacks=False,
    ),
)


def holders(module: nn.Module) -> list[Holder]:
    """What holds the weights of a layer that a kind has made, in the kind's order."""
    if isinstance(module, QuantExperts):
        return [m for m in module.children() if isinstance(m, QuantStack)]
    return [module] if isinstance(module, Holder) else []


def follow(new: nn.Module, old: nn.Module) -> nn.Module:
    """Let a new layer have the mode, the hooks and others' attributes of the one it replaces."""
    new.train(old.training)
    given = vars(old).keys() - vars(new).keys()
    if isinstance(old, HOLDERS):
        given = given & getattr(old, "_given", frozenset())
    vars(new).update({name: vars(old)[name] for name in given})
    if isinstance(new, HOLDERS):
        vars(new)["_given"] = frozenset(given)
    for hooks in _HOOKS:
        setattr(new, hooks, getattr(old, hooks))
    return new
