"""The script that removes norms runs at a tiny size; the page has the table of the result that is committed."""

import json
from pathlib import Path

import pytest
from benchmarks.results import RESULTS

from benchmarks import denorm
from normstream.checkpoints.surgery.denorm import DenormConfig

FEW = DenormConfig(
    start=1, ffn_gap=1, qk_gap=1, v_gap=1, special_gap=1, first_gap=1, rest=1, warmup=1, batch_size=2, eval_batches=2
)
KEYS = {"date", "commit", "machine", "versions", "settings", "rows"}


def test_denorm_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"{i} norms stand on a stream, {i} do not. " * 5)
    out = tmp_path / "denorm.json"
    denorm.main(
        denorm.Settings(seeds=(3,), n_layers=1, dim=16, seq_len=16, source=str(tmp_path), steps=2, denorm=FEW, out=out)
    )
    result = json.loads(out.read_text())
    rows = [denorm.Row(**row) for row in result["rows"]]
    assert result.keys() == KEYS
    assert [(row.family, row.seed, row.norms) for row in rows] == [("gpt2", 3, 3), ("llama", 3, 3)]
    assert {row.updates for row in rows} == {1 + 3 + 2 + 1}  # start, a gap for each route, two at the end, the rest
    assert denorm.table(rows) in capsys.readouterr().out


def test_table_has_means_and_deviations() -> None:
    """Differences are taken seed by seed: 0.2 and 0.4 have mean 0.3 and standard deviation 0.1 sqrt(2)."""
    rows = [
        denorm.Row("gpt2", seed, 1, 9, 1, loss, loss, loss + more, loss, 0.0)
        for seed, loss, more in ((0, 1.0, 0.2), (1, 2.0, 0.4))
    ]
    last = denorm.table(rows).splitlines()[-1]
    assert last.startswith("| `gpt2` | 1.500 ± 0.707 | ")
    assert last.endswith(" | +0.300 ± 0.141 |")
    assert denorm.table(rows[:1]).endswith("| `gpt2` | 1.000 | 1.000 | 1.000 | 1.200 | +0.200 |")


def test_page_has_the_committed_result() -> None:
    rows = [denorm.Row(**row) for row in json.loads((RESULTS / "denorm.json").read_text())["rows"]]
    page = (Path(__file__).parents[2] / "docs" / "surgery.md").read_text(encoding="utf-8")
    assert denorm.table(rows) in page
