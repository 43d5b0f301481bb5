"""What a message says about names: about one that nobody knows, and about many."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, get_args


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest of the known names, and all of them.

    >>> nearest("siamse", ["pre", "siamese"])
    "did you mean 'siamese'? Known: pre, siamese"
    """
    known = list(known)
    close = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return (f"did you mean {close[0]!r}? " if close else "") + f"Known: {', '.join(known)}"


def shortened(names: Sequence[str]) -> str:
    """The first three of many names, and how many more there are.

    >>> shortened(["a", "b", "c", "d"])
    'a, b, c and 1 more'
    """
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


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
