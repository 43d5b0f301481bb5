"""What a residual stream starts from: the parameters that scale its first value when they are scaled.

They are looked for among the modules outside the layers: token, position and type embeddings, patches, free
parameters such as a class token, the gain and bias of a norm on the embedding, a projection behind it.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normstream.checkpoints.rescaling.feeders import near
from normstream.inspect.anatomy import Call
from normstream.inspect.hooks import tensors_in

MOST_GROUPS = 10
"""Modules that a stream may start from; every set of them may have to be tried."""


class _ArrivedError(Exception):
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@torch.no_grad()
def arriving(model: nn.Module, inputs: Mapping[str, Any], call: Call) -> Tensor:
    """What a call is given; the model is run only so far.

    >>> arriving(nn.Sequential(nn.Identity(), nn.Tanh()), {"input": torch.ones(1)}, Call("1"))
    tensor([1.])
    """
    left = [call.index]

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if left[0] == 0:
            given = next(tensors_in((args, kwargs)), None)
            if given is None:
                raise ValueError(f"{call} takes no tensor")
            raise _ArrivedError(given.clone())
        left[0] -= 1

    handle = model.get_submodule(call.path).register_forward_pre_hook(enter, with_kwargs=True)
    try:
        model(**inputs)
    except _ArrivedError as arrived:
        return arrived.tensor
    finally:
        handle.remove()
    raise ValueError(f"{call} did not run")


def starting_modules(
    model: nn.Module,
    inputs: Mapping[str, Any],
    target: Call,
    outside: Sequence[str],
    last_choice: Collection[nn.Parameter] = (),
) -> tuple[str, ...] | None:
    """The fewest modules whose own parameters, all halved, halve what arrives at ``target``; None if there are none.

    Args:
        target: the first layer, or a norm on the embedding.
        outside: paths of the modules with parameters of their own that may belong to it.
        last_choice: parameters that are better left alone: the head's, where it is tied.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Linear(2, 2), nn.Tanh())
    >>> starting_modules(model, {"input": torch.randn(3, 2)}, Call("3"), ["0", "1", "2"])
    ('2',)
    """
    whole = arriving(model, inputs, target)
    matter = [path for path in outside if not torch.equal(_halved(model, inputs, target, [path]), whole)]
    if len(matter) > MOST_GROUPS:
        raise ValueError(f"the stream starts from {len(matter)} modules, at most {MOST_GROUPS} can be searched")
    sets = [chosen for size in range(1, len(matter) + 1) for chosen in itertools.combinations(matter, size)]

    def takes_last_choice(chosen: Sequence[str]) -> bool:
        own = (parameter for path in chosen for parameter in model.get_submodule(path).parameters(recurse=False))
        return any(parameter is other for parameter in own for other in last_choice)

    sets.sort(key=takes_last_choice)
    return next((chosen for chosen in sets if near(2 * _halved(model, inputs, target, chosen), whole)), None)


def _halved(model: nn.Module, inputs: Mapping[str, Any], target: Call, paths: Sequence[str]) -> Tensor:
    own = [parameter for path in paths for parameter in model.get_submodule(path).parameters(recurse=False)]
    with multiplied(own, 0.5):
        return arriving(model, inputs, target)


@contextmanager
def multiplied(parameters: Sequence[nn.Parameter], factor: float) -> Iterator[None]:
    """Parameters times a factor, for the time of a ``with``."""
    own = {id(parameter): parameter for parameter in parameters}.values()
    before = [parameter.detach().clone() for parameter in own]
    try:
        with torch.no_grad():
            for parameter in own:
                parameter.mul_(factor)
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(own, before, strict=True):
                parameter.copy_(value)
