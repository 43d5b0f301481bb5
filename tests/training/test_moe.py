"""Training a model of experts: what is added to the loss, biases, statistics, checkpoints."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.test_resume import assert_same_run, stop_at

from normstream.data import Data, Loader
from normstream.init import initialize
from normstream.lab.expert_plot import balance_by_layer, largest_loads
from normstream.lab.record import layers
from normstream.lab.style import looks
from normstream.layers import MoEConfig
from normstream.models import DecoderConfig, build_model
from normstream.tasks import get_task
from normstream.tasks.language_modeling import hidden_and_aux
from normstream.training import Interrupted, TrainConfig, list_checkpoints, read_checkpoint, read_metrics, train
from normstream.training.checkpoint import model_tensors
from normstream.training.config import resolve
from normstream.training.step import Updater

Make = Callable[..., TrainConfig]
MOE = MoEConfig(n_experts=4, top_k=2, ffn_dim=16, balance_loss=0.02, z_loss=0.003, bias_rate=0.01)


@pytest.fixture
def make(config: Make, data: Data) -> Make:
    """A config with experts, resolved for the data."""

    def with_experts(moe: MoEConfig = MOE, **options: Any) -> TrainConfig:
        base = config(**options)
        return resolve(replace(base, model=replace(base.model, moe=moe)), data)

    return with_experts


def updater_of(config: TrainConfig, data: Data) -> Updater:
    model = build_model(config.model)
    initialize(model, config.seed)
    return Updater(model.train(), config, get_task(config.task)(config, data))


def batch_of(config: TrainConfig, data: Data) -> Any:
    return Loader(data.train, config.batch_size, config.seed).batch(0)


def biases(model: Any) -> list[torch.Tensor]:
    return [layer.feed_forward.router.bias.clone() for layer in model.layers]


def test_what_is_added_to_the_loss(make: Make, data: Data):
    config = make()
    updater, batch = updater_of(config, data), batch_of(config, data)
    losses = updater.task.losses(updater.model, batch, batch.n_targets, 1.0)
    _, aux = hidden_and_aux(updater.model, batch)
    balance = 0.02 * (aux[0].balance_loss + aux[1].balance_loss).item() / 2
    z = 0.003 * (aux[0].z_loss + aux[1].z_loss).item() / 2
    assert list(losses.parts) == ["balance_loss", "router_z_loss"]
    assert losses.parts["balance_loss"].item() == pytest.approx(balance, rel=1e-5)
    assert losses.parts["router_z_loss"].item() == pytest.approx(z, rel=1e-5)
    assert losses.loss.item() == pytest.approx(losses.main.item() + balance + z, rel=1e-6)
    update = updater(1, batch)
    assert update.parts == pytest.approx({"balance_loss": balance, "router_z_loss": z}, rel=1e-5)
    assert update.loss == pytest.approx(losses.main.item(), rel=1e-5)


def test_coefficients_of_zero_add_nothing(make: Make, data: Data):
    config = make(replace(MOE, balance_loss=0.0, z_loss=0.0), z_loss=1e-3)
    updater, batch = updater_of(config, data), batch_of(config, data)
    assert list(updater(1, batch).parts) == ["z_loss"]


@pytest.mark.parametrize("chunked", ["never", "always"])
def test_router_gradient_is_that_of_the_whole_loss(chunked: Any, make: Make, data: Data):
    """The sum of gradients of the parts, by torch, also where head and loss are computed in chunks."""
    config = make(chunked_loss=chunked, z_loss=1e-2)
    updater, batch = updater_of(config, data), batch_of(config, data)
    weight = updater.model.layers[0].feed_forward.router.scores.weight
    losses = updater.task.losses(updater.model, batch, batch.n_targets, 1.0)
    (whole,) = torch.autograd.grad(losses.loss, weight)
    hidden, aux = hidden_and_aux(updater.model, batch)
    logits = updater.model.logits(hidden)
    entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten())
    log_z = logits.logsumexp(-1)[batch.targets_BT >= 0]
    by_hand = entropy + 1e-2 * log_z.square().mean()
    by_hand = by_hand + sum(0.01 * r.balance_loss + 0.0015 * r.z_loss for r in aux)
    (expected,) = torch.autograd.grad(by_hand, weight)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("recomputed", ["none", "inputs", "selective", "layer"])
def test_bias_moves_once_by_the_loads_of_all_micro_batches(recomputed: Any, make: Make, data: Data):
    config = make(grad_accumulation=2, activation_checkpointing=recomputed)
    updater, batch = updater_of(config, data), batch_of(config, data)
    with torch.no_grad():
        _, aux = hidden_and_aux(updater.model, batch)  # the whole batch: loads do not depend on how it is cut
    updater(1, batch)
    for bias, report in zip(biases(updater.model), aux, strict=True):
        n = batch.inputs_BT.numel()
        assert report.tokens.sum() == 2 * n
        expected = [0.01 * ((n / 2 > load) - (n / 2 < load)) for load in report.tokens.tolist()]  # mean: 2 n / 4
        assert bias.tolist() == pytest.approx(expected)
        assert any(expected)


def test_an_update_that_is_not_applied_moves_no_bias(make: Make, data: Data):
    config = make()
    updater, batch = updater_of(config, data), batch_of(config, data)
    updater.model.lm_head.weight.data[0, 0] = float("nan")
    assert not updater(1, batch).applied
    assert all(bias.abs().max() == 0 for bias in biases(updater.model))


def test_biases_do_not_run_ahead(make: Make, data: Data):
    config = make()
    model, task = build_model(config.model), get_task("lm")(config, data)
    with pytest.raises(ValueError, match="the routers' biases change after each update that is applied"):
        Updater(model, config, task, runs_ahead=True)
    without = make(replace(MOE, bias_rate=0.0))
    assert updater_of(without, data).why_not_ahead() is None


def test_statistics(make: Make, data: Data, tmp_path: Path):
    """Loads and drops of the update, over its micro-batches; by hand from the reports."""
    config = make(replace(MOE, capacity=0.9), grad_accumulation=2, steps=1)
    updater, batch = updater_of(config, data), batch_of(config, data)
    tokens, dropped = torch.zeros(2, 4), torch.zeros(2)
    with torch.no_grad():
        for micro in batch.split(2):
            for layer, report in enumerate(hidden_and_aux(updater.model, micro)[1]):
                tokens[layer] += report.tokens
                dropped[layer] += report.dropped
    train(config, tmp_path / "run", data=data)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    (row,) = [row for row in rows if row["kind"] == "layers"]
    total = 2 * batch.inputs_BT.numel()
    assert row["experts"]["load"] == [pytest.approx((t / total).tolist()) for t in tokens]
    assert row["experts"]["dropped"] == pytest.approx((dropped / total).tolist())
    assert dropped.min() > 0
    (step,) = [row for row in rows if row["kind"] == "train"]
    assert {"balance_loss", "router_z_loss"} <= step.keys()
    assert layers(rows) == {
        "step": 1, "grad_norm": row["grad_norm"]["layers"], "rms": row["rms"], "experts": row["experts"]
    }  # fmt: skip


def test_a_dense_run_has_no_such_rows(config: Make, data: Data, tmp_path: Path):
    train(config(steps=1), tmp_path / "run", data=data)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert not any("experts" in row or "balance_loss" in row for row in rows)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"kind": "muon"}])
def test_resumes_bit_for_bit(options: dict[str, Any], make: Make, data: Data, tmp_path: Path):
    moe = replace(MOE, capacity=1.0, gates="sigmoid", n_shared=1, first_dense=1)
    config = make(moe, dropout=0.1, grad_accumulation=2, warmup=3, **options)
    train(config, tmp_path / "whole", data=data)
    run = tmp_path / "stopped"
    for step in (4, 7):
        with pytest.raises(Interrupted):
            train(config, run, data=data, resume=step > 4, on_row=stop_at(step))
    train(config, run, data=data, resume=True)
    assert_same_run(tmp_path / "whole", run)
    saved = read_checkpoint(list_checkpoints(run / "checkpoints")[-1]).model
    bias = saved["layers.1.feed_forward.router.bias"]
    assert bias.dtype == torch.float32
    assert bias.abs().max() > 0
    assert "layers.0.feed_forward.router.bias" not in saved


def test_start_from_other_weights(make: Make, data: Data, tmp_path: Path):
    """Routers' biases are taken along."""
    train(make(steps=9), tmp_path / "first", data=data)
    bias = read_checkpoint(list_checkpoints(tmp_path / "first" / "checkpoints")[-1]).model
    second = make(steps=1, init_from=tmp_path / "first", lr=1e-9, placement="pre")
    train(second, tmp_path / "second", data=data)
    after = read_checkpoint(list_checkpoints(tmp_path / "second" / "checkpoints")[-1]).model
    for name in (f"layers.{i}.feed_forward.router.bias" for i in range(2)):
        assert bias[name].abs().max() > 0.015  # some steps of 0.01, and then one more
        assert (after[name] - bias[name]).abs().max().item() == pytest.approx(0.01, abs=1e-6)


