"""The protocol: dropout, start, precision of the streams, joins and reads one by one."""

import pytest
import torch
from torch import nn

from normstream.junctions import (
    Drop,
    HybridPreRead,
    Junction,
    PostNormJoin,
    PostNormRead,
    PreNormJoin,
    PreNormRead,
    SiameseJoin,
    SiameseRead,
    SiameseStart,
    Start,
)
from normstream.norms import RMSNorm

JOINS = {
    "pre": lambda: PreNormJoin(Drop()),
    "post": lambda: PostNormJoin(nn.Identity(), Drop()),
    "siamese": lambda: SiameseJoin(nn.Identity(), 1.0, Drop()),
}


def streams_of(name: str) -> int:
    return 2 if name == "siamese" else 1


# --- dropout and drop-path ------------------------------------------------------------------------------------------


def test_dropout_zeroes_entries_and_scales_the_rest():
    torch.manual_seed(0)
    out = Drop(dropout=0.2).train()(torch.ones(64, 16, 32))
    assert out.unique().tolist() == pytest.approx([0.0, 1.25])
    assert (out == 0).float().mean().item() == pytest.approx(0.2, abs=0.01)


def test_drop_path_zeroes_whole_samples_and_scales_the_rest():
    torch.manual_seed(0)
    out = Drop(drop_path=0.2).train()(torch.ones(4000, 3, 2))
    per_sample = out.flatten(1)
    assert torch.equal(per_sample.amin(1), per_sample.amax(1))
    assert per_sample[:, 0].unique().tolist() == pytest.approx([0.0, 1.25])
    assert (per_sample[:, 0] == 0).float().mean().item() == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("drop", [Drop(), Drop(0.5), Drop(0.0, 0.5), Drop(0.5, 0.5)])
def test_nothing_is_dropped_in_evaluation(drop):
    x = torch.randn(4, 3, 2)
    assert torch.equal(drop.eval()(x), x)


def test_rate_zero_drops_nothing_in_training():
    x = torch.randn(4, 3, 2)
    assert torch.equal(Drop().train()(x), x)


@pytest.mark.parametrize("rates", [{"dropout": 1.0}, {"dropout": -0.1}, {"drop_path": 1.0}, {"drop_path": -0.1}])
def test_wrong_rates(rates):
    (name,) = rates
    with pytest.raises(ValueError, match=name):
        Drop(**rates)


# --- start ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_streams", [1, 2])
def test_every_stream_starts_as_the_embedding(n_streams):
    embedding = torch.randn(2, 3, 4)
    state = Start(n_streams)((), embedding)
    assert len(state) == n_streams
    assert all(torch.equal(stream, embedding) for stream in state)


def test_siamese_start():
    embedding = torch.tensor([[[3.0, 4.0]]])
    x, y = SiameseStart(RMSNorm(2, eps=0.0))((), embedding)
    torch.testing.assert_close(x, torch.tensor([[[0.8485281, 1.1313708]]]))
    assert torch.equal(y, embedding)
    x, y = SiameseStart(None)((), embedding)
    assert torch.equal(x, embedding)
    assert torch.equal(y, embedding)


# --- precision of the streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", JOINS)
def test_small_updates_survive_in_a_float32_stream(name):
    """NVIDIA/Megatron-LM#3504: the bfloat16 update is cast up to the stream, never the stream down."""
    join = JOINS[name]()
    state = (torch.full((1, 1, 4), 256.0),) * streams_of(name)
    for _ in range(100):
        state = join(state, torch.full((1, 1, 4), 0.5, dtype=torch.bfloat16))
        assert all(stream.dtype == torch.float32 for stream in state)
    assert all(torch.equal(stream, torch.full((1, 1, 4), 306.0)) for stream in state)


