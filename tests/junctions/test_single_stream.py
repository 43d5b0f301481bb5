"""Joins and reads of one stream: equations on two entries, dropout behind the norm, float64 derivatives."""

import pytest
import torch
from torch import Tensor, nn

from normstream.junctions import (
    Drop,
    Junction,
    NormedStart,
    NormedStreamRead,
    OutputNormJoin,
    PostNormJoin,
    PostNormRead,
    PreNormJoin,
    PreNormRead,
    ScaledNormRead,
)
from normstream.norms import LayerNorm, RMSNorm

UNIT = torch.tensor([[[0.8485281, 1.1313708]]])  # the direction (3, 4) with root-mean-square 1


def rms() -> RMSNorm:
    return RMSNorm(2, eps=0.0)


def test_normed_start():
    (x,) = NormedStart(rms())((), torch.tensor([[[3.0, 4.0]]]))
    torch.testing.assert_close(x, UNIT)


def test_scaled_read_scales_what_the_norm_gives():
    state, z = ScaledNormRead(rms(), scale=0.25)((torch.tensor([[[30.0, 40.0]]]),))
    assert state[0].tolist() == [[[30.0, 40.0]]]
    torch.testing.assert_close(z, 0.25 * UNIT)


def test_scale_is_no_part_of_the_state_dict():
    """allenai/OLMo-core PR 698: a buffer is wiped by ``to_empty``, a Python float is not."""
    read = ScaledNormRead(rms(), scale=0.25)
    assert list(read.state_dict()) == ["norm.weight"]
    with torch.device("meta"):
        norm = rms()
    on_meta = ScaledNormRead(norm, scale=0.25).to_empty(device="cpu")
    norm.reset_parameters()
    x = torch.tensor([[[3.0, 4.0]]])
    assert torch.equal(on_meta((x,))[1], read((x,))[1])


def test_normed_stream_read_replaces_the_stream():
    (x,), z = NormedStreamRead(rms())((torch.tensor([[[3.0, 4.0]]]),))
    torch.testing.assert_close(x, UNIT)
    assert z is x


def test_output_norm():
    """x + N_out(o) = (1, 1) + (0.8485, 1.1314); with a norm of the stream, its direction."""
    x, o = torch.ones(1, 1, 2), torch.tensor([[[300.0, 400.0]]])
    (raw,), z = Junction(OutputNormJoin(rms(), Drop()), PostNormRead())((x,), o)
    torch.testing.assert_close(raw, 1 + UNIT)
    assert z is raw
    (normed,) = OutputNormJoin(rms(), Drop(), rms())((x,), o)
    torch.testing.assert_close(normed, (1 + UNIT) / (1 + UNIT).square().mean().sqrt())


def test_output_norm_reports_what_it_adds():
    x, o = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    join = OutputNormJoin(RMSNorm(4, eps=1e-5), Drop())
    (contribution,) = join.contributions(o)
    assert torch.equal(join((x,), o)[0], x + contribution)
    torch.testing.assert_close(contribution, o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt())


def test_dropout_comes_after_the_output_norm():
    """Entries are zero or twice the normed update; dropped before the norm, the others would be rescaled by it."""
    o = torch.randn(64, 8, 16)
    join = OutputNormJoin(RMSNorm(16, eps=1e-5), Drop(dropout=0.5)).train()
    (contribution,) = join.contributions(o)
    twice = 2 * o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(contribution, torch.where(contribution == 0, torch.zeros(()), twice))
    assert (contribution == 0).float().mean().item() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("norm", [None, nn.Identity()])
def test_output_norm_adds_in_the_dtype_of_the_stream(norm):
    state = (torch.full((1, 1, 4), 256.0),)
    for _ in range(100):
        state = OutputNormJoin(nn.Identity(), Drop(), norm)(state, torch.full((1, 1, 4), 0.5, dtype=torch.bfloat16))
    assert torch.equal(state[0], torch.full((1, 1, 4), 306.0))


def layer_norm() -> LayerNorm:
    return LayerNorm(5, eps=1e-5)


@pytest.mark.parametrize(
    "junction",
    [
        Junction(PreNormJoin(Drop()), PreNormRead(layer_norm())),
        Junction(PreNormJoin(Drop()), ScaledNormRead(layer_norm(), 0.5)),
        Junction(PreNormJoin(Drop()), NormedStreamRead(layer_norm())),
        Junction(PostNormJoin(layer_norm(), Drop()), PostNormRead()),
        Junction(OutputNormJoin(layer_norm(), Drop()), PreNormRead(layer_norm())),
        Junction(OutputNormJoin(layer_norm(), Drop(), layer_norm()), PostNormRead()),
    ],
    ids=lambda junction: f"{junction.join.__class__.__name__}-{junction.read.__class__.__name__}",
)
def test_derivatives(junction):
    junction = junction.double()
    for parameter in junction.parameters():
        parameter.data = 1 + 0.3 * torch.randn_like(parameter)
    names = [name for name, _ in junction.named_parameters()]

    def function(x: Tensor, o: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        state, z = torch.func.functional_call(junction, dict(zip(names, parameters, strict=True)), ((x,), o))
        return state[0], z

    tensors = [torch.randn(1, 2, 5, dtype=torch.float64) for _ in range(2)]
    tensors += [parameter.detach().clone() for parameter in junction.parameters()]
    assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in tensors])
