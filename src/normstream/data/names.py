"""What an error message says about a name that nobody knows."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest of the known names, and all of them.

    >>> nearest("stdlb", ["stdlib", "books"])
    "did you mean 'stdlib'? Known: stdlib, books"
    """
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return (f"did you mean {close[0]!r}? " if close else "") + f"Known: {', '.join(known)}"