def test_loads_become_more_even(make: Make, data: Data):
    """Over some updates, of a model whose routers begin by preferring one expert."""
    config = make(replace(MOE, balance_loss=0.0, bias_rate=0.05), lr=1e-4, steps=60)
    updater, batch = updater_of(config, data), batch_of(config, data)
    with torch.no_grad():
        for layer in updater.model.layers:
            layer.feed_forward.router.bias[0] = 1.0
    largest = []
    for step in range(1, 41):
        updater(step, batch)
        assert updater.experts.loads is not None
        largest.append(max(max(shares) for shares in updater.experts.loads.shares()["load"]))
    assert largest[0] == 0.5  # every token has the expert among its two
    assert min(largest[-5:]) < 0.4


def test_model_tensors_have_the_bias_once():
    model = build_model(DecoderConfig(dim=16, n_layers=1, n_heads=2, moe=MOE))
    names = list(model_tensors(model))
    assert names.count("layers.0.feed_forward.router.bias") == 1


def test_picture_of_the_balance():
    experts = {"load": [[0.25, 0.25, 0.25, 0.25], [0.1, 0.2, 0.3, 0.4]], "dropped": [0.0, 0.125]}
    run = {"placement": "pre", "lr": 1e-2, "layers": {"step": 7, "grad_norm": [], "rms": {}, "experts": experts}}
    assert largest_loads(run) == {0: 1.0, 1: 1.6}
    drawn = balance_by_layer([run], looks(["pre"]))
    assert drawn is not None
    assert "Pre-Norm 1.6" in drawn.panels[0].svg
    assert "step 7" in drawn.explanation
    assert "Up to 12.5%" in drawn.explanation
    assert balance_by_layer([run | {"layers": None}], looks(["pre"])) is None
