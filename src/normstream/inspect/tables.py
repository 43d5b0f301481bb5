"""The tables in the terminal, and the rows that the report shares with them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from normstream.inspect.canvas import KINDS, REMARKS
from normstream.inspect.findings import findings, headline
from normstream.inspect.inspection import Inspection, SublayerRow
from normstream.inspect.wiring import Mark, marks, pattern, ranges
from normstream.lab.live import say
from normstream.lab.style import number, rate, short

SHOWN_LAYERS = 16
"""More layers than this are not all shown in the terminal."""
PLACES = {
    "pre": "before the",
    "output": "on the update of the",
    "trunk": "on the stream, behind the",
    "embedding": "on the embedding",
    "final": "final",
    "head": "between a matrix and the head",
    "q": "on the queries",
    "k": "on the keys",
    "v": "on the values",
    "latent_q": "on the latent vector of the queries",
    "latent_kv": "on the latent vector of keys and values",
    "sub": "inside the",
    "context": "on what the cross-attention reads",
    "no_effect": "no effect on these inputs, in the",
    "unknown": "not known",
}
"""What a place means; those that end in "the" go on with the sublayers."""
SUBLAYERS = {"mixer": "mixer", "ffn": "feed-forward", "cross": "cross-attention", "other": "sublayer"}
CASTS = {"before_gain": "before the gain", "after_gain": "after the gain", "float32": "none", "unknown": "?"}
SCOPES = {"stream": "stream", "per_head": "each head", "flattened": "all heads", "latent": "latent"}


@dataclass(frozen=True)
class NormRow:
    """All norms with one role under one name."""

    stack: str
    place: str
    of: str
    """Kinds of the sublayers."""
    path: str
    """With * for indices."""
    layers: tuple[int, ...]
    kind: str
    gain: str
    eps: str
    cast: str
    over: str
    count: int

    @property
    def meaning(self) -> str:
        """The place and its sublayers in words.

        >>> NormRow("main", "pre", "mixer", "norm", (0,), "RMS", "w", "1e-6", "none", "stream 8", 1).meaning
        'before the mixer'
        """
        words = PLACES[self.place]
        return f"{words} {' and '.join(self.of.split(', '))}" if words.endswith("the") else words


def norm_rows(inspection: Inspection) -> list[NormRow]:
    """The norms by role; of normstream's own models, whose names say little, those of the diagram."""
    groups: dict[tuple[str, ...], tuple[list[int], list[float], int]] = {}
    for stack, key, layers, eps, count in (*_probed(inspection), *_drawn(inspection)):
        known, values, total = groups.get((stack, *key), ([], [], 0))
        groups[stack, *key] = (known + list(layers), values + ([] if eps is None else [eps]), total + count)
    return [
        NormRow(stack, place, of, path, tuple(sorted(set(layers))), kind, gain, _span(eps), cast, over, count)
        for (stack, place, of, path, kind, gain, cast, over), (layers, eps, count) in groups.items()
    ]


Found = tuple[str, tuple[str, ...], Sequence[int], float | None, int]
"""Stack, what rows are grouped by, layers, eps, number of norms."""


def _probed(inspection: Inspection) -> Iterable[Found]:
    for stack in inspection.anatomy.stacks if inspection.anatomy else ():
        for site in stack.norms:
            key = _key(site.place, site.feeds, pattern(site.call.path), site)
            yield stack.name, key, () if site.layer is None else (site.layer,), site.facts.eps, 1


def _drawn(inspection: Inspection) -> Iterable[Found]:
    for wiring in () if inspection.anatomy else inspection.wiring:
        for mark, branch, layers in marks(wiring):
            feeds = (branch.kind,) if branch else ()
            yield wiring.stack, _key(mark.place, feeds, mark.path, mark), layers, mark.facts.eps, max(1, len(layers))


def _key(place: str, feeds: Iterable[str], path: str, site: Mark | object) -> tuple[str, ...]:
    facts, scope = site.facts, site.scope  # type: ignore[union-attr]
    over = f"{SCOPES[scope]} {facts.width}"
    gain = REMARKS[facts.gain] or "w"
    return (
        place,
        ", ".join(SUBLAYERS[kind] for kind in dict.fromkeys(feeds)),
        path,
        KINDS[facts.kind],
        gain + ", b" * facts.has_bias,
        CASTS[facts.cast],
        over,
    )


def _span(values: Sequence[float]) -> str:
    """One number, or the lowest and the highest of several.

    >>> _span([1e-6, 1.001e-6]), _span([1e-6, 1e-5]), _span([])
    ('1e-6', '1e-6 to 1e-5', '?')
    """
    if not values:
        return "?"
    low, high = min(values), max(values)
    return (
        rate(float(f"{low:.2g}"))
        if high <= 1.02 * low
        else f"{rate(float(f'{low:.2g}'))} to {rate(float(f'{high:.2g}'))}"
    )


