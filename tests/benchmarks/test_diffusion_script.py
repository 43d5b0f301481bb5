"""The diffusion benchmark, a few steps of it."""

import json

from benchmarks.diffusion import Settings, main


def test_a_few_steps_of_every_placement(tmp_path, capsys):
    path = main(Settings(quick=True, jobs=1, out=tmp_path, runs=tmp_path / "runs"))
    rows = json.loads(path.read_text())["rows"]
    assert [row["placement"] for row in rows] == ["pre", "siamese"]
    assert all(set(row["metrics"]) == {"fid", "class_accuracy"} for row in rows)
    assert "| `siamese` |" in capsys.readouterr().out
