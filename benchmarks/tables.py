"""Markdown tables from result files."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

Record = Mapping[str, Any]
VARIANTS = {"ours": "ours", "eager": "eager", "inductor": "Inductor", "liger": "Liger", "quack": "QuACK"}
AXES = {"n_layers": "depth", "dim": "width", "seq_len": "length", "vocab_size": "vocabulary"}
MIB = 2**20


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first column is text, the others are numbers.

    >>> print(markdown(["name", "ms"], [["pre", "1.0"]]))
    | name | ms |
    |---|--:|
    | pre | 1.0 |
    """
    lines = ["| " + " | ".join(head) + " |", "|---" + "|--:" * (len(head) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def spread(quartiles: Sequence[float] | None, digits: int = 2) -> str:
    """Median and quartiles.

    >>> spread([0.51, 0.55, 0.6])
    '0.55 [0.51, 0.60]'
    """
    if quartiles is None:
        return "-"
    q1, median, q3 = (f"{value:.{digits}f}" for value in quartiles)
    return median if q1 == q3 == median else f"{median} [{q1}, {q3}]"


def about(record: Record) -> str:
    """What a result was measured on and how, as one paragraph."""
    machine, settings = record["machine"], record["settings"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    caches = ", ".join(f"{level} {size}" for level, size in machine["caches"].items())
    on = f"{machine['cpu']}, {machine['cores']} cores, {machine['capability']}, {caches}"
    if "gpu" in machine:
        on = f"{machine['gpu']['name']}, CUDA {machine['gpu']['cuda']}; {on}"
    told = {name: settings.get(name) for name in ("threads", "clock", "rounds", "allocator")}
    how = ", ".join(f"{name} {value}" for name, value in told.items() if value is not None)
    skipped = "; ".join(f"{what} ({why})" for what, why in record["skipped"].items())
    end = f" Not run: {skipped}." if skipped else ""
    return (
        f"**{record['machine_class']}** ({on}); {record['date']}, commit `{record['commit']}`; {how}; {versions}.{end}"
    )


def targets(records: Iterable[Record]) -> str:
    """Every figure to reach, what was measured, and whether it was reached."""
    rows = []
    for record in records:
        for target in record["targets"]:
            measured = target["measured"]
            values = None if measured is None else [measured[name] for name in ("q1", "median", "q3")]
            bound = f"{target['bound']} {target['limit']:g}"
            said = f"**{target['verdict']}**" if target["verdict"] == "missed" else target["verdict"]
            rows.append([target["label"], record["machine_class"], bound, spread(values, 3), said])
    return markdown(["figure", "machine class", "to reach", "measured", "verdict"], rows)


def junctions(record: Record) -> str:
    """One table for each size and precision, a row for each placement."""
    parts = []
    for (size, precision), group in groupby(record["rows"], key=lambda row: (row["size"], row["precision"])):
        rows = list(group)
        copies = [row for row in rows if "gib_per_second" in row]
        rates = ", ".join(f"{row['variant'].removeprefix('copy by ')} {row['gib_per_second'][1]:.1f}" for row in copies)
        title = f"{size.replace('x', ' x ')}, {precision}; copy rates in GiB/s, read and written: {rates}"
        parts.append(f"{title}\n\n{_junctions(rows)}")
    return "\n\n".join(parts)


def _junctions(rows: Sequence[Record]) -> str:
    by = {(row["placement"], row["variant"]): row for row in rows if "placement" in row}
    variants = [name for name in VARIANTS if any(variant == name for _, variant in by)]
    head = ["placement", "units", *(f"{VARIANTS[name]}, ms" for name in variants)]
    head += ["of the copy rate", "÷ Inductor", "÷ `pre`", f"kept units: {', '.join(VARIANTS[v] for v in variants)}"]
    lines = []
    for placement in dict.fromkeys(placement for placement, _ in by):
        ours = by.get((placement, "ours"))
        any_row = next(row for (name, _), row in by.items() if name == placement)
        line = [f"`{placement}`", f"{any_row['units']['forward']} + {any_row['units']['backward']}"]
        line += [_milliseconds(by.get((placement, variant))) for variant in variants]
        line.append(spread(ours["of_copy_rate"]["both"]) if ours else "-")
        line += [spread(ours.get(f"to_{other}")) if ours else "-" for other in ("inductor", "pre")]
        line.append(", ".join(_kept_units(by.get((placement, variant))) for variant in variants))
        lines.append(line)
    return markdown(head, lines)


def _milliseconds(row: Record | None) -> str:
    """Forward + backward."""
    return "-" if row is None else f"{row['ms']['forward'][1]:.2f} + {row['ms']['backward'][1]:.2f}"


def _kept_units(row: Record | None) -> str:
    """Kept bytes in tensors of the size and dtype of a stream."""
    if row is None:
        return "-"
    tokens, width = map(int, row["size"].split("x"))
    itemsize = 2 if row["precision"] == "bf16" else 4
    return f"{row['kept_bytes'] / (tokens * width * itemsize):.2f}"


def step(record: Record) -> str:
    """One table for each precision, a row for each variant."""
    shape = record["settings"]["shape"]
    size = ", ".join(f"{name} {value}" for name, value in shape.items())
    parts = []
    for precision, group in groupby(record["rows"], key=lambda row: row["precision"]):
        rows = list(group)
        products = [row for row in rows if "gflops" in row]
        rates = ", ".join(f"{row['variant'].split()[-1]}³ {row['gflops'][1]:.0f}" for row in products)
        head = ["variant", "ms", "tokens/s", "MFU", "÷ `pre/ops/compiled`", "kept, MiB", "peak, MiB"]
        lines = [_step_line(row) for row in rows if "mfu" in row]
        parts.append(f"{precision}; {size}; matrix products in GFLOP/s: {rates}\n\n{markdown(head, lines)}")
    return "\n\n".join(parts)


def _step_line(row: Record) -> list[str]:
    peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / MIB:.0f}"
    numbers = [f"{row['ms']['step'][1]:.1f}", f"{row['tokens_per_second'][1]:.0f}", spread(row["mfu"])]
    return [f"`{row['variant']}`", *numbers, spread(row.get("to_reference"), 3), f"{row['kept_bytes'] / MIB:.0f}", peak]


def scaling(record: Record) -> str:
    """The fitted exponents, a row for each axis and placement."""
    head = ["y ~ size^exponent", "placement", "points", "time", "kept bytes", "peak bytes"]
    rows = []
    for row in record["rows"]:
        points = ", ".join(str(point["point"]) for point in row["points"])
        fits = [_exponent(row["fits"].get(name)) for name in ("time", "kept_bytes", "peak_bytes")]
        rows.append([AXES[row["axis"]], f"`{row['placement']}`", points, *fits])
    return markdown(head, rows)


def _exponent(fit: Record | None) -> str:
    if fit is None:
        return "-"
    return f"{fit['exponent']:.2f} ± {fit['residual']:.2f}, at the end {fit['last']:.2f}"
