"""Inputs of sublayers that are made again for the backward pass instead of being kept."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normstream import placements
from normstream.junctions import set_backend
from normstream.models import DecoderConfig, DecoderLM
from normstream.norms import NormConfig
from normstream.ops import RebuiltZ, calls

NAMES = ("pre", "siamese", "siamese_hybrid_pre", "peri", "keel", "layernorm_scaling", "gpt2")


def gradients(placement: str, *, rebuild: bool, autocast: bool = False) -> list[Tensor]:
    norm = NormConfig(kind="layer", bias=True) if placement == "gpt2" else NormConfig()
    torch.manual_seed(0)
    model = DecoderLM(DecoderConfig(placement=placement, vocab_size=11, dim=24, n_layers=2, n_heads=2, norm=norm))
    layer: Any
    for layer in model.layers:
        layer.rebuild_z = rebuild
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(torch.arange(22).view(2, 11) % 11)
    logits.float().square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("placement", NAMES)
def test_gradients_are_the_same(placement, autocast):
    calls.clear()
    kept = gradients(placement, rebuild=False, autocast=autocast)
    assert calls["cpp junction_z"] == 0
    rebuilt = gradients(placement, rebuild=True, autocast=autocast)
    assert calls["cpp junction_z"] >= 2
    for a, b in zip(kept, rebuilt, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


class ThreeReaders(nn.Module):
    """A sublayer that saves z three times, as the matrices of queries, keys and values do."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, z: Tensor) -> Tensor:
        return torch.stack([matrix(z) for matrix in self.matrices]).sum(0)


def forward(rebuild: bool) -> tuple[Tensor, Tensor, ThreeReaders]:
    """A SiameseNorm junction and a sublayer; the loss, the update and the sublayer."""
    torch.manual_seed(0)
    junction = placements.get("siamese").junctions(8, 2)[1]
    sublayer = ThreeReaders()
    x, y, o = torch.randn(3, 5, 8)
    o = o.requires_grad_()
    _, z = junction((x, y), o)
    if rebuild:
        with RebuiltZ(z):
            return sublayer(z).square().sum(), o, sublayer
    return sublayer(z).square().sum(), o, sublayer


def test_z_is_made_once_for_all_its_readers_and_again_for_a_second_backward_pass():
    loss, o, sublayer = forward(rebuild=False)
    loss.backward()
    expected = [o.grad, *(matrix.weight.grad for matrix in sublayer.matrices)]
    calls.clear()
    loss, o, sublayer = forward(rebuild=True)
    loss.backward(retain_graph=True)
    assert calls["cpp junction_z"] == 1
    for p in (o, *sublayer.parameters()):
        p.grad = None
    loss.backward()
    assert calls["cpp junction_z"] == 2
    for a, b in zip([o.grad, *(matrix.weight.grad for matrix in sublayer.matrices)], expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rebuild", [False, True])
def test_the_sublayer_keeps_z_or_not(rebuild):
    torch.manual_seed(0)
    junction = placements.get("siamese").junctions(8, 2)[1]
    x, y, o = torch.randn(3, 5, 8)
    _, z = junction((x, y), o.requires_grad_())
    with RebuiltZ(z) if rebuild else nullcontext():
        update = ThreeReaders()(z)
    kept = weakref.ref(z)
    del z
    gc.collect()
    assert (kept() is None) == rebuild
    update.sum().backward()


def test_other_tensors_are_saved_as_always():
    set_backend(junction := placements.get("siamese").junctions(8, 2)[1], "plain")
    x, y, o = torch.randn(3, 5, 8)
    _, z = junction((x, y), o.requires_grad_())
    calls.clear()
    with RebuiltZ(z):
        loss = ThreeReaders()(z).sum()
    loss.backward()
    assert not calls
