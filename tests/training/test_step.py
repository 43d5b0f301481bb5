from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from normstream import DecoderLM, initialize
from normstream.data import Batch, Data, Loader
from normstream.training import TrainConfig
from normstream.training.probes import LayerProbe
from normstream.training.step import Updater, dropout_seed, split

Make = Callable[..., TrainConfig]


def updater(config: TrainConfig) -> Updater:
    model = DecoderLM(config.model)
    initialize(model, seed=0)
    return Updater(model, config)


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
    logits = DecoderLM(config().model)
    initialize(logits, seed=0)
    expected = F.cross_entropy(
        logits(batch.inputs_BT, documents_BT=batch.documents_BT).transpose(1, 2), batch.targets_BT, ignore_index=-100
    )
    assert one.loss == pytest.approx(expected.item(), rel=1e-6)
    for a, b in zip(whole.model.parameters(), cut.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_micro_batches_are_all_the_rows(data: Data):
    batch = Loader(data.train, 6, seed=0).batch(0)
    parts = list(split(batch, 3))
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
    reference = DecoderLM(c.model)
    initialize(reference, seed=0)
    positions = torch.arange(batch.inputs_BT.shape[1])[None] if batch.positions_BT is None else batch.positions_BT
    context = reference._contexts(positions, batch.documents_BT, batch.inputs_BT.shape[1], None)[False]
    state, z = reference.before_layers((), reference.tok_embeddings(batch.inputs_BT))
    states = [state]
    for layer in reference.layers:
        state, z = layer(state, z, context)
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
    for on in (False, True):
        run = updater(config(activation_checkpointing=on, tied=True))
        with LayerProbe(run.model) as probe:
            run(1, batch, probe)
        rows.append(probe.row(1))
    assert rows[0] == rows[1]
    assert rows[0]["grad_norm"]["head"] is None
    assert [len(rows[0]["rms"][name]) for name in ("x", "y")] == [3, 3]
