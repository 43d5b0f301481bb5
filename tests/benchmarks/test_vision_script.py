"""The comparison of vision Transformers runs and keeps what it says."""

import json
from pathlib import Path

import pytest
from benchmarks.vision import Settings, main, plan_of


def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(data=("digits",), quick=True, jobs=1, out=tmp_path, runs=tmp_path / "runs")
    path = main(settings)
    record = json.loads(path.read_text())
    assert path.name == "vision-quick.json"
    rows = record["data"]["digits"]["rows"]
    assert [(row["placement"], row["lr"]) for row in rows] == [
        (placement, lr) for lr in (1e-3, 4e-3) for placement in ("pre", "post", "siamese")
    ]
    assert all(0 <= row["metrics"]["accuracy"] <= 100 for row in rows)
    assert record["machine"]
    assert record["versions"]
    assert "accuracy" in capsys.readouterr().out


def test_plan_in_earnest() -> None:
    plan = plan_of("fashion-mnist", Settings())
    assert len(plan.runs()) == 18
    assert plan.base.data.max_images is None