@dataclass(frozen=True)
class StreamRow:
    """One stream leaving one layer, and what the layer's updates are like."""

    stack: str
    stream: str
    layer: int
    rms: float
    max_abs: float
    headroom_fp16: float
    update_share: dict[str, float]
    """RMS of the updates over that of the stream, by kind of sublayer; the mean where a layer has several."""
    lost_in_bf16: float
    """The largest share of an update that is lost."""
    cosine: float
    influence: float | None
    loss_increase: float | None


def stream_rows(inspection: Inspection) -> list[StreamRow]:
    """The streams by layer."""
    groups: dict[tuple[str, str, int], list[SublayerRow]] = {}
    for row in inspection.sublayers:
        groups.setdefault((row.stack, row.stream, row.layer), []).append(row)
    by_layer = {(row.stack, row.layer): row for row in inspection.layers}
    rows = []
    for (stack, stream, layer), own in groups.items():
        whole = by_layer.get((stack, layer))
        shares = {
            kind: fmean(row.update_rms / row.rms for row in own if row.kind == kind and row.rms)
            for kind in dict.fromkeys(row.kind for row in own if row.rms)
        }
        rows.append(
            StreamRow(
                stack=stack,
                stream=stream,
                layer=layer,
                rms=own[-1].rms,
                max_abs=max(row.max_abs for row in own),
                headroom_fp16=min(row.headroom_fp16 for row in own),
                update_share=shares,
                lost_in_bf16=max(row.lost_in_bf16 for row in own),
                cosine=fmean(row.cosine for row in own),
                influence=whole.influence if whole else None,
                loss_increase=whole.loss_increase if whole else None,
            )
        )
    return rows


def show(inspection: Inspection, console: Console, out: Path | None) -> None:
    """Prints what was found: a headline, the norms, the streams, findings and notes."""
    say(console, f"{headline(inspection)}\n")
    console.print(_norm_table(norm_rows(inspection), inspection))
    rows = stream_rows(inspection)
    for stack, stream in dict.fromkeys((row.stack, row.stream) for row in rows):
        own = [row for row in rows if (row.stack, row.stream) == (stack, stream)]
        console.print()
        if len(own) < len(rows):
            say(console, f"{stack}, stream {stream}" if stack != "main" else f"stream {stream}")
        console.print(_stream_table(own))
        if len(own) > SHOWN_LAYERS:
            say(console, f"{SHOWN_LAYERS} of {len(own)} layers; the report has all of them")
    say(console, "")
    for sentence in findings(inspection):
        say(console, f"* {sentence}")
    for note in inspection.notes:
        say(console, f"note: {note}")
    if out is not None:
        say(console, f"\nReport: {out / 'report.html'}")


def _norm_table(rows: Sequence[NormRow], inspection: Inspection) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("place", "of", "norm", "kind", "gain", "eps", "over"):
        table.add_column(name, overflow="fold")
    stacks = list(dict.fromkeys(row.stack for row in rows))
    depths = {wiring.stack: wiring.n_layers for wiring in inspection.wiring}
    for stack in stacks:
        if len(stacks) > 1:
            table.add_row(f"[bold]{escape(stack)}[/bold]")
        for row in (row for row in rows if row.stack == stack):
            path = row.path
            if row.layers and len(row.layers) < depths.get(stack, 0):
                path += f"  (layers {ranges(row.layers)})"
            cells = (row.place.replace("_", " "), row.of, path, row.kind, row.gain, row.eps, row.over)
            table.add_row(*map(escape, cells))
    return table


def _stream_table(rows: Sequence[StreamRow]) -> Table:
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.update_share))
    table = Table(box=None, pad_edge=False, header_style="dim")
    names = ("layer", "rms", "max |h|", "fp16 room", *(f"{kind} / h" for kind in kinds))
    for name in (*names, "bf16 loss", "cosine", "influence", "loss without"):
        table.add_column(name, justify="right")
    for row in thinned(rows):
        shares = [percent(row.update_share.get(kind)) for kind in kinds]
        cells = (str(row.layer), short(row.rms), short(row.max_abs), short(row.headroom_fp16), *shares)
        loss = "-" if row.loss_increase is None else f"{row.loss_increase:+.3f}"
        table.add_row(*cells, percent(row.lost_in_bf16), number(row.cosine, 2), number(row.influence), loss)
    return table


def thinned(rows: Sequence[StreamRow]) -> list[StreamRow]:
    """At most ``SHOWN_LAYERS`` rows, evenly spread, with the first and the last."""
    if len(rows) <= SHOWN_LAYERS:
        return list(rows)
    step = (len(rows) - 1) / (SHOWN_LAYERS - 1)
    return [rows[round(i * step)] for i in range(SHOWN_LAYERS)]


def percent(value: float | None) -> str:
    """A share in percent.

    >>> percent(0.123), percent(1.5), percent(None)
    ('12 %', '150 %', '-')
    """
    return "-" if value is None else f"{100 * value:.2g} %" if value < 0.1 else f"{100 * value:.0f} %"
