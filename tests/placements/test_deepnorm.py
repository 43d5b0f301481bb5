"""DeepNorm, Sub-LN, NormFormer: constants of the papers and structure."""

from typing import Any

import pytest
import torch
from torch import nn

from normstream import placements
from normstream.norms import LayerNorm, NormConfig, RMSNorm
from normstream.placements import Stack, deepnorm, sub_ln


def rows(name: str, **options: Any) -> Any:
    return placements.get(name).junctions(dim=4, **options)


# --- DeepNorm's and Sub-LN's constants -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("depth", "single", "encoder", "decoder"),
    [
        (6, (1.861, 0.380), (1.418, 0.497), (2.060, 0.343)),
        (1000, (6.687, 0.1057), (7.014, 0.1005), (7.401, 0.0955)),
    ],
)
def test_constants_of_the_deepnet_paper(depth, single, encoder, decoder):
    stacks = (Stack(), Stack("encoder", depth, depth), Stack("decoder", depth, depth))
    for stack, (alpha, beta) in zip(stacks, (single, encoder, decoder), strict=True):
        assert deepnorm.alpha(stack, depth) == pytest.approx(alpha, abs=5e-4)
        assert deepnorm.beta(stack, depth) == pytest.approx(beta, abs=5e-4)


@pytest.mark.parametrize("depth", [1, 6, 100, 1000])
def test_bound_on_the_update_is_one(depth):
    """2N updates of size 2 beta^2 / alpha^2 make up 1, as do 3M in a decoder with cross-attention."""
    single, decoder = Stack(), Stack("decoder", 7, depth)
    for n_sublayers, stack in ((2 * depth, single), (3 * depth, decoder)):
        alpha, beta = deepnorm.alpha(stack, depth), deepnorm.beta(stack, depth)
        assert n_sublayers * 2 * beta**2 / alpha**2 == pytest.approx(1, rel=1e-12)


def test_unequal_stacks_as_in_the_released_code():
    """N = 3, M = 2: microsoft/torchscale, whose encoder divides the initial matrices by 1.1950796412698477."""
    encoder, decoder = Stack("encoder", 3, 2), Stack("decoder", 3, 2)
    assert deepnorm.alpha(encoder, 3) == pytest.approx(1.113216685842863, rel=1e-14)
    assert deepnorm.alpha(decoder, 2) == pytest.approx(1.5650845800732873, rel=1e-14)
    assert deepnorm.beta(encoder, 3, "code") == pytest.approx(1 / 1.1950796412698477, rel=1e-14)
    assert deepnorm.beta(decoder, 2, "code") == pytest.approx(1 / 2.213363839400643, rel=1e-14)
    assert deepnorm.beta(encoder, 3, "code") / deepnorm.beta(encoder, 3) == pytest.approx(1.15 / 0.87)
    for stack in (Stack(), decoder):
        assert deepnorm.beta(stack, 2, "code") == deepnorm.beta(stack, 2)


def test_constants_of_the_magneto_paper():
    values = [(Stack(), 12, 1.783), (Stack(), 24, 1.967), (Stack(), 100, 2.302)]
    values += [(Stack("encoder", 6, 6), 6, 1.547), (Stack("decoder", 6, 6), 6, 1.700)]
    for stack, n_layers, gamma in values:
        assert sub_ln.gamma(stack, n_layers) == pytest.approx(gamma, abs=1e-3)


def test_constants_are_no_tensors():
    row = nn.ModuleList(rows("deepnorm", n_layers=3))
    assert list(row.buffers()) == []
    assert all(type(junction.join.alpha) is float for junction in rows("deepnorm", n_layers=3)[1:])


# --- what each placement is made of ----------------------------------------------------------------------------------


