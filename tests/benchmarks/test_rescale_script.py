"""The page on rescaling has the table of the committed result; its values are in tests/checkpoints/test_rescale.py."""

import json
from pathlib import Path

from benchmarks.results import RESULTS

from benchmarks import rescale


def test_page_has_the_committed_result() -> None:
    rows = [rescale.Row(**row) for row in json.loads((RESULTS / "rescale.json").read_text())["rows"]]
    page = (Path(__file__).parents[2] / "docs" / "rescale.md").read_text(encoding="utf-8")
    assert rescale.table(rows) in page
