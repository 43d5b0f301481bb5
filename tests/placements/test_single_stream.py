"""Pre-Norm and Post-Norm, and the number of norms of the placements with one stream."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normstream import placements
from normstream.norms import LayerNorm, NormConfig, RMSNorm

EXACT = NormConfig(kind="rms", eps=0.0)


def count_norms(module: nn.Module) -> int:
    return sum(isinstance(m, RMSNorm | LayerNorm) for m in module.modules())


def set_all_gains(row: nn.Module, gain: list[float]) -> None:
    for module in row.modules():
        if isinstance(module, RMSNorm | LayerNorm):
            assert module.weight is not None
            module.weight.data.copy_(torch.tensor(gain))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("pre", [1.6970563, 1.1313708]), ("post", [2.3533936, 0.7844645])],
)
def test_stack_of_zero_sublayers(name, expected, run_row):
    """PaddlePaddle/PaddleNLP#571: Pre-Norm has a final norm, one Post-Norm layer has two applications and no third."""
    row = nn.ModuleList(placements.get(name).junctions(dim=2, n_layers=1, norm=EXACT)).double()
    set_all_gains(row, [2.0, 1.0])
    x = torch.tensor([[[3.0, 4.0]]], dtype=torch.float64)
    _, inputs = run_row(row, x, [torch.zeros_like] * 2)
    torch.testing.assert_close(inputs[-1][0, 0], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "norms"),
    [
        ("pre", 13),
        ("post", 12),
        ("pre(embedding_norm=true)", 14),
        ("pre(final_norm=false)", 12),
        ("post(embedding_norm=true)", 13),
        ("gpt2", 13),
        ("bloom", 14),
        ("layernorm_scaling", 13),
        ("mix_ln", 13),
        ("hybridnorm", 7),
        ("hybridnorm_star", 2 + 5 + 1),
        ("sandwich", 25),
        ("peri", 26),
        ("gemma2", 25),
        ("gemma3", 25),
        ("glm4", 25),
        ("olmo2", 13),
        ("swin_v2", 12 + 2),
        ("swin_v2(extra_norm_every=3)", 12 + 2 + 2),
        ("siamese", 6 * 6 + 3),
        ("siamese(input_norm=false)", 6 * 4 + 3),
        ("siamese(input_norm=false,read_out=paper,embedding_norm=false)", 6 * 4 + 1),
        ("siamese_hybrid_pre", 6 * 4 + 3),
    ],
)
def test_number_of_norms_of_six_layers(name, norms):
    row = nn.ModuleList(placements.get(name).junctions(dim=8, n_layers=6))
    assert len(row) == 13
    assert count_norms(row) == norms
    vectors = norms + (6 if name == "siamese_hybrid_pre" else 0)  # one c1 a block
    assert sum(p.numel() for p in row.parameters()) == 8 * vectors


def test_pre_norm_adds_the_raw_update_and_reads_a_norm(run_row):
    generator = torch.Generator().manual_seed(0)
    row = placements.get("pre").junctions(dim=4, n_layers=1, norm=EXACT)
    embedding, o1, o2 = torch.randn(3, 2, 3, 4, generator=generator)
    states, inputs = run_row(row, embedding, [lambda z: o1, lambda z: o2])
    sums = [embedding, embedding + o1, embedding + o1 + o2]
    for (x,), z, stream in zip(states, inputs, sums, strict=True):
        torch.testing.assert_close(x, stream)
        torch.testing.assert_close(z, stream / stream.square().mean(-1, keepdim=True).sqrt())


def test_post_norm_reads_what_it_carries(run_row):
    generator = torch.Generator().manual_seed(0)
    row = placements.get("post").junctions(dim=4, n_layers=1, norm=EXACT)
    embedding, o1, o2 = torch.randn(3, 2, 3, 4, generator=generator)
    states, inputs = run_row(row, embedding, [lambda z: o1, lambda z: o2])

    def unit(x: Tensor) -> Tensor:
        return x / x.square().mean(-1, keepdim=True).sqrt()

    streams = [embedding, unit(embedding + o1), unit(unit(embedding + o1) + o2)]
    for (x,), z, stream in zip(states, inputs, streams, strict=True):
        torch.testing.assert_close(x, stream)
        torch.testing.assert_close(z, stream)


def test_number_of_norms_of_six_parallel_blocks():
    """One junction a block; with two norms a block, they are the branches' own."""
    for spec, norms in (("parallel", 7), ("parallel(norms=2)", 1), ("parallel(final_norm=false)", 6)):
        row = nn.ModuleList(placements.get(spec).junctions(dim=8, n_layers=6))
        assert (len(row), count_norms(row)) == (7, norms)


@pytest.mark.parametrize("name", ["pre", "post"])
def test_contribution_is_the_update_itself(name):
    o = torch.randn(2, 3, 4)
    row: Any = placements.get(name).junctions(dim=4, n_layers=2)
    for junction in row[1:]:
        (contribution,) = junction.join.contributions(o)
        assert torch.equal(contribution, o)


@pytest.mark.parametrize("name", placements.names())
def test_junctions_leave_their_inputs_alone(name):
    row = placements.get(name).junctions(dim=4, n_layers=2)
    embedding = torch.randn(2, 3, 4)
    kept = embedding.clone()
    state, _ = row[0]((), embedding)
    for junction in row[1:]:
        update = torch.randn(2, 3, 4)
        before = [t.detach().clone() for t in (*state, update)]
        new_state, _ = junction(state, update)
        assert all(torch.equal(a, b) for a, b in zip((*state, update), before, strict=True))
        state = new_state
    assert torch.equal(embedding, kept)
    assert len(state) >= len(placements.get(name).streams)
