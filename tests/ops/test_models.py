"""Whole models with fused junctions: training, recomputed activations, copies, the meta device."""

import copy
import io
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normstream.init import initialize
from normstream.junctions import set_backend
from normstream.models import DecoderConfig, DecoderLM
from normstream.ops import Backend, calls
from normstream.optim import OptimizerConfig, build_optimizer

TWO_LAYERS = {"siamese": 5, "pre": 4, "layernorm_scaling": 4, "siamese_hybrid_pre": 5}  # fused junctions


def decoder(placement: str, backend: Backend = "auto", **options: Any) -> DecoderLM:
    config = DecoderConfig(placement=placement, vocab_size=17, dim=16, n_layers=2, n_heads=2, ffn_dim=32, **options)
    model = DecoderLM(config)
    initialize(model, seed=0)
    set_backend(model, backend)
    return model


def tokens(number: int = 0) -> Tensor:
    """Words of a small language: each follows from the two before it."""
    rows = [torch.randint(17, (8,), generator=torch.Generator().manual_seed(number)) for _ in range(2)]
    while len(rows) < 13:
        rows.append((3 * rows[-1] + rows[-2] + 1) % 17)
    return torch.stack(rows, dim=1)


def loss_of(model: nn.Module, number: int = 0) -> Tensor:
    batch = tokens(number)
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(model).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("placement", ["siamese", "pre"])
def test_losses_of_fifty_steps(placement: str) -> None:
    """The same curve with the fused operation and with the plain code, and it falls."""

    def losses(backend: Backend) -> list[float]:
        model = decoder(placement, backend)
        optimizer = build_optimizer(model, OptimizerConfig(lr=3e-3))
        curve = []
        for number in range(50):
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        return curve

    before = calls.copy()
    fused = losses("auto")
    n = 50 * TWO_LAYERS[placement]
    assert calls - before == {"cpp junction": n, "cpp junction_backward": n}
    assert losses("plain") == pytest.approx(fused, rel=1e-4)
    assert calls - before == {"cpp junction": n, "cpp junction_backward": n}
    assert sum(fused[-5:]) < 0.98 * sum(fused[:5])


@pytest.mark.parametrize("placement", TWO_LAYERS)
def test_recomputed_activations(placement: str) -> None:
    """Bit for bit; the layers' junctions run forward twice."""
    model = decoder(placement, dropout=0.2).train()
    torch.manual_seed(0)
    once = gradients_of(model)
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    before = calls.copy()
    torch.manual_seed(0)
    again = gradients_of(model)
    n = TWO_LAYERS[placement]
    assert calls - before == {"cpp junction": n + 4, "cpp junction_backward": n}
    assert once.keys() == again.keys()
    assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.parametrize("placement", TWO_LAYERS)
def test_the_state_dict_does_not_depend_on_the_backend(placement: str) -> None:
    fused, plain = decoder(placement), decoder(placement, "plain")
    assert list(fused.state_dict()) == list(plain.state_dict())
    assert not any("scale" in name for name in fused.state_dict())
    with torch.no_grad():
        for p in plain.parameters():
            p += 0.1
    fused.load_state_dict(plain.state_dict())
    torch.testing.assert_close(loss_of(fused), loss_of(plain))


@pytest.mark.parametrize("placement", TWO_LAYERS)
def test_copies(placement: str) -> None:
    model = decoder(placement)
    wanted = gradients_of(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)
    for other in copies:
        before = calls.copy()
        gradients = gradients_of(other)
        assert (calls - before)["cpp junction"] == TWO_LAYERS[placement]
        assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)
        assert [str(m) for m in other.modules()] == [str(m) for m in model.modules()]


@pytest.mark.parametrize("placement", TWO_LAYERS)
def test_built_on_the_meta_device(placement: str) -> None:
    """The depth scales are not lost, which are no buffers."""
    wanted = decoder(placement)
    with torch.device("meta"):
        model = DecoderLM(wanted.config)
    model.to_empty(device="cpu")
    initialize(model, seed=0)
    before = calls.copy()
    gradients = gradients_of(model)
    assert (calls - before)["cpp junction"] == TWO_LAYERS[placement]
    assert all(torch.equal(g, gradients[name]) for name, g in gradients_of(wanted).items())
    assert [str(m) for m in model.modules()] == [str(m) for m in wanted.modules()]


@pytest.mark.parametrize("placement", TWO_LAYERS)
def test_changes_of_dtype_leave_the_depth_scale(placement: str) -> None:
    wanted = [str(m) for m in decoder(placement).modules()]
    model = decoder(placement)
    for change in (model.bfloat16, model.half, model.double, model.float):
        assert [str(m) for m in change().modules()] == wanted
        assert loss_of(model).isfinite()
