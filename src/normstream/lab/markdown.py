"""The final losses of a comparison as Markdown: the table alone, or a page that says how they were made."""

from pathlib import Path
from typing import Any

from normstream.lab.conclusion import sentences
from normstream.lab.matrix import Cell, Matrix, Row, has_many, matrix
from normstream.lab.scores import with_spread
from normstream.lab.style import join_words, number, rate
from normstream.lab.summary import DIVERGED_MEANING, STABLE_MEANING
from normstream.lab.words import collapse_meaning, data_line, in_unit, measured, task_of, trained_on
from normstream.tasks import Metric
from normstream.training.files import write_text


def markdown_table(summary: dict[str, Any]) -> str:
    """The final validation losses, a row for each placement and a column for each learning rate, as Markdown.

    A cell is the mean over seeds and, after the sign, the standard deviation; a placement that diverged or collapsed
    says in how many seeds. The lowest of a column without a failure is bold. The last column is
    ``normstream.lab.summary.largest_stable_rate``. More than eight placements are sorted, the lowest loss first.

    >>> run = {"placement": "pre", "lr": 0.01, "seed": 0, "status": "finished", "diverged": False, "collapsed": True}
    >>> run |= {"parameters": 1, "metrics": {}} | dict.fromkeys(("val_loss", "best_val_loss"), 2.0)
    >>> run |= dict.fromkeys(("spikes", "max_grad_norm", "tokens_per_second"))
    >>> print(markdown_table({"task": "lm", "lrs": [0.01], "runs": [run]}))
    | placement | parameters | 0.01 | largest stable rate |
    |---|---|---|---|
    | `pre` | 1 | 2.000, collapsed in 1 of 1 | none |
    """
    arranged = matrix(summary)
    lines = [
        "| placement | parameters | " + " | ".join(map(rate, arranged.lrs)) + " | largest stable rate |",
        "|---" * (3 + len(arranged.lrs)) + "|",
    ]
    return "\n".join(lines + [table_line(row, arranged) for row in rows_in_order(arranged, summary)])


