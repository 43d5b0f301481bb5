from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normstream import initialize
from normstream.data import Batch, Data, Loader, load_data
from normstream.layers import Attention
from normstream.models import build_model
from normstream.optim import OptimizerConfig, QKClipConfig
from normstream.placements import PreNorm
from normstream.tasks import get_task
from normstream.tasks.language_modeling import mean_loss
from normstream.tasks.losses import z_loss_sum
from normstream.training import TrainConfig, read_metrics, train
from normstream.training.probes import LayerProbe
from normstream.training.step import Updater, dropout_seed

Make = Callable[..., TrainConfig]


def updater(config: TrainConfig) -> Updater:
    model = build_model(config.model)
    initialize(model, seed=0)
    return Updater(model, config, get_task("lm")(config, load_data(config.data)))


def uneven(batch: Batch) -> Batch:
    """The batch with most targets of its first rows ignored, so that micro-batches count differently many."""
    targets = batch.targets_BT.clone()
    targets[:2, 3:] = -100
    return replace(batch, targets_BT=targets)


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulation_is_the_large_batch(parts: int, config: Make, data: Data):
    batch = uneven(Loader(data.train, 4, seed=0).batch(0))
    whole, cut = updater(config()), updater(config(grad_accumulation=parts))
    one, two = whole(1, batch), cut(1, batch)
    assert two.loss == pytest.approx(one.loss, rel=1e-6)
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    logits = build_model(config().model)
    initialize(logits, seed=0)
    expected = F.cross_entropy(
        logits(batch.inputs_BT, documents_BT=batch.documents_BT).transpose(1, 2), batch.targets_BT, ignore_index=-100
    )
    assert one.loss == pytest.approx(expected.item(), rel=1e-6)
    for a, b in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_micro_batches_are_all_the_rows(data: Data):
    batch = Loader(data.train, 6, seed=0).batch(0)
    parts = list(batch.split(3))
    assert [len(part.inputs_BT) for part in parts] == [2, 2, 2]
    assert torch.equal(torch.cat([part.targets_BT for part in parts]), batch.targets_BT)


def test_dropout_depends_on_the_step_alone(config: Make, data: Data):
    c = config(dropout=0.5)
    batch = Loader(data.train, 4, seed=0).batch(0)
    torch.manual_seed(1)
    first = updater(c)(5, batch).loss
    torch.manual_seed(2)
    assert updater(c)(5, batch).loss == first
    assert updater(c)(6, batch).loss != first
    assert updater(replace(c, seed=1))(5, batch).loss != first


def test_micro_batches_draw_their_own_dropout():
    assert len({dropout_seed(seed, step, micro) for seed in range(3) for step in range(3) for micro in range(3)}) == 27


def test_update_that_is_not_finite_leaves_everything_as_it_was(config: Make, data: Data):
    run = updater(config())
    batch = Loader(data.train, 4, seed=0).batch(0)
    run(1, batch)
    before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    moments = {p: s["exp_avg"].clone() for p, s in run.optimizer.state.items()}

    def spoil(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output * torch.nan

    run.model.lm_head.register_forward_hook(spoil)
    assert not run(2, batch).applied
    assert all(torch.equal(before[name], p) for name, p in run.model.named_parameters())
    assert all(torch.equal(moments[p], s["exp_avg"]) for p, s in run.optimizer.state.items())


def test_batch_without_a_target(config: Make, data: Data):
    batch = Loader(data.train, 4, seed=0).batch(0)
    batch = replace(batch, targets_BT=torch.full_like(batch.targets_BT, -100))
    run = updater(config(weight_decay=0.0))
    before = {name: p.clone() for name, p in run.model.named_parameters()}
    update = run(1, batch)
    assert (update.loss, update.grad_norm, update.applied) == (0.0, 0.0, True)
    assert all(torch.equal(before[name], p) for name, p in run.model.named_parameters())


def test_probe_measures_the_streams_and_gradients_of_the_real_pass(config: Make, data: Data):
    c = config(placement="siamese", tied=False, grad_accumulation=2, clip=0.01)
    batch = Loader(data.train, 4, seed=0).batch(0)
    reference = build_model(c.model)
    initialize(reference, seed=0)
    positions = torch.arange(batch.inputs_BT.shape[1])[None] if batch.positions_BT is None else batch.positions_BT
    context = reference._contexts(positions, batch.documents_BT, batch.inputs_BT.shape[1], None)[False]
    state, z = reference.before_layers((), reference.tok_embeddings(batch.inputs_BT))
    states = [state]
    for layer in reference.layers:
        state, z, _ = layer(state, z, context)
        states.append(state)

    run = updater(c)
    with LayerProbe(run.model) as probe:
        update = run(1, batch, probe)
    row = probe.row(1)
    for i, name in enumerate(("x", "y")):
        expected = [state[i].square().mean().sqrt().item() for state in states]
        assert row["rms"][name] == pytest.approx(expected, rel=1e-5)
    norms = [row["grad_norm"]["embedding"], *row["grad_norm"]["layers"], row["grad_norm"]["head"]]
    assert sum(norm**2 for norm in norms) ** 0.5 == pytest.approx(update.grad_norm, rel=1e-5)
    assert update.grad_norm > 0.01  # measured before clipping
    assert not run.model.before_layers._forward_hooks


def test_probe_under_recomputation_and_with_a_tied_head(config: Make, data: Data):
    batch = Loader(data.train, 4, seed=0).batch(0)
    rows = []
    for kind in ("none", "layer", "selective"):
        run = updater(config(activation_checkpointing=kind, tied=True))
        with LayerProbe(run.model) as probe:
            run(1, batch, probe)
        rows.append(probe.row(1))
    assert rows[0] == rows[1] == rows[2]
    assert rows[0]["grad_norm"]["head"] is None
    assert [len(rows[0]["rms"][name]) for name in ("x", "y")] == [3, 3]


def test_gradient_of_the_z_loss():
    """2 log Z softmax at every target that counts, in float64."""
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[1, -100, 2], [0, 4, -100]])
    loss = z_loss_sum(logits, targets)
    loss.backward()
    log_z = logits.detach().exp().sum(-1).log()
    counted = (targets != -100).double()
    assert loss.item() == pytest.approx((counted * log_z**2).sum().item(), rel=1e-12)
    expected = (2 * log_z * counted)[..., None] * logits.detach().softmax(-1)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("parts", [1, 2])
