"""How placements and numbers look everywhere in the lab: one name, one colour, one marker for each placement."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from normstream import placements

SHORT_TITLES = {"siamese": "SiameseNorm"}
MANY = 8
"""More placements than this are not all told apart by colour, nor all named in a sentence."""
FAMILIAR = ("pre", "post", "siamese")
"""Placements that readers look for first, however many others there are."""

# Okabe and Ito's colour-blind safe hues, darkened until each has a contrast of at least 3:1 on white.
COLOURS = {"pre": "#0072b2", "post": "#d96c00", "siamese": "#008f6b", "siamese_hybrid_pre": "#b0508c"}
# Far from those and from each other in OKLab, as seen by protanopes and deuteranopes too.
SPARE_COLOURS = ("#6200ff", "#9d0000", "#274e4e", "#b162ff", "#761489")
GREY = "#87919b"
MARKERS = {"pre": "o", "post": "s", "siamese": "D", "siamese_hybrid_pre": "^"}
SPARE_MARKERS = ("v", "P", "X", "<", ">")


@dataclass(frozen=True)
class Look:
    """The colour and marker of one placement in every picture; a quiet one is a thin grey line without a marker."""

    label: str
    colour: str
    marker: str
    quiet: bool = False


def label(placement: str) -> str:
    """Return the name that readers know, options added in parentheses; a placement not installed here keeps its own.

    >>> label("pre"), label("siamese(depth_scale=paper)"), label("gone")
    ('Pre-Norm', 'SiameseNorm (depth_scale=paper)', 'gone')
    """
    name, _, options = placement.partition("(")
    try:
        title = SHORT_TITLES.get(name) or placements.get(name).title
    except ValueError:
        return placement
    if not options:
        return title
    return f"{title[:-1]}, {options}" if title.endswith(")") else f"{title} ({options}"


def looks(specs: Sequence[str], loud: Container[str] | None = None) -> dict[str, Look]:
    """Give every placement its colour and marker; those without a fixed one take the spare ones in order.

    Up to eight placements differ in both. With `loud`, every placement that is not in it is quiet.

    >>> looks(["pre", "my_own"])["my_own"].colour
    '#6200ff'
    """
    shown = [spec for spec in specs if loud is None or spec in loud]
    unused = [spec for spec in COLOURS if spec not in shown]
    free = [*zip(SPARE_COLOURS, SPARE_MARKERS, strict=True), *((COLOURS[spec], MARKERS[spec]) for spec in unused)]
    unnamed = [spec for spec in shown if spec not in COLOURS]
    own = {spec: (COLOURS[spec], MARKERS[spec]) for spec in shown if spec in COLOURS}
    own |= {spec: free[i % len(free)] for i, spec in enumerate(unnamed)}
    return {
        spec: Look(label(spec), *own[spec]) if spec in own else Look(label(spec), GREY, "", quiet=True)
        for spec in specs
    }


def ordinal(n: int) -> str:
    """Write a place in a ranking.

    >>> ordinal(1), ordinal(12), ordinal(23)
    ('1st', '12th', '23rd')
    """
    last = 0 if n % 100 in (11, 12, 13) else n % 10
    return str(n) + {1: "st", 2: "nd", 3: "rd"}.get(last, "th")


def rate(lr: float) -> str:
    """Write a learning rate as people do.

    >>> rate(0.002), rate(2e-5)
    ('0.002', '2e-5')
    """
    mantissa, e, exponent = f"{lr:g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if e else mantissa


def number(value: float | None, digits: int = 3) -> str:
    """Write a number with fixed decimals, and one that does not exist as a dash.

    >>> number(2.1184), number(None)
    ('2.118', '-')
    """
    return "-" if value is None else f"{value:.{digits}f}"


def short(value: float | None) -> str:
    """Write a number of any size with three significant digits.

    >>> short(0.012345), short(1234567.0), short(41.2), short(None)
    ('0.0123', '1.23e6', '41.2', '-')
    """
    if value is None:
        return "-"
    if 1000 <= abs(value) < 100_000:
        return f"{value:.0f}"
    return rate(float(f"{value:.3g}"))


def join_words(words: Sequence[str]) -> str:
    """Join words as in a sentence.

    >>> join_words(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def duration(seconds: float | None) -> str:
    """Write a time span for people.

    >>> duration(75), duration(5.2), duration(4000), duration(None)
    ('1m 15s', '5s', '1h 06m', '-')
    """
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"
