"""The moving average of the weights: its closed form, where it is used, and that a resumed run has the same one."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.training.test_resume import assert_same_run, stop_at
from torch import nn

from normstream.data import Data
from normstream.models import build_model
from normstream.tasks.language_modeling import mean_loss
from normstream.tasks.task import spread
from normstream.training import (
    Interrupted,
    TrainConfig,
    init_from,
    list_checkpoints,
    load_model,
    read_checkpoint,
    read_metrics,
    train,
)
from normstream.training.ema import Ema

Make = Callable[..., TrainConfig]


def test_closed_form():
    """Weights 0, 1, 2 ...: the average is a sum of products, here in Python's float64."""
    model = nn.Linear(1, 1)
    nn.init.zeros_(model.weight)
    average, expected = Ema(model, decay=0.75), 0.0
    for n in range(40):
        with torch.no_grad():
            model.weight.fill_(n + 1.0)
        average.update()
        d = 0.75 if n >= 26 else (1 + n) / (10 + n)  # (1 + 26) / (10 + 26) is 0.75
        expected = d * expected + (1 - d) * (n + 1)
        assert average.tensors()["weight"].item() == pytest.approx(expected, rel=1e-6)


def test_a_constant_decay_after_the_warm_up():
    """From n = 26 on, k updates at weight 0 leave decay^k of what was there."""
    model = nn.Linear(1, 1, bias=False)
    average = Ema(model, decay=0.75)
    average.updates = 26
    start = average.tensors()["weight"].item()
    nn.init.zeros_(model.weight)
    for _ in range(5):
        average.update()
    assert average.tensors()["weight"].item() == pytest.approx(start * 0.75**5, rel=1e-6)


def test_weights_come_back_bit_for_bit():
    model = nn.Linear(3, 3)
    average = Ema(model, decay=0.9)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    nn.init.ones_(average.average[0])

    def fail_inside() -> None:
        with average.swapped():
            assert model.weight.eq(1).all()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_inside()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_run_evaluates_saves_and_loads_the_average(config: Make, data: Data, tmp_path: Path):
    made = config(ema=0.9)
    result = train(made, tmp_path / "ema", data=data)
    plain = train(config(), tmp_path / "plain", data=data)
    losses = [
        [row["loss"] for row in read_metrics(tmp_path / run / "metrics.jsonl", "train")] for run in ("ema", "plain")
    ]
    assert losses[0] == losses[1], "training itself does not know of the average"

    raw, other = load_model(tmp_path / "ema", ema=False), load_model(tmp_path / "plain")
    assert all(map(torch.equal, raw.parameters(), other.parameters()))
    batches = list(spread(data.validation, made.batch_size, made.eval_batches))
    assert mean_loss(raw, batches) == plain.val_loss
    assert mean_loss(load_model(tmp_path / "ema"), batches) == result.val_loss != plain.val_loss
    assert not (list_checkpoints(tmp_path / "plain" / "checkpoints")[-1] / "ema.safetensors").exists()


def test_the_average_of_a_run_follows_its_weights(config: Make, data: Data, tmp_path: Path):
    """A checkpoint after every update gives the weights; the average is recomputed from them in float64."""
    train(config(ema=0.3, checkpoint_every=1, keep_checkpoints=99, steps=5), tmp_path / "run", data=data)
    saved = [read_checkpoint(path) for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    for n, (before, after) in enumerate(pairwise(saved), start=1):
        d = min(0.3, (1 + n) / (10 + n))
        for name, average in after.average.items():
            expected = d * before.average[name].double() + (1 - d) * after.model[name].double()
            torch.testing.assert_close(average.double(), expected, rtol=1e-6, atol=1e-7)


def test_a_resumed_run_has_the_same_average(config: Make, data: Data, tmp_path: Path):
    made = config(ema=0.9, dropout=0.1)
    train(made, tmp_path / "whole", data=data)
    with pytest.raises(Interrupted):
        train(made, tmp_path / "stopped", data=data, on_row=stop_at(6))
    train(made, tmp_path / "stopped", data=data, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")
    one, two = (read_checkpoint(list_checkpoints(tmp_path / run / "checkpoints")[-1]) for run in ("whole", "stopped"))
    assert one.average.keys() == dict(build_model(made.model).named_parameters()).keys()
    assert all(torch.equal(one.average[name], two.average[name]) for name in one.average)


def test_a_damaged_average_is_noticed(config: Make, data: Data, tmp_path: Path):
    train(config(ema=0.9), tmp_path / "run", data=data)
    file = list_checkpoints(tmp_path / "run" / "checkpoints")[-1] / "ema.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    for read in (read_checkpoint, load_model):
        with pytest.raises(ValueError, match=r"ema.safetensors is not what was saved"):
            read(file.parent)


def test_an_average_cannot_begin_or_change_within_a_run(config: Make, data: Data, tmp_path: Path):
    with pytest.raises(Interrupted):
        train(config(), tmp_path / "run", data=data, on_row=stop_at(6))
    with pytest.raises(ValueError, match="cannot resume with another ema"):
        train(config(ema=0.9), tmp_path / "run", data=data, resume=True, accept_changes=True)


def test_another_run_starts_from_the_average(config: Make, data: Data, tmp_path: Path):
    train(config(ema=0.9), tmp_path / "run", data=data)
    model = build_model(config().model)
    init_from(model, tmp_path / "run")
    assert all(map(torch.equal, model.parameters(), load_model(tmp_path / "run").parameters()))
