"""The report of a comparison: one HTML page that needs nothing but itself."""

from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from normstream.lab.artifacts import galleries
from normstream.lab.conclusion import sentences
from normstream.lab.matrix import chosen_looks, has_many, matrix, sound
from normstream.lab.panels import Key
from normstream.lab.plots import pictures
from normstream.lab.scores import score, with_spread
from normstream.lab.style import duration, label, number, rate, short
from normstream.lab.summary import DIVERGED_MEANING, SPIKE_MEANING, STABLE_MEANING, table
from normstream.lab.words import collapse_meaning, data_line, in_unit, measured, task_of, trained_on
from normstream.training.files import write_text


def write_report(summary: dict[str, Any], path: Path, folder: Path | None = None) -> None:
    """Write the report of a summary as one self-contained HTML file, atomically.

    The run folders, whose pictures it shows, are in ``folder``, or beside the report if that is None.
    """
    write_text(path, render(summary, folder or path.parent))


def render(summary: dict[str, Any], folder: Path | None = None) -> str:
    """Return the report as HTML, with the files that runs left in ``folder``; the same of both give the same text."""
    headline, *details = sentences(summary)
    rows, task = table(summary), task_of(summary)
    return page("report.html.j2").render(
        version=summary["normstream"],
        summary=summary,
        task=task,
        metrics=measured(summary),
        in_unit=in_unit(task),
        trained_on=trained_on(summary),
        data_line=data_line(summary),
        galleries=[] if folder is None else galleries(summary, folder),
        headline=headline,
        details=details,
        rates=rows_by_rate(rows),
        matrix=matrix(summary) if has_many(summary) and rows else None,
        sound=sound,
        colours={placement: look.colour for placement, look in chosen_looks(summary).items()},
        pictures=pictures(summary),
        parameters=parameter_counts(summary),
        settings=sorted(flatten(summary["config"])),
        spike_meaning=SPIKE_MEANING,
        collapse_meaning=collapse_meaning(task),
        diverged_meaning=DIVERGED_MEANING,
        stable_meaning=STABLE_MEANING,
    )


def page(template: str) -> Template:
    """A template of this folder, or of another by its path in the package, with the lab's filters.

    It extends ``page.html.j2``, the look of every report.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("normstream.lab", "."), PackageLoader("normstream", ".")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        label=label,
        number=number,
        rate=rate,
        short=short,
        duration=duration,
        score=score,
        with_spread=with_spread,
        swatch=swatch,
        tint=tint,
        thousands="{:,}".format,
    )
    return environment.get_template(template)


def rows_by_rate(rows: list[dict[str, Any]]) -> list[tuple[float, list[dict[str, Any]]]]:
    """Group the table's rows by learning rate, the lowest mean loss first."""
    rates = sorted({row["lr"] for row in rows})
    return [(lr, sorted((row for row in rows if row["lr"] == lr), key=rank)) for lr in rates]


def rank(row: dict[str, Any]) -> tuple[bool, float]:
    """Order rows by mean loss; those with a seed without a loss come last."""
    complete = row["n_losses"] == row["n_seeds"]
    return not complete, row["val_loss_mean"] if row["val_loss_mean"] is not None else float("inf")


def parameter_counts(summary: dict[str, Any]) -> dict[str, int]:
    """The parameter count of each placement whose runs know it."""
    return {run["placement"]: run["parameters"] for run in summary["runs"] if run["parameters"] is not None}


def flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """List nested settings under dotted names.

    >>> flatten({"model": {"dim": 64}, "betas": [0.9, 0.95], "resume": None})
    [('model.dim', '64'), ('betas', '0.9, 0.95'), ('resume', 'none')]
    """
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in flatten(item, f"{prefix}.{key}" if prefix else key)]
    if isinstance(value, list):
        return [(prefix, ", ".join(map(str, value)))]
    if value is None or isinstance(value, bool):
        return [(prefix, str(value).lower())]
    return [(prefix, str(value))]


def tint(shade: float) -> str:
    """The background of a table cell, legible under the page's text in its light and its dark colours.

    >>> tint(0.5)
    'rgba(0, 114, 178, 0.23)'
    """
    return f"rgba(0, 114, 178, {0.46 * shade:.2f})"


SHAPES = {
    "o": '<circle cx="16" cy="6" r="3.6"/>',
    "s": '<rect x="12.6" y="2.6" width="6.8" height="6.8"/>',
    "D": '<path d="M16 1.6 20.4 6 16 10.4 11.6 6z"/>',
    "^": '<path d="M16 1.6 20.4 9.4H11.6z"/>',
    "v": '<path d="M16 10.4 20.4 2.6H11.6z"/>',
    "<": '<path d="M11.6 6 19.4 1.6v8.8z"/>',
    ">": '<path d="M20.4 6 12.6 1.6v8.8z"/>',
    "P": '<path d="M14.4 1.8h3.2v2.6h2.6v3.2h-2.6v2.6h-3.2v-2.6h-2.6V4.4h2.6z"/>',
    "X": '<path d="m12.2 4 2-2L16 3.8 17.8 2l2 2L18 6l1.8 2-2 2L16 8.2 14.2 10l-2-2L14 6z"/>',
}
STROKES = ("none", "5 3", "1.5 2.5", "7 2 1.5 2")


def swatch(key: Key) -> Markup:
    """Draw the line and marker of a legend entry."""
    line = f'<path d="M1 6H31" stroke="{key.colour}" stroke-width="2.4" stroke-dasharray="{STROKES[key.dash % 4]}"/>'
    attributes = f'class="swatch" viewBox="0 0 32 12" aria-hidden="true" fill="{key.colour}"'
    return Markup(f"<svg {attributes}>{line}{SHAPES.get(key.marker, '')}</svg>")
