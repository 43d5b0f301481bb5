"""The tables in the terminal, and the rows that the report shares with them."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from normstream.inspect.anatomy import NormSite
from normstream.inspect.inspection import Inspection, LayerRow, SublayerRow
from normstream.inspect.paths import folded, site_path
from normstream.inspect.report.canvas import KINDS, REMARKS
from normstream.inspect.report.findings import findings, headline
from normstream.inspect.report.multipliers import multipliers
from normstream.inspect.report.wiring import Mark, marks, normed_streams, ranges
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
    """Kinds of the sublayers: mixer, ffn, cross, other."""
    path: str
    """With * for the layer's index."""
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
        kinds = [SUBLAYERS[kind] for kind in self.of.split(", ") if kind]
        return f"{words} {' and '.join(kinds)}" if words.endswith("the") else words


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
            key = _key(site.place, site.feeds, site_path(site, stack), site)
            yield stack.name, key, () if site.layer is None else (site.layer,), site.facts.eps, 1


def _drawn(inspection: Inspection) -> Iterable[Found]:
    for wiring in () if inspection.anatomy else inspection.wiring:
        for mark, branch, layers in marks(wiring):
            feeds = (branch.kind,) if branch else ()
            yield wiring.stack, _key(mark.place, feeds, mark.path, mark), layers, mark.facts.eps, max(1, len(layers))


def _key(place: str, feeds: Iterable[str], path: str, site: Mark | NormSite) -> tuple[str, ...]:
    facts, scope = site.facts, site.scope
    over = f"{SCOPES[scope]} {facts.width}"
    gain = REMARKS[facts.gain] or "w"
    return (
        place,
        ", ".join(dict.fromkeys(feeds)),
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
    """Of this stream."""
    loss_increase: float | None
    """Of the layer: without it for all streams."""


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
                influence=whole.influence_by_stream.get(stream) if whole else None,
                loss_increase=whole.loss_increase if whole else None,
            )
        )
    return rows


def joint_rows(inspection: Inspection) -> dict[str, list[LayerRow]]:
    """By stack, the layers whose streams are several: what is said of all of them together is shown once."""
    stacks: dict[str, list[LayerRow]] = {}
    for row in inspection.layers:
        if len(row.influence_by_stream) > 1:
            stacks.setdefault(row.stack, []).append(row)
    return stacks


def show(inspection: Inspection, console: Console, out: Path | None) -> None:
    """Prints what was found: a headline, multipliers, the norms, the streams, findings and notes."""
    say(console, headline(inspection))
    if line := multipliers(inspection):
        say(console, line)
    console.print()
    console.print(_norm_table(norm_rows(inspection), inspection, console.width))
    _show_streams(inspection, console)
    say(console, "")
    for sentence in findings(inspection):
        say(console, f"* {sentence}")
    for note in inspection.notes:
        say(console, f"note: {note}")
    if out is not None:
        say(console, f"\nReport: {out / 'report.html'}")


def _show_streams(inspection: Inspection, console: Console) -> None:
    """A table for each stream, and for several ones another of what is said of all of them together."""
    rows, joint, normed = stream_rows(inspection), joint_rows(inspection), normed_streams(inspection.wiring)
    for stack in dict.fromkeys(row.stack for row in rows):
        words = [stack] * (len(inspection.placement) > 1)
        streams = list(dict.fromkeys(row.stream for row in rows if row.stack == stack))
        for stream in streams:
            own = [row for row in rows if (row.stack, row.stream) == (stack, stream)]
            heading = words + [f"stream {stream}"] * (len(streams) > 1)
            heading += ["rms and max |h| before the norm on the stream"] * ((stack, stream) in normed)
            _show_table(console, heading, _stream_table(thinned(own), with_loss=len(streams) == 1), len(own))
        if stack in joint:
            heading = [*words, "all streams together"]
            _show_table(console, heading, _joint_table(thinned(joint[stack])), len(joint[stack]))


def _show_table(console: Console, heading: Sequence[str], table: Table, n_layers: int) -> None:
    console.print()
    if heading:
        say(console, ", ".join(heading))
    table.collapse_padding = console.measure(table).maximum > console.width
    console.print(table)
    if n_layers > SHOWN_LAYERS:
        say(console, f"{SHOWN_LAYERS} of {n_layers} layers; the report has all of them")


NORM_COLUMNS = ("place", "of", "norm", "kind", "gain", "eps", "over")
NARROWEST = 16
"""Characters that the path of a norm gets in any terminal."""


def _norm_table(rows: Sequence[NormRow], inspection: Inspection, width: int) -> Table:
    """Paths are broken where the other columns leave no room for them."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in NORM_COLUMNS:
        table.add_column(name, overflow="fold", no_wrap=name == "norm")
    stacks = list(dict.fromkeys(row.stack for row in rows))
    cells = {
        row: [row.place.replace("_", " "), row.of, row.path, row.kind, row.gain, row.eps, row.over] for row in rows
    }
    columns = [*zip(NORM_COLUMNS, *cells.values(), strict=True)]
    taken = sum(max(map(len, column)) + 2 for column in columns if column[0] != "norm")
    room = max(width - taken, NARROWEST)
    for stack in stacks:
        if len(stacks) > 1:
            table.add_row(f"[bold]{escape(stack)}[/bold]")
        for row in (row for row in rows if row.stack == stack):
            cells[row][2] = _norm_cell(row, inspection, room)
            table.add_row(*map(escape, cells[row]))
    return table


def _norm_cell(row: NormRow, inspection: Inspection, width: int) -> str:
    """The path, and the layers if they are not all."""
    depth = next((wiring.n_layers for wiring in inspection.wiring if wiring.stack == row.stack), 0)
    path = folded(row.path, width)
    if not row.layers or len(row.layers) >= depth:
        return path
    layers = f"(layers {ranges(row.layers)})"
    fits = len(path.splitlines()[-1]) + 2 + len(layers) <= width
    return f"{path}  {layers}" if fits else "\n".join((path, *textwrap.wrap(layers, width)))


def _stream_table(rows: Sequence[StreamRow], with_loss: bool) -> Table:
    kinds = list(dict.fromkeys(kind for row in rows for kind in row.update_share))
    shares = [f"{kind}\n/ h" for kind in kinds]
    names = ["layer", "rms", "max\n|h|", "fp16\nroom", *shares, "bf16\nlost", "cos", "turn"]
    table = _numbers(names + ["loss\nw/o"] * with_loss)
    for row in rows:
        shares = [percent(row.update_share.get(kind)) for kind in kinds]
        sizes = [str(row.layer), short(row.rms), short(row.max_abs), short(row.headroom_fp16)]
        turns = [percent(row.lost_in_bf16), number(row.cosine, 2), number(row.influence)]
        table.add_row(*sizes, *shares, *turns, *[change(row.loss_increase)] * with_loss)
    return table


def _joint_table(rows: Sequence[LayerRow]) -> Table:
    table = _numbers(["layer", "mean\nturn", "Jacobian", "gradient", "loss\nw/o"])
    for row in rows:
        measures = short(row.jacobian_distance), short(row.gradient_norm)
        table.add_row(str(row.layer), number(row.influence), *measures, change(row.loss_increase))
    return table


def _numbers(names: Iterable[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def change(loss: float | None) -> str:
    """A loss increase.

    >>> change(0.25), change(-1e-5), change(None)
    ('+0.250', '-0.000', '-')
    """
    return "-" if loss is None else f"{loss:+.3f}"


Row = TypeVar("Row")


def thinned(rows: Sequence[Row]) -> list[Row]:
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
