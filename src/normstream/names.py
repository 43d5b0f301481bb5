"""What an error message says about a name that nobody knows."""

import difflib
from collections.abc import Iterable
from typing import Any, get_args


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest of the known names, and all of them.

    >>> nearest("siamse", ["pre", "siamese"])
    "did you mean 'siamese'? Known: pre, siamese"
    """
    known = list(known)
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return (f"did you mean {close[0]!r}? " if close else "") + f"Known: {', '.join(known)}"


def check_choice(what: str, value: str, literal: Any) -> None:
    """Raises ValueError unless ``value`` is one of the strings of a ``Literal`` type.

    >>> from typing import Literal
    >>> check_choice("activation", "glu", Literal["swiglu", "gelu"])
    Traceback (most recent call last):
    ValueError: activation cannot be 'glu'; did you mean 'gelu'? Known: swiglu, gelu
    """
    choices = get_args(literal)
    if value not in choices:
        raise ValueError(f"{what} cannot be {value!r}; {nearest(str(value), choices)}")
