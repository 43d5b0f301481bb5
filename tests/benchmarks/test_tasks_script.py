"""The benchmarks of other kinds of models: a few steps of two, and what the one about warm-up would run."""

import json
from pathlib import Path
from typing import Literal

import pytest
from benchmarks.tasks import Settings, main

from benchmarks import warmup
from normstream.models import EncoderDecoderConfig


@pytest.mark.parametrize(("name", "n_runs"), [("mlm", 3), ("moe", 4)])
def test_a_few_steps_of_every_placement(
    name: Literal["mlm", "moe"], n_runs: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = main(Settings(name, quick=True, jobs=1, out=tmp_path / "new", runs=tmp_path / "runs"))
    record = json.loads(path.read_text(encoding="utf-8"))
    assert path.name == f"tasks-{name}-quick.json"
    assert len(record["rows"]) == n_runs
    assert {"date", "machine", "versions", "command", "config"} <= record.keys()
    assert "| `siamese` |" in capsys.readouterr().out
    if name == "mlm":
        pairs = {(row["placement"], row["target"]) for row in record["steps_to_reach"]}
        assert pairs == {("pre", "post"), ("siamese", "post"), ("post", "pre"), ("siamese", "pre")}


def test_the_grid_of_the_warm_up_table() -> None:
    """Three placements and seeds; warm-ups 0, 50 and 400 with Adam, 0 and 400 with SGD and RAdam."""
    plans = {
        (kind, steps): warmup.plan_of(kind, steps, warmup.Settings())
        for kind, warmups in warmup.WARMUPS.items()
        for steps in warmups
    }
    assert list(plans) == [
        ("adamw", 0),
        ("adamw", 50),
        ("adamw", 400),
        *((k, w) for k in ("sgd", "radam") for w in (0, 400)),
    ]
    assert sum(len(plan.runs()) for plan in plans.values()) == 63
    for (kind, steps), plan in plans.items():
        assert (plan.base.optimizer.kind, plan.base.schedule.warmup, plan.base.clip) == (kind, steps, None)
        assert isinstance(plan.base.model, EncoderDecoderConfig)
        assert plan.base.optimizer.weight_decay == 0