@pytest.mark.parametrize("name", JOINS)
def test_small_updates_are_lost_in_a_bfloat16_stream(name):
    state = (torch.full((1, 1, 4), 256.0, dtype=torch.bfloat16),) * streams_of(name)
    for _ in range(100):
        state = JOINS[name]()(state, torch.full((1, 1, 4), 0.5, dtype=torch.bfloat16))
        assert all(stream.dtype == torch.bfloat16 for stream in state)
    assert all(torch.equal(stream.float(), torch.full((1, 1, 4), 256.0)) for stream in state)


# --- equations, on two entries --------------------------------------------------------------------------------------


def test_junction_joins_then_reads():
    junction = Junction(PreNormJoin(Drop()), PreNormRead(RMSNorm(2, eps=0.0)))
    (x,), z = junction((torch.tensor([[[1.0, 4.0]]]),), torch.tensor([[[2.0, 0.0]]]))
    assert x.tolist() == [[[3.0, 4.0]]]
    torch.testing.assert_close(z, torch.tensor([[[0.8485281, 1.1313708]]]))


def test_post_norm():
    junction = Junction(PostNormJoin(RMSNorm(2, eps=0.0), Drop()), PostNormRead())
    (x,), z = junction((torch.tensor([[[1.0, 4.0]]]),), torch.tensor([[[2.0, 0.0]]]))
    torch.testing.assert_close(x, torch.tensor([[[0.8485281, 1.1313708]]]))
    assert torch.equal(z, x)


def test_siamese():
    """x + o/2 = [3, 4], y + o = [6, 8]: both have the norm [0.8485, 1.1314], and so has their sum."""
    norms = [RMSNorm(2, eps=0.0) for _ in range(3)]
    junction = Junction(SiameseJoin(norms[0], 0.5, Drop()), SiameseRead(norms[1], norms[2]))
    x, y, o = torch.tensor([[[1.0, 4.0]]]), torch.tensor([[[2.0, 8.0]]]), torch.tensor([[[4.0, 0.0]]])
    (new_x, new_y), z = junction((x, y), o)
    unit = torch.tensor([[[0.8485281, 1.1313708]]])
    torch.testing.assert_close(new_x, unit)
    assert new_y.tolist() == [[[6.0, 8.0]]]
    torch.testing.assert_close(z, unit)
    _, z = Junction(junction.join, SiameseRead(norms[1], None))((x, y), o)
    torch.testing.assert_close(z, 2 * unit)
    (raw_x, _), _ = Junction(SiameseJoin(None, 0.5, Drop()), SiameseRead(norms[1], None))((x, y), o)
    assert raw_x.tolist() == [[[3.0, 4.0]]]


def test_hybrid_pre_read():
    read = HybridPreRead(2, RMSNorm(2, eps=0.0))
    assert torch.equal(read.c1.data, torch.ones(2))
    read.c1.data = torch.tensor([2.0, -1.0])
    x, y = torch.tensor([[[1.0, 10.0]]]), torch.tensor([[[3.0, 4.0]]])
    state, z = read((x, y))
    assert state[0] is x
    assert state[1] is y
    torch.testing.assert_close(z, torch.tensor([[[2.8485281, -8.8686292]]]))


def test_hybrid_pre_vector_in_float32_keeps_the_stream_dtype():
    read = HybridPreRead(4, RMSNorm(4, eps=1e-5))
    x = torch.randn(1, 2, 4, dtype=torch.bfloat16)
    assert read((x, x))[1].dtype == torch.bfloat16


@pytest.mark.parametrize("name", JOINS)
def test_every_stream_and_the_update_receive_a_gradient(name):
    state = tuple(torch.randn(1, 2, 4, requires_grad=True) for _ in range(streams_of(name)))
    update = torch.randn(1, 2, 4, requires_grad=True)
    total = torch.stack(JOINS[name]()(state, update)).sum()
    to_update, *to_streams = torch.autograd.grad(total, [update, *state])
    assert torch.equal(to_update, torch.full((1, 2, 4), float(len(state))))
    assert all(torch.equal(gradient, torch.ones(1, 2, 4)) for gradient in to_streams)
