"""The whole of `normstream theory`: measure, compare with the statements, write theory.json and report.html."""

from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from normstream.lab.theory import checks
from normstream.lab.theory.config import TheoryConfig
from normstream.lab.theory.measure import all_measured, mean
from normstream.lab.theory.report import write_theory_report
from normstream.lab.theory.siamese import BLOCKS, CONSTANTS, WIDTH, stream_cosines
from normstream.lab.theory.tables import show
from normstream.lab.theory.update import first_updates
from normstream.training.config_file import config_to_dict
from normstream.training.files import write_json
from normstream.training.run_folder import begun, environment

REFERENCES = ("post", "pre")
"""Placements that the lemmas are about: the simplified model always measures them."""


def theory(config: TheoryConfig, *, command: str = "", console: Console | None = None) -> dict[str, Any]:
    """Measures placements at initialization, prints the tables and fills ``config.out``.

    Returns what theory.json holds. Raises ValueError, before any work, for a folder that holds something.
    """
    console = console or Console()
    if begun(config.out):
        raise ValueError(f"folder {config.out} exists already; choose another one (--out)")
    config.out.mkdir(parents=True, exist_ok=True)
    with console.status("") as status:
        found = collect(config, lambda text: status.update(f"measuring {text}"))
    about = environment()
    found |= {"created": datetime.now(UTC).isoformat(timespec="seconds"), "command": command}
    found |= {"normstream": about.pop("normstream"), "environment": {k: v for k, v in about.items() if k != "command"}}
    write_json(config.out / "theory.json", found)
    write_theory_report(found, config.out / "report.html")
    show(found, config.out, console)
    return found


def collect(config: TheoryConfig, note: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Every measurement and check, as plain numbers."""
    simplified = config.model == "xiong"
    names = list(dict.fromkeys([*config.chosen(), *(REFERENCES if simplified else ())]))
    measured = all_measured(names, config, note)
    stepping = list(dict.fromkeys([*names, *(("deepnorm",) if simplified else ())]))
    updates: dict[str, list[dict[str, Any]]] = {}
    for name in stepping:
        note(f"{name}, first updates")
        updates[name] = [first_updates(name, depth, config) for depth in config.depths]
    note("SiameseNorm's streams")
    cosines = [mean_cosines(constant, config) for constant in CONSTANTS] if simplified else []
    note("the statements of the papers")
    done = statements(config, measured, updates, cosines) if simplified else [checks.lemma_3(measured)]
    return {
        "config": config_to_dict(config),
        "measured": measured,
        "updates": [row for rows in updates.values() for row in rows],
        "siamese": cosines,
        "checks": [asdict(check) | {"holds": check.holds} for check in done],
    }


def mean_cosines(constant: str, config: TheoryConfig) -> dict[str, Any]:
    """``stream_cosines``, the mean over seeds."""
    rows = [stream_cosines(constant, seed) for seed in config.seeds]
    return rows[0] | {"cosine": mean([row["cosine"] for row in rows])}


def statements(
    config: TheoryConfig, measured: list[dict[str, Any]], updates: dict[str, list[dict]], cosines: list[dict]
) -> list[checks.Check]:
    """Every check of the simplified model, in the order of the papers."""
    by_name = {(one["placement"], one["depth"]): one for one in measured}
    return [
        checks.lemma_1(),
        *(checks.growth(ratio, config) for ratio in (1, 2, 4)),
        *(checks.lemma_2_post(by_name["post", depth], config) for depth in config.depths),
        *(checks.lemma_2_pre(by_name["pre", depth], config) for depth in config.depths),
        *(checks.lemma_2_equality(by_name["pre", depth], config) for depth in config.depths),
        checks.lemma_2_one_token(config),
        checks.lemma_3(measured),
        *checks.theorem_1(config),
        *(checks.deepnorm_identity(depth, config) for depth in config.depths),
        *(checks.update_growth(updates, config.depths) if len(config.depths) > 1 else ()),
        *checks.siamese_checks(cosines, f"d = {WIDTH}, {BLOCKS} blocks, random updates of RMS 1"),
    ]
