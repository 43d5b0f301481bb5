"""Which vectors of zeros are scales: with them, something has no effect. A bias of zero takes nothing away."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from normstream.inspect.hooks import copied, tensors_in
from normstream.inspect.measures.layer_borders import hooked, with_gradients

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def zero_scales(model: nn.Module, inputs: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Those of the vectors that are scales: at zero, more of what is around them has no gradient than at one.

    Each is tried in the module that holds it, or the first one around that runs; one that never runs counts as a scale.

    Args:
        model: changed only for the time of the call.
        inputs: keyword arguments of its ``forward``.
        names: of parameters.

    >>> class Layer(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.scale, self.bias = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    ...     def forward(self, x):
    ...         return self.scale * x + self.bias
    >>> zero_scales(Layer(), {"x": torch.ones(3, 4)}, ["scale", "bias"])
    ['scale']
    """
    parameters = dict(model.named_parameters())
    around = {name: _around(name) for name in names}
    given = _first_arguments(model, inputs, {path for paths in around.values() for path in paths})
    found = []
    for name, paths in around.items():
        path = next((path for path in paths if path in given), None)
        if path is None or _is_scale(model.get_submodule(path), given[path], parameters[name]):
            found.append(name)
    return found


def _around(name: str) -> list[str]:
    """Paths of the modules around a parameter, the innermost first, the whole model last."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(len(parts) - 1, -1, -1)]


def _first_arguments(model: nn.Module, inputs: Mapping[str, Any], paths: set[str]) -> dict[str, Arguments]:
    given: dict[str, Arguments] = {}

    def keep(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if path not in given:
                given[path] = copied((args, kwargs))

        return hook

    modules = [(path, module) for path, module in model.named_modules() if path in paths]
    installs = [lambda m=m, p=path: m.register_forward_pre_hook(keep(p), with_kwargs=True) for path, m in modules]
    with torch.no_grad(), hooked(installs):
        model(**inputs)
    return given


def _is_scale(module: nn.Module, given: Arguments, vector: nn.Parameter) -> bool:
    at_zero, at_one = (_has_effect(module, given, vector, value) for value in (0.0, 1.0))
    return any(one and not zero for zero, one in zip(at_zero, at_one, strict=True))


def _has_effect(module: nn.Module, given: Arguments, vector: nn.Parameter, value: float) -> list[bool]:
    """Whether the output moves with each of the module's inputs and other parameters."""
    with torch.no_grad():
        before = vector.clone()
        vector.fill_(value)
    args, kwargs = copied(given)
    entering = [tensor.requires_grad_() for tensor in tensors_in((args, kwargs))]
    wanted = [*entering, *(p for p in module.parameters() if p is not vector and p.requires_grad)]
    with with_gradients():
        args, kwargs = copied((args, kwargs))  # leaves may not be changed in place
        generator = torch.Generator().manual_seed(0)
        left = [t for t in tensors_in(module(*args, **kwargs)) if t.requires_grad]
        noise = [torch.randn(t.shape, generator=generator) for t in left]
        moved = torch.autograd.grad(left, wanted, noise, allow_unused=True) if left else [None] * len(wanted)
    with torch.no_grad():
        vector.copy_(before)
    return [gradient is not None and bool(gradient.any()) for gradient in moved]