def test_z_loss_is_added_in_training_only(parts: int, config: Make, data: Data):
    batch = uneven(Loader(data.train, 4, seed=0).batch(0))
    plain, with_z = updater(config()), updater(config(z_loss=0.1, grad_accumulation=parts))
    logits = plain.model(batch.inputs_BT, documents_BT=batch.documents_BT).detach()
    counted = batch.targets_BT != -100
    expected = 0.1 * logits.exp().sum(-1).log().square()[counted].mean().item()
    one, two = plain(1, batch), with_z(1, batch)
    assert one.parts == {}
    assert two.loss == pytest.approx(one.loss, rel=1e-6)
    assert two.parts["z_loss"] == pytest.approx(expected, rel=1e-5)
    assert two.grad_norm != one.grad_norm

    held_out = updater(config(z_loss=0.1)).model
    assert mean_loss(held_out, [batch]) == pytest.approx(one.loss, rel=1e-6)


def test_z_loss_has_its_own_column(config: Make, data: Data, tmp_path: Path):
    train(config(z_loss=1e-4, steps=1), tmp_path / "z", data=data)
    train(config(steps=1), tmp_path / "none", data=data)
    (one,), (two,) = (read_metrics(tmp_path / run / "metrics.jsonl", "train") for run in ("z", "none"))
    assert one["loss"] == two["loss"]
    assert 0 < one["z_loss"] < 0.02  # 1e-4 ln(257)^2 is 0.003
    assert "z_loss" not in two


def attentions(run: Updater) -> list[Attention]:
    return [module for module in run.model.modules() if isinstance(module, Attention)]


def clipping(config: Make, **options: Any) -> Updater:
    """An updater that leaves the weights as they are but for QK-Clip at 0.02."""
    optimizer = OptimizerConfig(kind="muonclip", lr=1e-30, qk_clip=QKClipConfig(threshold=0.02))
    return updater(config(optimizer=optimizer, placement="pre", init_std=0.3, **options))


@pytest.mark.untyped  # as in test_compiled_layers
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "options",
    [
        {"grad_accumulation": 4},
        {"compile": True},
        {"activation_checkpointing": "layer"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "layer", "compile": True},
        {"activation_checkpointing": "selective", "compile": True},
    ],
)
def test_largest_logits_are_those_of_the_whole_batch(
    options: dict[str, Any], config: Make, data: Data, monkeypatch: pytest.MonkeyPatch
):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: real(f, backend="aot_eager"))
    batch = Loader(data.train, 4, seed=0).batch(0)
    one, two = clipping(config), clipping(config, **options)
    first, second = one(1, batch), two(1, batch)
    assert one.qk_clip is not None
    assert two.qk_clip is not None
    assert first.clipped_heads == second.clipped_heads == 4
    for a, b in zip(one.qk_clip.max_logits(), two.qk_clip.max_logits(), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    for a, b in zip(attentions(one), attentions(two), strict=True):
        torch.testing.assert_close(a.wq.weight, b.wq.weight, rtol=1e-4, atol=1e-6)


def test_replayed_batch_is_at_the_threshold(config: Make, data: Data):
    batch = Loader(data.train, 4, seed=0).batch(0)
    run = clipping(config, n_layers=1)
    first, second = run(1, batch), run(2, batch)
    assert first.max_logit is not None
    assert first.max_logit > 1
    assert second.max_logit == pytest.approx(0.02, rel=1e-4)
    assert attentions(run)[0].max_logits is None  # no cost in evaluations


def test_logits_of_every_head_are_logged(config: Make, data: Data, tmp_path: Path):
    optimizer = OptimizerConfig(kind="muonclip")
    train(config(placement="pre", optimizer=optimizer), tmp_path / "run", data=data)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl", "train")
    assert {row["clipped_heads"] for row in rows} == {0}
    for row in read_metrics(tmp_path / "run" / "metrics.jsonl", "layers"):
        assert [len(layer) for layer in row["max_logit"]] == [2, 2]
        assert max(map(max, row["max_logit"])) == rows[row["step"] - 1]["max_logit"]


def test_placement_acts_after_every_applied_step(config: Make, data: Data, monkeypatch: pytest.MonkeyPatch):
    seen: list[torch.Tensor] = []

    def after_step(self: PreNorm, model: nn.Module) -> None:
        seen.append(next(model.parameters()).detach().clone())

    monkeypatch.setattr(PreNorm, "after_step", after_step)
    run = updater(config(placement="pre"))
    batch = Loader(data.train, 4, seed=0).batch(0)
    seen.clear()
    run(1, batch)
    assert len(seen) == 1
    assert torch.equal(seen[0], next(run.model.parameters()))
    with torch.no_grad():
        run.model.lm_head.weight.mul_(torch.nan)
    assert not run(2, batch).applied
    assert len(seen) == 1
