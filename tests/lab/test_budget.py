from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from normstream.lab import budget
from normstream.lab.budget import Cost, choose_steps, parse_budget
from normstream.training import TrainConfig

NO_DATA: Any = SimpleNamespace(config=None, corpus_hash="", tokenizer=None, train=None, validation=None)


@pytest.mark.parametrize(("text", "seconds"), [("5m", 300), ("90s", 90), ("1h30m", 5400), ("1.5m", 90), ("45", 45)])
def test_times(text, seconds):
    assert parse_budget(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "5x", "-5m", "0", "5 minutes"])
def test_what_is_no_time(text):
    with pytest.raises(ValueError, match="such as 90s, 5m or 1h30m"):
        parse_budget(text)


def test_all_runs_fit():
    costs = [Cost(fixed=2.0, step=0.1, evaluation=1.0), Cost(fixed=3.0, step=0.2, evaluation=1.5)]
    steps = choose_steps(300.0, costs, runs_per_placement=4, eval_every=50)

    def total(n: int) -> float:
        return 4 * sum(cost.fixed + n * (cost.step + cost.evaluation / 50) for cost in costs)

    assert total(steps) <= 0.95 * 300 < total(steps + 1)


def test_too_little_time():
    with pytest.raises(ValueError, match="20 steps of every run need about 21 s here, 10 s are left"):
        choose_steps(10.0, [Cost(fixed=0.0, step=1.0, evaluation=0.0)], runs_per_placement=1, eval_every=50)


def test_measures_warm_steps_only(monkeypatch):
    """The first step takes 50 s, every other 2 s, the evaluation 3 s, building the model 7 s and saving 5 s."""
    now = 0.0

    def slow_train(config, folder, *, data, on_row):
        nonlocal now
        now += 7
        for step in range(1, config.steps + 1):
            now += 50 if step == 1 else 2
            on_row({"kind": "train", "step": step})
        now += 3
        on_row({"kind": "eval", "step": config.steps})
        now += 5
        return SimpleNamespace(steps=config.steps)

    monkeypatch.setattr(budget, "train", slow_train)
    cost = budget.measure(TrainConfig(), Path(), data=NO_DATA, clock=lambda: now)
    assert (cost.step, cost.evaluation) == (2.0, 3.0)
    assert cost.fixed == 7 + 48 + 5  # what the first step takes beyond 2 s is paid once in every run


def test_a_run_that_breaks_at_any_learning_rate_cannot_be_measured(monkeypatch):
    broken = SimpleNamespace(steps=1, cause="training loss is nan")
    monkeypatch.setattr(budget, "train", lambda *_, **__: broken)
    with pytest.raises(ValueError, match="cannot measure the speed of siamese: training loss is nan"):
        budget.measure(TrainConfig(), Path(), data=NO_DATA)
