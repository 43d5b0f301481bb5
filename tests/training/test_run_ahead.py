"""Updates that are started before the numbers of the one before are read: from outside, nothing differs.

The device that decides is the CPU here, where nothing runs behind the host's back; what is tested is the order of
things and the decision itself.
"""

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from normstream import initialize
from normstream.data import Data, Loader, load_data
from normstream.models import build_model
from normstream.optim import OptimizerConfig, QKClipConfig
from normstream.tasks import get_task
from normstream.training import Interrupted, TrainConfig, list_checkpoints, loop, read_checkpoint, read_metrics, train
from normstream.training.step import Updater

Make = Callable[..., TrainConfig]
AHEAD = partial(Updater, runs_ahead=True)


def updater(config: TrainConfig, **options: Any) -> Updater:
    model = build_model(config.model)
    initialize(model, seed=0)
    return Updater(model, config, get_task("lm")(config, load_data(config.data)), **options)


def rows(run: Path) -> list[dict[str, Any]]:
    found = read_metrics(run / "metrics.jsonl")
    for row in found:
        row.pop("tokens_per_second", None)
    return found


@pytest.fixture
def both(data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[TrainConfig], list[Path]]:
    """Does a run twice, waiting for every update and running ahead."""

    def runs(config: TrainConfig) -> list[Path]:
        train(config, tmp_path / "waiting", data=data)
        monkeypatch.setattr(loop, "Updater", AHEAD)
        train(config, tmp_path / "ahead", data=data)
        return [tmp_path / "waiting", tmp_path / "ahead"]

    return runs


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.1, "drop_path": 0.1, "grad_accumulation": 2, "z_loss": 1e-4},
        {"precision": "bf16"},
        {"clip": None, "eval_every": 100, "checkpoint_every": 100, "stats_every": 100, "prefetch": 0},
    ],
)
def test_a_run_is_the_same(options: dict[str, Any], config: Make, both: Callable[[TrainConfig], list[Path]]):
    waiting, ahead = both(config(**options))
    assert rows(ahead) == rows(waiting)
    one, two = (read_checkpoint(list_checkpoints(run / "checkpoints")[-1]) for run in (waiting, ahead))
    for a, b in ((one.model, two.model), (one.optimizer, two.optimizer)):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_diverges_at_the_same_step(config: Make, both: Callable[[TrainConfig], list[Path]]):
    # without clipping, this rate breaks the run after a few updates that are applied
    options = config(placement="pre", lr=1e12, clip=None, eval_every=100, stats_every=100, checkpoint_every=100)
    waiting, ahead = both(options)
    assert rows(ahead) == rows(waiting)
    assert rows(ahead)[-1]["event"] == "nonfinite"
    assert 1 < rows(ahead)[-1]["step"] < 12


def test_a_failed_update_and_those_after_it_change_nothing(config: Make, data: Data):
    loader = Loader(data.train, 4, seed=0)
    waiting, ahead = updater(config()), updater(config(), runs_ahead=True)
    for run in (waiting, ahead):
        run(1, loader.batch(0))
        run.model.lm_head.register_forward_hook(lambda *_: _[-1] * (torch.nan if spoiled else 1.0))
    spoiled = True
    assert not waiting(2, loader.batch(1)).applied
    failed = ahead.start(2, loader.batch(1))
    spoiled = False
    behind = ahead.start(3, loader.batch(2))
    assert not failed().applied
    assert not behind().applied
    assert torch.isfinite(torch.tensor(behind().loss))
    for a, b in zip(ahead.model.parameters(), waiting.model.parameters(), strict=True):
        assert torch.equal(a, b)
        assert all(torch.equal(ahead.optimizer.state[a][k], v) for k, v in waiting.optimizer.state[b].items())


def test_updates_are_started_ahead_but_not_past_a_pause(
    config: Make, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    events: list[tuple[str, int]] = []

    class Recorder(Updater):
        def start(self, step: int, *rest: Any) -> Any:
            events.append(("start", step))
            result = super().start(step, *rest)
            return lambda: events.append(("read", step)) or result()

    monkeypatch.setattr(loop, "Updater", partial(Recorder, runs_ahead=True))
    train(config(steps=6, eval_every=3, checkpoint_every=4, stats_every=100), tmp_path / "run", data=data)
    order = ["start 1", "start 2", "read 1", "start 3", "read 2", "read 3", "start 4", "read 4"]
    order += ["start 5", "start 6", "read 5", "read 6"]
    assert [f"{kind} {step}" for kind, step in events] == order


def test_a_signal_lets_the_started_update_finish(
    config: Make, data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    train(config(eval_every=12), tmp_path / "whole", data=data)
    monkeypatch.setattr(loop, "Updater", AHEAD)

    def on_row(row: dict[str, Any]) -> None:
        if row["kind"] == "train" and row["step"] == 6:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted) as stopped:
        train(config(eval_every=12), tmp_path / "run", data=data, on_row=on_row)
    assert stopped.value.step == 7
    train(config(eval_every=12), tmp_path / "run", data=data, resume=True)
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "obstacle"),
    [
        ({"precision": "fp16"}, "loss scale of fp16"),
        ({"optimizer": OptimizerConfig(kind="sgd")}, "optimizer sgd cannot leave out a step"),
        ({"optimizer": OptimizerConfig(kind="muon"), "placement": "pre"}, "optimizer muon cannot"),
        ({"optimizer": OptimizerConfig(qk_clip=QKClipConfig(threshold=1.0)), "placement": "pre"}, "QK-Clip"),
        ({"placement": "ngpt"}, "placement ngpt changes the weights"),
    ],
)
def test_what_must_wait(options: dict[str, Any], obstacle: str, config: Make):
    with pytest.raises(ValueError, match=obstacle):
        updater(config(**options), runs_ahead=True)
    assert not updater(config(**options)).runs_ahead


def test_a_cpu_waits(config: Make):
    assert not updater(config()).runs_ahead
