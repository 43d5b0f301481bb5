"""Frozen dataclasses to YAML and back: what a run writes starts the same run again, and nothing is guessed.

Reading is strict. An unknown key is an error with the nearest known one, a value of the wrong type is an error; a
missing key takes its default.
"""

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import yaml

from normstream.names import nearest

T = TypeVar("T")
RENAMED = {
    "model.rope_theta": "it is model.positions.theta now",
    "model.qkv_norm": "it is model.inner.qk and model.inner.v now",
    "model.bias": "it is none instead of false and all instead of true now",
}
"""Keys of older versions, or keys whose true and false were replaced, and by what."""
RENAMED_VALUES: dict[str, dict[Any, str]] = {"activation_checkpointing": {False: "none", True: "layer"}}
"""Values of older versions that mean exactly one of today's."""


def config_to_dict(config: Any) -> dict[str, Any]:
    """A config as plain dictionaries, lists, strings, numbers and None, every field present.

    >>> from normstream.norms import NormConfig
    >>> config_to_dict(NormConfig())["eps"]
    1e-05
    """
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def config_from_dict(values: Any, kind: type[T], where: str = "") -> T:
    """A config of class ``kind`` from plain values.

    Args:
        values: a dictionary; missing keys take their defaults.
        kind: a dataclass.
        where: dotted prefix of the keys in error messages.

    Raises:
        ValueError: for an unknown key, a value of the wrong type, or values that the class itself refuses.

    >>> from normstream.norms import NormConfig
    >>> config_from_dict({"knd": "layer"}, NormConfig)
    Traceback (most recent call last):
    ValueError: unknown key 'knd'; did you mean 'kind'? Known: kind, eps, gain, gain_init, cast, bias, alpha, scope
    """
    if not isinstance(values, dict):
        raise ValueError(f"{where.rstrip('.') or 'the config'} must be a mapping of keys to values, got {values!r}")
    hints = typing.get_type_hints(kind)
    if (nested := getattr(kind, "nested", None)) is not None:  # classes that depend on other values
        hints |= nested(values)
    known = [field.name for field in dataclasses.fields(kind)]  # pyright: ignore[reportArgumentType]
    for key in values:
        if key not in known:
            name = where + str(key)
            raise ValueError(f"unknown key {name!r}; {_replacement(name) or nearest(str(key), known)}")
    return kind(**{key: _typed(value, hints[key], where + key) for key, value in values.items()})


def config_to_yaml(config: Any) -> str:
    """A config as YAML, in the order of its fields; ``config_from_yaml`` gives an equal config back.

    >>> from normstream.norms import NormConfig
    >>> print(config_to_yaml(NormConfig()).splitlines()[0])
    kind: rms
    """
    return yaml.safe_dump(config_to_dict(config), sort_keys=False)


def config_from_yaml(text: str, kind: type[T]) -> T:
    """The config of class ``kind`` that a YAML text describes; raises ValueError as ``config_from_dict`` does.

    >>> from normstream.norms import NormConfig
    >>> config_from_yaml("{kind: layer, eps: 1e-6}", NormConfig).eps
    1e-06
    """
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"not valid YAML: {error}") from None
    return config_from_dict({} if values is None else values, kind)


def _replacement(name: str) -> str | None:
    """What replaced an old key; a comparison's config has the model's keys below ``base``."""
    prefix = "base." if name.startswith("base.") else ""
    said = RENAMED.get(name.removeprefix(prefix))
    return said and said.replace("model.", f"{prefix}model.")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return config_to_dict(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _typed(value: Any, hint: Any, where: str) -> Any:
    """``value`` as the type ``hint``, or ValueError."""
    origin, arguments = get_origin(hint), get_args(hint)
    if dataclasses.is_dataclass(hint):
        return config_from_dict(value, hint, where + ".")  # pyright: ignore[reportArgumentType]
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (hint,) = (argument for argument in arguments if argument is not type(None))
        return _typed(value, hint, where)
    if origin is Literal:
        if isinstance(value, bool):
            value = RENAMED_VALUES.get(where.removeprefix("base."), {}).get(value, value)
        if value not in arguments:
            replacement = _replacement(where) if isinstance(value, bool) else None
            raise ValueError(f"{where} cannot be {value!r}; {replacement or nearest(str(value), map(str, arguments))}")
        return value
    if origin is tuple:
        return _typed_tuple(value, arguments, where)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:  # YAML 1.1 reads 1e-3 as a string and 1 as an integer
            return float(value)
        except (ValueError, OverflowError):
            pass
    if type(value) is not hint:
        raise ValueError(f"{where} must be of type {hint.__name__}, got {value!r}")
    return value


def _typed_tuple(value: Any, hints: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} must be a list, got {value!r}")
    if len(hints) == 2 and hints[1] is Ellipsis:
        hints = (hints[0],) * len(value)
    if len(hints) != len(value):
        raise ValueError(f"{where} must have {len(hints)} values, got {value!r}")
    return tuple(_typed(item, hint, f"{where}[{i}]") for i, (item, hint) in enumerate(zip(value, hints, strict=True)))
