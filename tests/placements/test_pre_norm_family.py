"""GPT-2, BLOOM, LayerNorm Scaling, parallel blocks."""

import math

import pytest
import torch
from torch import Tensor

from normstream import placements
from normstream.norms import NormConfig

EXACT = NormConfig(kind="rms", eps=0.0)


def unit(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


def test_gpt2_is_pre_norm_with_its_own_initialization():
    row, pre = (placements.get(name).junctions(dim=4, n_layers=2) for name in ("gpt2", "pre"))
    assert list(map(str, row)) == list(map(str, pre))
    assert placements.get("gpt2").init == "gpt2"
    assert placements.get("pre").init == "plain"


def test_bloom_norms_the_embedding(run_row):
    embedding, o1, o2 = torch.randn(3, 2, 3, 4)
    states, inputs = run_row(
        placements.get("bloom").junctions(dim=4, n_layers=1, norm=EXACT), embedding, [lambda z: o1, lambda z: o2]
    )
    streams = [unit(embedding), unit(embedding) + o1, unit(embedding) + o1 + o2]
    for (x,), z, stream in zip(states, inputs, streams, strict=True):
        torch.testing.assert_close(x, stream)
        torch.testing.assert_close(z, unit(stream))


def test_bloom_residual_from_the_norm(run_row):
    """``apply_residual_connection_post_layernorm``: hidden = N(hidden), then hidden + F(hidden); the end is as ever."""
    embedding = torch.randn(2, 3, 4)
    functions = [torch.tanh, torch.sin, torch.cos, torch.exp]
    row = placements.get("bloom(residual_from_norm=true)").junctions(dim=4, n_layers=2, norm=EXACT)
    states, inputs = run_row(row, embedding, functions)

    hidden = unit(embedding)
    for i, function in enumerate(functions):
        residual = unit(hidden)
        torch.testing.assert_close(inputs[i], residual)
        torch.testing.assert_close(states[i][0], residual)
        hidden = residual + function(residual)
    torch.testing.assert_close(states[-1][0], hidden)
    torch.testing.assert_close(inputs[-1], unit(hidden))


def test_layernorm_scaling_divides_by_the_root_of_the_one_based_block(run_row):
    embedding = torch.randn(1, 2, 4)
    row = placements.get("layernorm_scaling").junctions(dim=4, n_layers=9, norm=EXACT)
    _, inputs = run_row(row, embedding, [torch.zeros_like] * 18)
    for index, z in enumerate(inputs[:-1]):
        torch.testing.assert_close(z, unit(embedding) / math.sqrt(index // 2 + 1))
    torch.testing.assert_close(inputs[-1], unit(embedding))  # the final norm is not scaled


@pytest.mark.parametrize(("norms", "reads_norm"), [(1, True), (2, False)])
def test_parallel_blocks(norms, reads_norm, run_row):
    placement = placements.get(f"parallel(norms={norms})")
    assert placement.parallel
    assert placement.branch_norms is not reads_norm
    embedding, o1, o2 = torch.randn(3, 1, 2, 4)
    row = placement.junctions(dim=4, n_layers=2, norm=EXACT)
    states, inputs = run_row(row, embedding, [lambda z: o1, lambda z: o2])
    streams = [embedding, embedding + o1, embedding + o1 + o2]
    for (x,), stream in zip(states, streams, strict=True):
        assert torch.equal(x, stream)
    for z, stream in zip(inputs[:-1], streams, strict=False):
        torch.testing.assert_close(z, unit(stream) if reads_norm else stream)
    torch.testing.assert_close(inputs[-1], unit(streams[-1]))


@pytest.mark.parametrize("norms", ["0", "3", "two"])
def test_parallel_has_one_or_two_norms(norms):
    with pytest.raises(ValueError, match="norms"):
        placements.get(f"parallel(norms={norms})")


def test_options_survive_the_round_trip():
    for spec in ("parallel(norms=2)", "bloom(embedding_norm=false,residual_from_norm=true)", "mix_ln(alpha=0.5)"):
        assert str(placements.get(spec)) == spec
