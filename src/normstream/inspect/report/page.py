"""The report of an inspection: one HTML page that needs nothing but itself, in the look of the lab's reports."""

from pathlib import Path
from typing import Any

from markupsafe import Markup

from normstream.inspect.inspection import Inspection
from normstream.inspect.report.canvas import colour
from normstream.inspect.report.diagram import draw_wiring
from normstream.inspect.report.findings import findings, headline, summary
from normstream.inspect.report.multipliers import multipliers
from normstream.inspect.report.plots import pictures
from normstream.inspect.report.tables import SUBLAYERS, change, joint_rows, norm_rows, percent, stream_rows
from normstream.inspect.report.wiring import ranges
from normstream.lab.report import page
from normstream.training.files import write_text

SHOWN_MASSIVE = 30
"""Rows of the table of massive activations."""


def write_report(inspection: Inspection, path: Path) -> None:
    """Writes the report as one self-contained HTML file, atomically."""
    write_text(path, render(inspection))


def render(inspection: Inspection) -> str:
    """The report as HTML; the same inspection gives the same text."""
    rows = stream_rows(inspection)
    return page("inspect/report/report.html.j2").render(
        version=inspection.normstream,
        headline=headline(inspection),
        details=[line for line in (summary(inspection), sentence(multipliers(inspection))) if line],
        findings=findings(inspection),
        inspection=inspection,
        model=inspection.model,
        wirings=[(wiring, Markup(draw_wiring(wiring))) for wiring in inspection.wiring],
        norms=[(colour(row.place), row) for row in norm_rows(inspection)],
        kinds=list(dict.fromkeys(kind for row in rows for kind in row.update_share)),
        sublayers=SUBLAYERS,
        streams=by_stream(rows),
        joint=joint_rows(inspection),
        massive=sorted(inspection.massive, key=lambda row: -abs(row.value))[:SHOWN_MASSIVE],
        pictures=pictures(inspection),
        percent=percent,
        change=change,
        ranges=ranges,
    )


def sentence(line: str) -> str:
    """A line as a sentence.

    >>> sentence("residual x 0.22"), sentence("")
    ('Residual x 0.22.', '')
    """
    return f"{line[0].upper()}{line[1:]}." if line else ""


def by_stream(rows: list[Any]) -> dict[str, list[Any]]:
    """The rows of every stream of every stack, under a name that says only what there are several of."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for row in rows:
        groups.setdefault((row.stack, row.stream), []).append(row)
    several_stacks = len({stack for stack, _ in groups}) > 1
    several_streams = len({stream for _, stream in groups}) > 1
    return {
        ", ".join(filter(None, (stack * several_stacks, f"stream {stream}" * several_streams))): own
        for (stack, stream), own in groups.items()
    }
