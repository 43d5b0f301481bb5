"""The same model from a changed config, and what the numbers in a config do: found by trying them, not by their names.

``rebuild`` gives a new model of the same class whose tensors are the old one's, so that it costs no memory and no
initialization.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normstream.inspect.anatomy import NormFacts
from normstream.inspect.probing.norm_facts import find_norms
from normstream.lab.runner import is_out_of_memory

SAME = 0.02
"""Largest relative difference between a measured number and the one in the config that it may come from."""


def rebuild(model: nn.Module, changes: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> nn.Module:
    """The model that its class makes of its config with some values changed; it shares its tensors with ``model``.

    Args:
        model: a transformers model.
        changes: new values by key; a key inside another config or a dictionary has dots.
        tensors: the new model's tensors by name, where they are not all of ``model``'s.

    Raises:
        ValueError: if the model has no config of transformers. What the class says to a value that it does not take
            is raised as it is.
    """
    from transformers.initialization import no_init_weights

    config = copy.deepcopy(_config(model))
    for key, value in changes.items():
        *path, name = key.split(".")
        owner = config
        for part in path:
            owner = owner[part] if isinstance(owner, dict) else getattr(owner, part)
        if isinstance(owner, dict):
            owner[name] = value
        else:
            setattr(owner, name, value)
    with no_init_weights(), _default_dtype(next(model.parameters()).dtype):
        new: Any = type(model)(config)
    new.load_state_dict(dict(model.state_dict() if tensors is None else tensors), assign=True)
    new.tie_weights()
    return new.train(model.training)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """For what a model computes from its config, as Gemma's embedding multiplier: loading it does the same."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def config_numbers(model: nn.Module, is_wanted: Callable[[float], bool]) -> dict[str, float]:
    """The floats of a model's config that satisfy a condition, by key; those of nested configs with dots."""
    return {key: value for key, value in _floats(_config(model).to_dict(), "") if is_wanted(value)}


def _config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        raise ValueError(f"{type(model).__name__} has no config of transformers: its numbers cannot be changed there")
    return config


def _floats(values: Mapping[Any, Any], prefix: str) -> Iterable[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _floats(value, f"{prefix}{name}.")
        elif isinstance(value, float):
            yield f"{prefix}{name}", value


def eps_of_config(
    model: nn.Module, inputs: Mapping[str, Any], facts: Mapping[str, NormFacts]
) -> dict[str, frozenset[str]]:
    """Which norms each eps of the config serves: by key, the paths of the norms whose measured eps follows it."""
    measured = [fact.eps for fact in facts.values() if fact.eps]
    served = {}
    for key, value in config_numbers(model, lambda x: any(is_same(x, eps) for eps in measured)).items():
        try:
            changed = find_norms(rebuild(model, {key: value / 4}), inputs)
        except (TypeError, ValueError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            continue  # a number of another kind that this class does not let go
        paths = {path for path, fact in changed.items() if _is_quartered(facts.get(path), fact)}
        if paths:
            served[key] = frozenset(paths)
    return served


def _is_quartered(before: NormFacts | None, after: NormFacts) -> bool:
    return before is not None and bool(before.eps) and after.eps is not None and is_same(4 * after.eps, before.eps)


def is_same(value: float, measured: float) -> bool:
    """Whether a measured number may be this one.

    >>> is_same(1e-6, 1.001e-6), is_same(1e-6, 1e-5)
    (True, False)
    """
    return abs(value - measured) <= SAME * abs(measured)


def eps_attributes(module: nn.Module, eps: float) -> tuple[str, ...]:
    """The attributes of a norm module that hold its measured eps.

    >>> eps_attributes(nn.LayerNorm(2, eps=1e-5), 1e-5)
    ('eps',)
    """
    return tuple(name for name, value in vars(module).items() if isinstance(value, float) and is_same(value, eps))


def separate(model: nn.Module) -> None:
    """Gives a model its own copy of every parameter; those that it shares within itself stay shared."""
    copies: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in copies:
                copies[parameter] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            setattr(module, name, copies[parameter])
