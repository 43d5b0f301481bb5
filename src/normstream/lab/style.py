"""How placements and numbers look everywhere in the lab: one name, one colour, one marker for each placement."""

from collections.abc import Sequence
from dataclasses import dataclass

from normstream import placements

SHORT_TITLES = {"siamese": "SiameseNorm"}

# Okabe and Ito's colour-blind safe hues, darkened until each has a contrast of at least 3:1 on white.
COLOURS = {"pre": "#0072b2", "post": "#d96c00", "siamese": "#008f6b", "siamese_hybrid_pre": "#b0508c"}
SPARE_COLOURS = ("#2a92cf", "#8c6d00", "#7a5cc0", "#6b7280", "#a3423c", "#4d7c0f")
MARKERS = {"pre": "o", "post": "s", "siamese": "D", "siamese_hybrid_pre": "^"}
SPARE_MARKERS = ("v", "P", "X", "<", ">", "h")


@dataclass(frozen=True)
class Look:
    """The colour and marker of one placement in every picture."""

    label: str
    colour: str
    marker: str


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


def looks(specs: Sequence[str]) -> dict[str, Look]:
    """Give every placement its colour and marker; those without a fixed one take the spare ones in order.

    >>> looks(["pre", "my_own"])["my_own"].colour
    '#2a92cf'
    """
    unnamed = [spec for spec in specs if spec not in COLOURS]
    order = {placement: i % len(SPARE_COLOURS) for i, placement in enumerate(unnamed)}
    return {
        p: Look(label(p), COLOURS[p], MARKERS[p])
        if p in COLOURS
        else Look(label(p), SPARE_COLOURS[order[p]], SPARE_MARKERS[order[p]])
        for p in specs
    }


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