def metric_table(summary: dict[str, Any], metric: Metric) -> str:
    """The same for a metric: mean and standard deviation over seeds, by placement and learning rate."""
    arranged = matrix(summary)
    lines = ["| placement | " + " | ".join(map(rate, arranged.lrs)) + " |", "|---" * (1 + len(arranged.lrs)) + "|"]
    for row in rows_in_order(arranged, summary):
        cells = ["-" if cell is None else with_spread(cell, metric.name) for cell in row.cells]
        lines.append(f"| `{row.placement}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def metric_sections(summary: dict[str, Any]) -> list[str]:
    """Heading, reading and table of each of the task's metrics."""
    parts = []
    for metric in measured(summary):
        better = "Higher" if metric.higher_is_better else "Lower"
        note = f"{better} is better; mean \u00b1 standard deviation over seeds."
        parts += [f"## Final {metric.title}", note, metric_table(summary, metric)]
    return parts


def rows_in_order(arranged: Matrix, summary: dict[str, Any]) -> list[Row]:
    """The rows of placements with a finished run: many sorted by their best loss, few in the order they were given."""
    rows = [row for row in arranged.rows if any(row.cells)]
    if has_many(summary):
        return rows
    given = list(dict.fromkeys(run["placement"] for run in summary["runs"] if run["status"] == "finished"))
    return sorted(rows, key=lambda row: given.index(row.placement))


def table_line(row: Row, arranged: Matrix) -> str:
    """One line of the table."""
    cells = [cell_text(cell, arranged.is_lowest(cell)) for cell in row.cells]
    return f"| `{row.placement}` | {row.parameters:,} | {' | '.join(cells)} | {stable_text(row.stable_rate)} |"


def cell_text(cell: Cell | None, bold: bool) -> str:
    """The mean, its deviation and the failures of one cell."""
    if cell is None:
        return "-"
    words = [number(cell["val_loss_mean"])]
    if bold:
        words[0] = f"**{words[0]}**"
    if cell["val_loss_std"] is not None:
        words[0] += f" \u00b1 {number(cell['val_loss_std'])}"
    for kind in ("diverged", "collapsed"):
        if cell[f"n_{kind}"]:
            words.append(f"{kind} in {cell[f'n_{kind}']} of {cell['n_seeds']}")
    return ", ".join(words)


def stable_text(stable_rate: float | None) -> str:
    """The largest stable rate, or that there is none."""
    return "none" if stable_rate is None else rate(stable_rate)


def write_page(summary: dict[str, Any], path: Path) -> None:
    """Write ``markdown_page`` to a file, atomically."""
    write_text(path, markdown_page(summary))


def markdown_page(summary: dict[str, Any]) -> str:
    """A whole page: the conclusion, the table, the placements by largest stable rate, what words mean, how it was made.

    >>> data = {"source": "stdlib", "corpus_hash": "0", "tokenizer": "bytes", "unit": "tokens", "train_size": 1}
    >>> data["baseline_loss"] = None
    >>> about = {"created": "2026-01-31T12:00:00", "command": "", "normstream": "0", "environment": {}, "data": data}
    >>> plan = {"task": "lm", "lrs": [0.1], "seeds": [0], "tokens_per_run": 1, "config": {"steps": 1}}
    >>> markdown_page(about | plan | {"runs": []}).splitlines()[2]
    'No run has finished yet.'
    """
    parts = [
        f"# {page_title(summary)}",
        " ".join(sentences(summary)),
        f"## Final {task_of(summary).loss_title}",
        loss_note(summary),
        markdown_table(summary),
        *metric_sections(summary),
        "## By largest stable learning rate",
        stable_list(summary),
        "## What the words mean",
        meanings(summary),
        "## How this was made",
        f"```bash\n{summary['command']}\n```" if summary["command"] else "",
        provenance(summary),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def page_title(summary: dict[str, Any]) -> str:
    """Name the comparison by its size."""
    sizes = (("placement", len(matrix(summary).rows)), ("learning rate", len(summary["lrs"])))
    counted = [f"{n} {noun}" + ("" if n == 1 else "s") for noun, n in (*sizes, ("seed", len(summary["seeds"])))]
    return f"Comparison: {', '.join(counted)}"


def loss_note(summary: dict[str, Any]) -> str:
    """Say what a cell is."""
    seeds = len(summary["seeds"])
    over = f"mean \u00b1 standard deviation over {seeds} seeds" if seeds > 1 else "one seed, so no spread is known"
    order = "; the placement with the lowest loss comes first" if has_many(summary) else ""
    unit = in_unit(task_of(summary)).strip()
    what = f"{unit}, {over}" if unit else over
    return (
        f"{what[0].upper()}{what[1:]}, by learning rate. Lower is better; the lowest of a column, among those in which "
        f"no seed failed, is bold{order}."
    )


def stable_list(summary: dict[str, Any]) -> str:
    """List the placements by their largest stable rate, the largest first, within it the lowest loss first."""
    rows = [row for row in matrix(summary).rows if any(row.cells)]
    rates = sorted({row.stable_rate for row in rows}, key=lambda lr: -1.0 if lr is None else lr, reverse=True)
    return "\n".join(
        f"* {stable_text(lr)}: " + ", ".join(f"`{row.placement}`" for row in rows if row.stable_rate == lr)
        for lr in rates
    )


def meanings(summary: dict[str, Any]) -> str:
    """Define the words of the table."""
    baseline_loss = summary["data"]["baseline_loss"]
    here = "" if baseline_loss is None else f" ({number(baseline_loss)} here)"
    collapsed = f"{collapse_meaning(task_of(summary))}{here}"
    return "\n".join(
        (
            f"* **Diverged**: {DIVERGED_MEANING}. A seed without a finite loss is left out of the mean.",
            f"* **Collapsed**: {collapsed}. A run that also diverged counts as diverged.",
            f"* **Largest stable rate**: {STABLE_MEANING}. Beyond the largest of all nothing is known.",
        )
    )


def provenance(summary: dict[str, Any]) -> str:
    """List date, versions, machine, data and length of the runs."""
    about, data = summary["environment"], summary["data"]
    machine = [f"{key} {about[key]}" for key in ("platform", "processor", "cpus", "threads", "gpu", "device", "jobs")
               if about.get(key) is not None]  # fmt: skip
    versions = [f"normstream {summary['normstream']}"]
    versions += [f"{key} {about[key]}" for key in ("python", "torch", "numpy") if about.get(key) is not None]
    facts = {
        "Date": summary["created"][:10],
        "Versions": join_words(versions),
        "Machine": ", ".join(machine),
        "Data": f"{data_line(summary)}, hash `{data['corpus_hash'][:16]}`",
        "Each run": f"{summary['config']['steps']:,} steps, {trained_on(summary)}",
    }
    return "\n".join(f"* {name}: {value}" for name, value in facts.items() if value)
