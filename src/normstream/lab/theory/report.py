"""The report of `normstream theory`: one HTML page in the look of a comparison's."""

from pathlib import Path
from typing import Any

from normstream.lab.report import flatten, page
from normstream.lab.style import join_words, label
from normstream.lab.theory.pictures import pictures, placement_looks
from normstream.lab.theory.tables import MEASURED_COLUMNS, digits, headline, measured_rows, prediction
from normstream.training.files import write_text


def write_theory_report(found: dict[str, Any], path: Path) -> None:
    """Writes the report as one self-contained HTML file, atomically."""
    write_text(path, render_theory(found))


def render_theory(found: dict[str, Any]) -> str:
    """The report as HTML; the same measurements give the same text."""
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for check in found["checks"]:
        shown = check | {"text": prediction(check), "measured": digits(check["measured"])}
        groups.setdefault(check["source"], {}).setdefault(check["statement"], []).append(shown)
    colours = {name: look.colour for name, look in placement_looks(found).items()}
    rows = [(colours[one["placement"]], row) for one, row in zip(found["measured"], measured_rows(found), strict=True)]
    return page("theory/theory.html.j2").render(
        version=found["normstream"],
        headline=headline(found),
        details=[what(found)],
        found=found,
        groups=groups,
        rows=rows,
        columns=MEASURED_COLUMNS,
        pictures=pictures(found),
        settings=sorted(flatten(found["config"])),
    )


def what(found: dict[str, Any]) -> str:
    """One sentence on what was measured."""
    names = list(dict.fromkeys(one["placement"] for one in found["measured"]))
    config = found["config"]
    model = {"xiong": "the simplified Transformer of Xiong et al. (2020)", "decoder": "a decoder language model"}
    few = join_words([label(name) for name in names]) if len(names) <= 8 else f"{len(names)} placements"
    depths = join_words([str(depth) for depth in config["depths"]])
    return (
        f"{few} in {model[config['model']]} at initialization, with {depths} blocks of width {config['dim']}, "
        f"{config['tokens']} tokens and {len(config['seeds'])} seed{'s' * (len(config['seeds']) > 1)}."
    )
