"""Writes the tables and pictures of ``docs/performance.md`` from the result files.

    python -m benchmarks.page

What stands between ``<!-- bench:NAME -->`` and ``<!-- /bench -->`` is replaced, everything else stays; doing it twice
changes nothing. Each machine class has its own tables; figures of two classes are never mixed.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks import plots, tables
from benchmarks.machine import ROOT
from benchmarks.results import RESULTS

Record = Mapping[str, Any]
NAMES = ("junctions", "step", "scaling")
TABLES: dict[str, Callable[[Record], str]] = {
    "junctions": tables.junctions,
    "step": tables.step,
    "scaling": tables.scaling,
}
PICTURES: dict[str, Callable[[Record], str | None]] = {
    "junctions": plots.junctions,
    "step": plots.step,
    "scaling": plots.scaling,
}
CAPTIONS = {
    "junctions": "Share of the copy rate that each junction reaches, forward and backward together",
    "step": "Time of a training step over that of our compiled Pre-Norm",
    "scaling": "Time of a training step against depth, width, length and vocabulary",
}
NOTHING = "Not measured yet."


@dataclass(frozen=True)
class Settings:
    """What to read and to write."""

    results: Path = RESULTS
    """Folder of result files."""
    page: Path = ROOT / "docs" / "performance.md"
    """The page with the markers."""
    pictures: Path = ROOT / "docs" / "results"
    """Folder of the pictures; the page links to it relative to its own place."""


def main(settings: Settings) -> None:
    """Rewrites the marked parts of the page and the pictures."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(settings.results.glob("*.json"))]
    parts = {name: part(name, [r for r in records if kind(r) == name], settings) for name in NAMES}
    parts["targets"] = tables.targets(records) if records else NOTHING
    page = settings.page.read_text(encoding="utf-8")
    settings.page.write_text(filled(page, parts), encoding="utf-8")
    print(f"wrote {settings.page.name} from {len(records)} result files")


def kind(record: Record) -> str:
    """junctions, step or scaling; a step of another size than the first is step-SIZE in its file."""
    return record["benchmark"].split("-")[0]


def part(name: str, records: list[Record], settings: Settings) -> str:
    """Machine by machine: what it is, the table, the picture."""
    said = []
    for record in records:
        said.append(tables.about(record))
        if (svg := PICTURES[name](record)) is not None:
            file = settings.pictures / f"{record['benchmark']}-{record['machine_class']}.svg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(svg, encoding="utf-8")
            said.append(f"![{CAPTIONS[name]}]({file.relative_to(settings.page.parent).as_posix()})")
        said.append(TABLES[name](record))
    return "\n\n".join(said) or NOTHING


def filled(page: str, parts: Mapping[str, str]) -> str:
    """The page with each marked part replaced.

    Raises:
        ValueError: if the page lacks a marker, or has one that nothing fills.

    >>> filled("<!-- bench:a --> old <!-- /bench --> end", {"a": "new"})
    '<!-- bench:a -->\\n\\nnew\\n\\n<!-- /bench --> end'
    """
    marked = re.compile(r"<!-- bench:(\w+) -->.*?<!-- /bench -->", re.S)
    there = marked.findall(page)
    if sorted(there) != sorted(parts):
        raise ValueError(f"the page must have one marker for each of {sorted(parts)}, but has {sorted(there)}")
    return marked.sub(lambda found: f"<!-- bench:{found[1]} -->\n\n{parts[found[1]]}\n\n<!-- /bench -->", page)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
