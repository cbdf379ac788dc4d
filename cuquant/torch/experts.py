"""QuantExperts: the experts of a layer whose weights are one array each, [E, N, K].

Mixtral, Qwen3-MoE, DeepSeek, gpt-oss and most others of transformers keep them so: `gate_up_proj`
(or `up_proj`, without a gate) and `down_proj`, with biases or without. They are known by that
structure, not by the names of classes.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from cuquant.torch import products
from cuquant.torch.activations import quantized_grouped_linear
from cuquant.torch.holder import autocast
from cuquant.torch.inputs import InputQuantizing
from cuquant.torch.spec import Weight, WeightSpec

FIRST, LAST = ("gate_up_proj", "up_proj"), "down_proj"


class QuantStack(InputQuantizing):
    """Weights [E, N, K] of E experts as one quantized array.

    Parameters
    ----------
    weight
        QuantArray or PackedWeight [E, N, K], whose memory is shared.

    Examples
    --------
    >>> import torch
    >>> import cuquant as cq
    >>> import cuquant.torch
    >>> stack = cuquant.torch.QuantStack(cq.quantize(torch.ones(4, 8, 64), "int8"))
    >>> stack
    QuantStack(4, 8, 64, format=int8)
    >>> stack(torch.ones(3, 64), offsets=torch.tensor([0, 1, 1, 3, 3])).shape
    torch.Size([3, 8])
    """

    _AXES = 3

    def forward(self, x: torch.Tensor, **by: torch.Tensor) -> torch.Tensor:
        """`cuquant.grouped_linear` of x, by `experts`, `offsets` or `counts`."""
        ((name, integers),) = by.items()
        weight, x = (self._parts(), *self._words, name, integers), autocast(x)
        if self._activations_text is None:
            return products.grouped_linear(x, *weight)
        return quantized_grouped_linear(x, *weight, self._activations_text, self.input_scale)

    def extra_repr(self) -> str:
        """What repr says of the layer."""
        return f"{', '.join(str(n) for n in self._spec.shape)}, {self._said()}"

    def _took(self, spec: WeightSpec) -> None:
        self.num_experts, self.out_features, self.in_features = spec.shape


class QuantExperts(nn.Module):
    """The experts of a layer, each token through its own, weighted and added.

    Tokens are sorted by expert, and each projection is one product (`grouped_linear`) of all
    experts. An index of E or more is no expert, and adds nothing. The result differs from
    transformers' loop over experts by the order in which a token's experts are added.

    Parameters
    ----------
    like
        The module of float experts: what it does between its projections, its `_apply_gate`,
        `act_fn`, `alpha` and `limit`, stays its own, and so do its biases.
    first, last
        QuantArrays or PackedWeights [E, 2 * I or I, H] and [E, H, I].

    Attributes
    ----------
    like
        A copy of the module without its parameters.
    gate_up_proj or up_proj, down_proj
        The `QuantStack` of each.

    Examples
    --------
    >>> import torch
    >>> import cuquant.torch
    >>> class Experts(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.act_fn = torch.nn.SiLU()
    ...         self.gate_up_proj = torch.nn.Parameter(torch.randn(4, 2 * 32, 64))
    ...         self.down_proj = torch.nn.Parameter(torch.randn(4, 64, 32))
    >>> model = torch.nn.ModuleDict({"experts": Experts()})
    >>> experts = cuquant.torch.quantize_(model, "int4").experts
    >>> x, chosen = torch.randn(5, 64), torch.tensor([[0, 3]] * 5)
    >>> experts(x, chosen, torch.full((5, 2), 0.5)).shape
    torch.Size([5, 64])
    """

    def __init__(self, like: nn.Module, first: Weight, last: Weight) -> None:
        super().__init__()
        name = first_of(like)
        # No submodule: what walks a model by classes would look for its parameters.
        object.__setattr__(self, "like", without_parameters(like))
        self.first_name, self.is_turned = name, is_transposed(like)
        self.add_module(name, QuantStack(first))
        self.add_module(LAST, QuantStack(last))
        for key in (name, LAST):
            bias = like._parameters.get(f"{key}_bias")
            with torch.inference_mode(False):
                frozen = None if bias is None else nn.Parameter(bias.detach().clone(), False)
            self.register_parameter(f"{key}_bias", frozen)
        self._gate = _gate_of(like, name)

    like: nn.Module

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor | None = None,
        top_k_weights: torch.Tensor | None = None,
        **others: torch.Tensor,
    ) -> torch.Tensor:
        """hidden_states' shape; top_k_index [T, k] and weights [T, k], or [T, E] of all experts.

        Without an index, rows are those of all experts in turn, [E * M, H], as Llama 4 has them.
        """
        index = others.pop("router_indices", top_k_index)
        weights = others.pop("routing_weights", top_k_weights)
        if others:
            raise TypeError(f"experts take hidden_states, an index and weights, not {set(others)}")
        x = autocast(hidden_states.reshape(-1, hidden_states.shape[-1]))
        first = self.get_submodule(self.first_name)
        count: Any = first.num_experts
        if index is None or weights is None:
            rows = torch.arange(count, device=x.device).repeat_interleave(len(x) // count)
            return self._through(x, rows).view(hidden_states.shape)
        index = index.reshape(len(x), index.shape[-1])
        weights = weights.reshape(len(x), weights.shape[-1])
        if weights.shape[1] != index.shape[1]:
            weights = weights.gather(1, index.clamp(max=count - 1))
        weights = weights.where(index < count, 0)
        ids, order = index.reshape(-1).sort(stable=True)
        chosen = index.shape[1]
        made = self._through(x[order // chosen], ids) * weights.reshape(-1)[order, None]
        added = made[order.argsort()].view(len(x), chosen, made.shape[1]).sum(1)
        return added.to(x.dtype).view(hidden_states.shape)

    def _through(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Rows of x, sorted by expert, through the projections of theirs."""
        count: Any = self.get_submodule(LAST).num_experts
        places = torch.arange(count + 1, device=ids.device, dtype=ids.dtype)
        offsets, ids = torch.searchsorted(ids, places), ids.clamp(max=count - 1)
        for name in (self.first_name, LAST):
            x = self.get_submodule(name)(x, offsets=offsets)
            bias = getattr(self, f"{name}_bias")
            x = x if bias is None else x + bias[ids].to(x.dtype)
            x = x if name == LAST else self._gate(self.like, x)
        return x


# ---- structure ----------------------------------------------------------------------------------


def first_of(module: nn.Module) -> str:
    """The name of the first projection."""
    return next(name for name in FIRST if name in module._parameters)


def is_experts(module: nn.Module) -> bool:
    """Whether a module's parameters are those of fused experts."""
    known = {k: p for k, p in module._parameters.items() if p is not None}
    own = {k: p for k, p in known.items() if not is_lazy(p) and p.ndim == 3}
    firsts = [name for name in FIRST if name in own]
    return len(firsts) == 1 and set(own) == {firsts[0], LAST}


def is_transposed(module: nn.Module) -> bool:
    """Whether weights are [E, K, N], as gpt-oss and Llama 4 keep them."""
    first, last = module._parameters[first_of(module)], module._parameters[LAST]
    assert first is not None and last is not None
    said = getattr(module, "is_transposed", None)
    if first_of(module) == "up_proj":
        return bool(said)
    return first.shape[2] == 2 * last.shape[1] and first.shape[1] == last.shape[2]


def obstacle(module: nn.Module) -> str | None:
    """Why experts cannot be swapped."""
    first, last = module._parameters[first_of(module)], module._parameters[LAST]
    assert first is not None and last is not None
    wide = 2 if first_of(module) != "up_proj" else 1
    experts, rows, columns = first.shape
    if is_transposed(module):
        rows, columns = columns, rows
    one, two = last.shape[1:]
    inner, outer = (one, two) if is_transposed(module) else (two, one)
    if (last.shape[0], inner * wide, outer) != (experts, rows, columns):
        return f"shapes {list(first.shape)} and {list(last.shape)} are no experts'"
    if getattr(module, "has_post_expert_norm", False):
        return "it has a norm behind each expert"
    known = {first_of(module), LAST, f"{first_of(module)}_bias", f"{LAST}_bias"}
    held = [*module.named_parameters(), *module.named_buffers()]
    if more := [key for key, _ in held if key not in known]:
        return f"it has parameters or buffers that are no projection: {more[0]}"
    try:
        _gate_of(module, first_of(module))
    except ValueError as error:
        return str(error)
    return None


def decoded(module: QuantExperts, weights: Sequence[nn.Parameter]) -> nn.Module:
    """The float experts that were quantized, of the decoded projections."""
    made = without_parameters(module.like)
    for key, weight in zip((module.first_name, LAST), weights, strict=True):
        if module.is_turned:
            weight = nn.Parameter(weight.detach().transpose(1, 2).contiguous())
        made.register_parameter(key, weight)
        if (bias := getattr(module, f"{key}_bias")) is not None:
            made.register_parameter(f"{key}_bias", nn.Parameter(bias.detach()))
    return made.train(module.training)


def without_parameters(module: nn.Module) -> nn.Module:
    """A copy that shares all but them."""
    made = copy.copy(module)
    vars(made)["_parameters"] = {}
    return made


def _gate_of(module: nn.Module, first: str) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """What turns the first projection into the second's input: a function of module and values."""
    if first == "up_proj":
        gate = _activated
    elif hasattr(module, "_apply_gate"):
        gate = _own_gate
    elif hasattr(module, "limit"):
        gate = _clamped
    else:
        gate = _halves
    if gate in (_activated, _halves) and not callable(_activation(module)):
        raise ValueError("it has no act_fn to tell what stands between its projections")
    return gate


def _activation(module: Any) -> Any:
    return getattr(module, "act_fn", None) or getattr(module, "activation", None)


def _own_gate(module: Any, values: torch.Tensor) -> torch.Tensor:
    return module._apply_gate(values)


def _activated(module: Any, values: torch.Tensor) -> torch.Tensor:
    return _activation(module)(values)


def _halves(module: Any, values: torch.Tensor) -> torch.Tensor:
    gate, up = values.chunk(2, dim=-1)
    return _activation(module)(gate) * up


def _clamped(module: Any, values: torch.Tensor) -> torch.Tensor:
    """gpt-oss: gate and up alternate; (up + 1) * gate * sigmoid(alpha * gate), both clamped."""
    gate, up = values[..., ::2], values[..., 1::2]
    gate, up = gate.clamp(max=module.limit), up.clamp(-module.limit, module.limit)
    return (up + 1) * gate * torch.sigmoid(gate * getattr(module, "alpha", 1.702))
