"""Checks that every configuration makes when it is built."""

import functools
from dataclasses import fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

Hint = Any
"""What an annotation says."""


def check_types(config: Any, prefix: str = "") -> None:
    """Raises ValueError for a field that holds a value of another type than it says.

    Whole numbers may stand for floats. Numbers of numpy are replaced by Python's, which is what a config file holds;
    nothing else is converted. Fields of a ``Literal`` type are left to their own checks, which know the choices.

    Args:
        config: a frozen dataclass.
        prefix: what comes before the fields' names in messages, such as "optimizer.".

    >>> from dataclasses import make_dataclass
    >>> check_types(make_dataclass("Config", [("n_layers", int)])(3.5))
    Traceback (most recent call last):
    ValueError: n_layers must be of type int, got 3.5 (float)
    """
    hints = _hints(type(config))
    for entry in fields(config):
        value = _plain(getattr(config, entry.name))
        if value is not getattr(config, entry.name):
            object.__setattr__(config, entry.name, value)
        if not _fits(value, hint := hints[entry.name]):
            name = prefix + entry.name
            raise ValueError(f"{name} must be of type {_name(hint)}, got {value!r} ({type(value).__name__})")


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Hint]:
    return get_type_hints(kind)


def _plain(value: Any) -> Any:
    """The value with numpy's numbers replaced; the same object if there are none."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) is tuple and any(isinstance(item, np.generic) for item in value):
        return tuple(map(_plain, value))
    return value


def _fits(value: Any, hint: Hint) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, kind) for kind in arguments)
    if origin is tuple:
        if type(value) is not tuple:
            return False
        items = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return len(items) == len(value) and all(map(_fits, value, items))
    if hint is Any or not isinstance(hint, type):
        return True  # anything, or a Literal
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, hint) or (hint is float and isinstance(value, int))


def _name(hint: Hint) -> str:
    """A type as messages say it.

    >>> _name(tuple[float, ...] | None)
    'tuple of float or None'
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_name(kind) for kind in arguments)
    if origin is tuple:
        same = arguments[-1] is Ellipsis
        return f"tuple of {_name(arguments[0])}" if same else f"tuple of {len(arguments)} {_name(arguments[0])}s"
    return "None" if hint is type(None) else getattr(hint, "__name__", str(hint))
