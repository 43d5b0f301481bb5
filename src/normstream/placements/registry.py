"""From a name such as ``siamese`` or ``siamese(depth_scale=paper)`` to a placement.

A package adds its own with the decorator ``register`` or with an entry point of the group ``normstream.placements``
whose object is a ``Placement`` subclass.
"""

import functools
import re
from dataclasses import fields
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from normstream.names import nearest
from normstream.placements.mixed import Mixed, Part
from normstream.placements.placement import Placement

ENTRY_POINT_GROUP = "normstream.placements"
PlacementClass = TypeVar("PlacementClass", bound=type[Placement])
_PLACEMENTS: dict[str, type[Placement]] = {}


def register(placement: PlacementClass) -> PlacementClass:
    """Class decorator: makes a placement known under its ``name``.

    Raises ValueError if another placement has the name already.

    >>> import normstream
    >>> normstream.placements.get("pre").streams
    ('x',)
    """
    known = _PLACEMENTS.setdefault(placement.name, placement)
    if known is not placement and known.__qualname__ != placement.__qualname__:
        raise ValueError(
            f"a placement named {placement.name!r} exists already: {known.__module__}.{known.__qualname__}; "
            "choose another name"
        )
    _PLACEMENTS[placement.name] = placement
    return placement


@functools.cache
def _load_entry_points() -> None:
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        register(entry_point.load())


def names() -> list[str]:
    """The names of all placements, sorted.

    >>> "siamese" in names()
    True
    """
    _load_entry_points()
    return sorted(_PLACEMENTS)


def get(spec: str) -> Placement:
    """The placement that ``spec`` names: ``NAME`` or ``NAME(option=value,...)``, or one for each range of blocks.

    A range follows its placement, blocks counted from 0, both ends included: ``post:0-5,pre:6-23``, ``post:0,pre:1-``.

    Raises ValueError for an unknown name, option or value, with the nearest known one, and for ranges that do not fit.

    >>> get("post(final_norm=true)").final_norm
    True
    >>> str(get("post:0-5, pre:6-"))
    'post:0-5,pre:6-'
    """
    if not isinstance(spec, str):
        raise ValueError(f"expected a placement as text, such as siamese(depth_scale=paper), got {spec!r}")
    parts = re.split(r"\s*,\s*(?![^(]*\))", spec.strip())
    if len(parts) == 1 and ":" not in spec:
        return _get_one(spec)
    return Mixed(tuple(_part(part, spec) for part in parts))


_RANGE = re.compile(r":\s*(\d+)\s*(-)?\s*(\d+)?\s*$")


def _part(text: str, spec: str) -> Part:
    match = _RANGE.search(text)
    if match is None:
        raise ValueError(f"expected PLACEMENT:FIRST-LAST, as in post:0-5,pre:6-23, got {text!r} in {spec!r}")
    first, dash, last = match.groups()
    return Part(_get_one(text[: match.start()]), int(first), int(last or first) if last or not dash else None)


def _get_one(spec: str) -> Placement:
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", spec)
    if match is None:
        raise ValueError(f"expected a placement such as siamese or siamese(depth_scale=paper), got {spec!r}")
    name, arguments = match.groups()
    if name not in names():
        raise ValueError(f"unknown placement {name!r}; {nearest(name, names())}")
    placement = _PLACEMENTS[name]
    hints = get_type_hints(placement)
    options = {}
    for argument in filter(None, re.split(r"\s*,\s*", (arguments or "").strip())):
        key, equals, text = (part.strip() for part in argument.partition("="))
        known = [field.name for field in fields(placement)]
        if not equals:
            raise ValueError(f"expected option=value in {spec!r}, got {argument!r}")
        if key not in known:
            raise ValueError(f"placement {name!r} has no option {key!r}; {nearest(key, known)}")
        if key in options:
            raise ValueError(f"option {key!r} is given twice in {spec!r}; give it once")
        options[key] = _parse(text, hints[key], f"option {key!r} of placement {name!r}")
    return placement(**options)


def _parse(text: str, hint: Any, what: str) -> Any:
    words, number = _words(hint), next((kind for kind in (hint, *get_args(hint)) if kind in (int, float)), None)
    if text in words:
        return words[text]
    if number is None:
        raise ValueError(f"{what} cannot be {text!r}; {nearest(text, words)}")
    try:
        return number(text)
    except ValueError:
        expected = " or ".join(("a whole number" if number is int else "a number", *words))
        raise ValueError(f"{what} must be {expected}, got {text!r}") from None


def _words(hint: Any) -> dict[str, Any]:
    """The words that an option can be: those of a Literal, also of one in a union with a number, or true and false."""
    if hint is bool:
        return {"true": True, "false": False}
    if get_origin(hint) is Literal:
        return {str(choice): choice for choice in get_args(hint)}
    return {word: value for part in get_args(hint) for word, value in _words(part).items()}