def test_deepnorm_row(run_row):
    """Two blocks: alpha = 4^(1/4); the stream is followed by hand."""
    row = nn.ModuleList(rows("deepnorm", n_layers=2, norm=NormConfig(eps=0.0))).double()
    embedding, *updates = torch.randn(5, 2, 3, 4, dtype=torch.float64)
    states, inputs = run_row(row, embedding, [lambda z, o=o: o for o in updates])
    x = embedding
    for (got,), z, o in zip(states, inputs, [None, *updates], strict=True):
        if o is not None:
            x = 2**0.5 * x + o
            x = x / x.square().mean(-1, keepdim=True).sqrt()
        torch.testing.assert_close(got, x)
        torch.testing.assert_close(z, x)


def test_deepnorm_initialization_by_constants():
    assert placements.get("deepnorm").init == "deepnorm"
    assert placements.get("deepnorm(constants=code)").init == "deepnorm_code"


def test_normformer_row():
    row = rows("normformer", n_layers=2, sublayers=("attention", "cross_attention", "feed_forward"))
    joins = [type(junction.join).__name__ for junction in row]
    assert joins == ["Start"] + ["OutputNormJoin", "PreNormJoin", "ResidualScaleJoin"] * 2
    plain = rows("normformer(residual_scale=false)", n_layers=1)
    assert type(plain[2].join).__name__ == "PreNormJoin"


def test_normformer_starts_as_pre_norm_after_the_feed_forward(run_row):
    """The residual's factors start at 1; set to 2 in one channel they double its residual only."""
    row: Any = rows("normformer", n_layers=1, norm=NormConfig(eps=0.0))
    x, o = torch.randn(1, 2, 4), torch.randn(1, 2, 4)
    assert torch.equal(row[2].join((x,), o)[0], x + o)
    row[2].join.residual_scale.data[1] = 2.0
    torch.testing.assert_close(row[2].join((x,), o)[0], torch.tensor([1.0, 2.0, 1.0, 1.0]) * x + o)


@pytest.mark.parametrize(("option", "place"), [("paper", "before_output"), ("code", "after_output"), ("none", "none")])
def test_normformer_head_scale(option, place):
    inner = placements.get(f"normformer(head_scale={option})").inner
    assert (inner.head_scale, inner.hidden, inner.context) == (place, "model", "none")


@pytest.mark.parametrize("alpha", ["0", "-1", "inf", "nan"])
def test_alpha_of_deepnorm_must_be_positive(alpha):
    with pytest.raises(ValueError, match="positive number"):
        placements.get(f"deepnorm(alpha={alpha})")


@pytest.mark.parametrize(
    ("name", "norms", "other"),
    [
        ("deepnorm", 12, 0),
        ("deepnorm(base=pre)", 13, 0),
        ("deepnorm(final_norm=true)", 13, 0),
        ("pre(residual_scale=true)", 13, 12),
        ("sandwich(residual_scale=true)", 25, 12),
        ("sub_ln", 13, 0),
        ("normformer", 13 + 6, 6),
        ("normformer(residual_scale=false)", 13 + 6, 0),
        ("normformer(attention_norm=false)", 13, 6),
        ("keel", 12 + 11, 0),
        ("keel(first_block=none,final_norm=true)", 12 + 12 + 1, 0),
        ("residual", 12 + 1, 0),
        ("residual(input_norm=true)", 12 + 12 + 1, 0),
        ("span_norm", 12 + 1, 0),
        ("span_norm(first_norm=false)", 12, 0),
        ("geo_norm", 1, 0),
        ("ngpt", 0, 12),
        ("realformer", 12, 0),
        ("realformer(base=pre)", 13, 0),
    ],
)
def test_vectors_of_six_layers(name, norms, other):
    """Norms, and other learned vectors of the stream's width, in the junctions."""
    row = nn.ModuleList(placements.get(name).junctions(dim=4, n_layers=6))
    assert sum(isinstance(module, RMSNorm | LayerNorm) for module in row.modules()) == norms
    assert sum(p.numel() for p in row.parameters()) == 4 * (norms + other)
