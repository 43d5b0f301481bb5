"""Probes a tiny random model of every family of transformers and compares the answer with the table of placements.

    python -m benchmarks.inspect_all

The probe gets models whose class, module and parameter names and model type are scrambled. Families that are already
in the result file keep their rows unless they are named: the run can be split.
"""

import json
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import nn

from benchmarks.machine import commit, versions
from benchmarks.placement_table import (
    corrected,
    differences,
    expected_stacks,
    fact_differences,
    read_table,
    summary,
)
from benchmarks.results import RESULTS
from benchmarks.scramble import scramble
from benchmarks.tiny_models import names, tiny_model
from benchmarks.tiny_sizes import VOCAB_SIZE
from normstream.inspect.anatomy import Anatomy, StackAnatomy
from normstream.inspect.inputs import make_inputs
from normstream.inspect.probing.probe import anatomy_of

FILE = "inspect-families.json"
PLACEMENT = ("placement", "parallel", "no stack")
STRUCTURE = (*PLACEMENT, "q/k norm", "final norm", "embedding norm")


@dataclass(frozen=True)
class Settings:
    """What to probe."""

    families: tuple[str, ...] = ()
    """Model types; all if none is given."""
    seed: int = 0
    """For weights, gains, biases and eps."""
    out: Path = RESULTS
    """Folder of the result file."""


def main(settings: Settings) -> None:
    """Probes, prints a table, and writes or updates the result file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    table = read_table()
    path = settings.out / FILE
    rows = _read_rows(path) if settings.families else {}
    for name in settings.families or sorted({*names(), *table}):
        rows[name] = probe_family(name, table.get(name), settings.seed)
        print(_line(name, rows[name]), flush=True)
    totals = count(rows)
    print("\n".join(f"{what}: {value}" for what, value in totals.items()))
    record = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "versions": versions(),
        "seed": settings.seed,
        "totals": totals,
        "families": dict(sorted(rows.items())),
    }
    settings.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _read_rows(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))["families"] if path.exists() else {}


def probe_family(name: str, entry: Mapping[str, Any] | None, seed: int = 0) -> dict[str, Any]:
    """Builds, scrambles, probes and compares one family. Whatever goes wrong is part of the answer."""
    start = time.perf_counter()
    try:
        model = tiny_model(name, seed)
        inputs = _inputs(model, seed)
        with torch.no_grad():
            model(**inputs)
    except Exception as error:  # transformers' own: a missing package, an input other than tokens
        return {"status": "does not run tiny", "why": _first_line(error)}
    old = scramble(model, seed)
    try:
        anatomy = anatomy_of(model, inputs, seed=seed)
    except Exception as error:
        return {"status": "probe failed", "why": f"{type(error).__name__}: {_first_line(error)}"}
    row: dict[str, Any] = {"status": "probed", "seconds": round(time.perf_counter() - start, 2)}
    row["notes"] = [_with_old_names(note, old) for note in anatomy.notes]
    if entry is None:
        return row | {"found": summary(anatomy, old)}
    return row | {"stacks": compare(anatomy, entry, old, name)}


def _inputs(model: nn.Module, seed: int) -> dict[str, Any]:
    """Random tokens; also for I-BERT, whose embedding is a module of its own."""
    try:
        return make_inputs(model, seed=seed)
    except ValueError:
        return {"input_ids": torch.randint(3, VOCAB_SIZE, (1, 31), generator=torch.Generator().manual_seed(seed))}


def compare(anatomy: Anatomy, entry: Mapping[str, Any], old: Mapping[str, str], name: str = "") -> dict[str, Any]:
    """By stack of the table: differences, those left after ``CORRECTIONS``, and those in kind and gain of the norms."""
    stacks = {stack.name: stack for stack in anatomy.stacks}
    table, code = expected_stacks(entry), expected_stacks(corrected(name, entry))
    compared = {}
    for part, expected in table.items():
        stack = stacks.get(part) or (_together(anatomy.stacks) if len(table) == 1 else None)
        missing = [f"no stack {part} found"]
        compared[part] = {
            "by_hand": expected.by_hand,
            "differences": missing if stack is None else differences(expected, stack, old),
            "after corrections": missing if stack is None else differences(code[part], stack, old),
            "kind and gain": missing if stack is None else fact_differences(expected, stack, old),
        }
    return compared


def _together(stacks: tuple[StackAnatomy, ...]) -> StackAnatomy:
    """One after the other, as the table lists a family whose layers stand in several lists."""
    layers = tuple(layer for stack in stacks for layer in stack.layers)
    return replace(stacks[0], layers=layers, norms=tuple(norm for stack in stacks for norm in stack.norms))


def count(rows: Mapping[str, Any]) -> dict[str, str]:
    """Agreement over all stacks of the table whose family runs, and over those whose code was read by hand."""
    stacks = [stack for row in rows.values() for stack in row.get("stacks", {}).values()]
    by_hand = [stack for stack in stacks if stack["by_hand"]]
    totals = {
        "families": str(len(rows)),
        "families of the table that run": str(sum("stacks" in row for row in rows.values())),
    }
    for which, chosen in (("", stacks), (", code read by hand", by_hand)):
        totals |= {f"{what}{which}": _share(chosen, holds) for what, holds in AGREEMENTS.items()}
    for status in ("probe failed", "does not run tiny"):
        totals[status] = ", ".join(name for name, row in rows.items() if row["status"] == status) or "none"
    return totals


def _about(what: tuple[str, ...], differences: list[str]) -> bool:
    return any(difference.startswith(what) for difference in differences)


AGREEMENTS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "placement": lambda stack: not _about(PLACEMENT, stack["differences"]),
    "placement, q/k, final and embedding norm": lambda stack: not _about(STRUCTURE, stack["differences"]),
    "all of that and every norm's role": lambda stack: not stack["differences"],
    "likewise, table corrected where the code contradicts it": lambda stack: not stack["after corrections"],
    "kind and gain of every norm": lambda stack: not stack["kind and gain"],
}


def _share(stacks: list[dict[str, Any]], holds: Callable[[Mapping[str, Any]], bool]) -> str:
    part = sum(holds(stack) for stack in stacks)
    return f"{part} of {len(stacks)} stacks ({100 * part / max(len(stacks), 1):.1f} %)"


def _line(name: str, row: Mapping[str, Any]) -> str:
    if row["status"] != "probed":
        return f"{name:<26} {row['status']}: {row['why']}"
    if "found" in row:
        placements = ", ".join(f"{stack}: {found['placement']}" for stack, found in row["found"].items())
        return f"{name:<26} {row['seconds']:>6} s  not in the table; {placements}"
    stacks = row["stacks"].items()
    wrong = [f"{stack}: {difference}" for stack, found in stacks for difference in found["after corrections"]]
    explained = any(found["differences"] != found["after corrections"] for _, found in stacks)
    right = "as in the code, not as in the table" if explained else "as in the table"
    return f"{name:<26} {row['seconds']:>6} s  " + ("; ".join(wrong) or right)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def _with_old_names(note: str, old: Mapping[str, str]) -> str:
    for new in sorted(filter(None, old), key=len, reverse=True):
        note = note.replace(new, old[new])
    return note


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
