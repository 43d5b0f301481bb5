"""The tables in the terminal, and the rows that the report shares with them."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from normstream.lab.live import say
from normstream.lab.style import label, rate, short

Found = dict[str, Any]


def show(found: Found, out: Path, console: Console) -> None:
    """Prints what was measured, then what was predicted next to it."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("placement", no_wrap=True)
    for name in MEASURED_COLUMNS:
        table.add_column(name, justify="right")
    for row in measured_rows(found):
        table.add_row(*(escape(value) for value in row))
    console.print(table)
    console.print()
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("statement", ratio=1)
    for name in ("where", "predicted", "measured", ""):
        table.add_column(name, justify="left" if name in ("where", "") else "right", overflow="fold")
    source = statement = None
    for check in found["checks"]:
        if check["source"] != source:
            source = check["source"]
            table.add_row(f"[bold]{escape(source)}[/bold]")
        verdict = "agrees" if check["holds"] else "[red]differs[/red]"
        said = "" if check["statement"] == statement else check["statement"]
        statement = check["statement"]
        cells = (said, check["setting"], prediction(check), digits(check["measured"]))
        table.add_row(*(escape(cell) for cell in cells), verdict)
    console.print(table)
    say(console, f"\n{headline(found)}\n\nReport: {out / 'report.html'}")


MEASURED_COLUMNS = (
    "blocks",
    "E||x||^2/d, last",
    "FFN gradient, first",
    "last",
    "J output/embedding",
    "norms' J, largest",
    "smallest",
)


def measured_rows(found: Found) -> list[tuple[str, ...]]:
    """One row for each placement and depth."""
    rows = []
    for one in found["measured"]:
        squares = "  ".join(
            f"{name} {short(values[-1])}" if len(one["streams"]) > 1 else short(values[-1])
            for name, values in one["square"].items()
        )
        ffn, norms = one["gradient"]["ffn"], [norm["norm"] for norm in one["norms"]]
        extremes = (short(max(norms)), short(min(norms))) if norms else ("-", "-")
        numbers = (short(ffn[0]), short(ffn[-1]), short(one["from_embedding"]["output"][0]), *extremes)
        rows.append((label(one["placement"]), str(one["depth"]), squares, *numbers))
    return rows


def prediction(check: Found) -> str:
    """A prediction as text.

    >>> prediction({"predicted": (1.0, 2.0), "relation": "between"})
    '1 to 2'
    """
    if check["relation"] == "between":
        return " to ".join(map(digits, check["predicted"]))
    return f"at least {digits(check['predicted'])}" if check["relation"] == "at least" else digits(check["predicted"])


def digits(value: float) -> str:
    """A number with four significant digits, more where it is within 0.001 of 1.

    >>> digits(0.99998), digits(1.0), digits(62.2487), digits(4.4e-16)
    ('0.99998', '1', '62.25', '4.4e-16')
    """
    return f"{value:.5f}" if 1e-5 < abs(value - 1) < 1e-3 else rate(float(f"{value:.4g}"))


def headline(found: Found) -> str:
    """How many of the statements agree with the measurement."""
    checks = found["checks"]
    wrong = [check for check in checks if not check["holds"]]
    if not wrong and len(checks) == 1:
        return "The one statement that was tried agrees with what was measured."
    if not wrong:
        return f"All {len(checks)} statements that were tried agree with what was measured."
    listed = "; ".join(f"{check['statement']} ({check['setting']})" for check in wrong)
    return f"{len(checks) - len(wrong)} of {len(checks)} statements agree with what was measured. Not so: {listed}."
