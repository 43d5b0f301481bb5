"""Mix-LN, HybridNorm, and placements that change with depth."""

import pytest
import torch
from torch import Tensor

from normstream import placements
from normstream.norms import NormConfig

EXACT = NormConfig(kind="rms", eps=0.0)


def unit(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


def joins(spec: str, n_layers: int, **options) -> list[str]:
    row = placements.get(spec).junctions(dim=4, n_layers=n_layers, **options)
    return [junction.join.__class__.__name__.removesuffix("NormJoin") for junction in row[1:]]


@pytest.mark.parametrize(
    ("n_layers", "alpha", "post_blocks"),
    [(12, "0.25", 3), (24, "0.25", 6), (6, "0.25", 1), (4, "0", 0), (4, "1", 4), (100, "0.29", 29), (10, "0.3", 3)],
)
def test_mix_ln_has_the_floor_of_alpha_times_l_post_norm_blocks(n_layers, alpha, post_blocks):
    """POST_NUM 3 of 12 and 6 of 24 are the paper's; 0.29 * 100 is below 29 in binary."""
    wanted = ["Post"] * 2 * post_blocks + ["Pre"] * 2 * (n_layers - post_blocks)
    assert joins(f"mix_ln(alpha={alpha})", n_layers) == wanted


def test_a_quarter_of_the_blocks_is_the_papers_choice():
    assert joins("mix_ln", 100) == ["Post"] * 50 + ["Pre"] * 150


@pytest.mark.parametrize("alpha", ["-0.1", "1.1", "nan"])
def test_alpha_is_a_share(alpha):
    with pytest.raises(ValueError, match="alpha"):
        placements.get(f"mix_ln(alpha={alpha})")


def test_hybridnorm(run_row):
    """Y = X + A(X); Z = N(Y); X' = Z + M(Z), with a final norm (arXiv 2503.04598; norms on Q, K, V are in A)."""
    embedding = torch.randn(2, 3, 4)
    row = placements.get("hybridnorm").junctions(dim=4, n_layers=2, norm=EXACT)
    states, inputs = run_row(row, embedding, [torch.tanh, torch.sin] * 2)
    x = embedding
    for block in range(2):
        torch.testing.assert_close(inputs[2 * block], x)
        z = unit(x + torch.tanh(x))
        torch.testing.assert_close(inputs[2 * block + 1], z)
        torch.testing.assert_close(states[2 * block + 1][0], z)
        x = z + torch.sin(z)
    torch.testing.assert_close(states[-1][0], x)
    torch.testing.assert_close(inputs[-1], unit(x))


def test_hybridnorm_star_has_a_pre_norm_first_block(run_row):
    """Block 0: Y = X + A(N(X)); X' = Y + M(N(Y)). The others as HybridNorm's."""
    embedding = torch.randn(2, 3, 4)
    row = placements.get("hybridnorm_star").junctions(dim=4, n_layers=2, norm=EXACT)
    _, inputs = run_row(row, embedding, [torch.tanh, torch.sin] * 2)
    y = embedding + torch.tanh(unit(embedding))
    x = y + torch.sin(unit(y))
    z = unit(x + torch.tanh(x))
    for got, wanted in zip(inputs, [unit(embedding), unit(y), x, z, unit(z + torch.sin(z))], strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", ["hybridnorm", "hybridnorm_star"])
def test_hybridnorm_norms_queries_keys_and_values_in_every_block(name):
    placement = placements.get(name)
    for layer in range(3):
        inner = placement.at(layer).inner
        assert (inner.qk, inner.qk_statistics, inner.v) == ("model", "head", "model")
    assert placement.init == "megatron_full"


def test_hybridnorm_norms_the_stream_before_each_feed_forward_only():
    sublayers = ("attention", "cross_attention", "feed_forward")
    assert joins("hybridnorm", 2, sublayers=sublayers) == ["Pre", "Post", "Pre"] * 2


# --- placements by depth --------------------------------------------------------------------------------------------


def test_a_range_of_blocks_has_its_own_joins_and_reads():
    assert joins("post:0,pre:1,olmo2:2-3", 4) == ["Post"] * 2 + ["Pre"] * 2 + ["Output"] * 4


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("pre:0-1,siamese:2-", ["streams", "x, y"]),
        ("hyper_connections(n_streams=2):0-1,mhc:2-", ["2 streams", "4 streams"]),
        ("post:0-1,pre:3-", ["block 2", "pre:3-"]),
        ("post:0-2,pre:2-", ["block 3", "pre:2-"]),
        ("post:1-2,pre:3-", ["block 0", "post:1-2"]),
        ("post:0-,pre:3-", ["open"]),
        ("post:0-1,pre:2-1", ["ends before"]),
        ("post:0-1,pre", ["PLACEMENT:FIRST-LAST"]),
    ],
)
def test_ranges_that_do_not_fit(spec, words):
    with pytest.raises(ValueError, match=r".+") as error:
        placements.get(spec)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("spec", ["post:0-1,pre:2-3", "post:0-1,pre:2-7", "post:0-4,pre:5-"])
def test_ranges_must_cover_the_model(spec):
    with pytest.raises(ValueError, match=r"block"):
        placements.get(spec).junctions(dim=4, n_layers=5)


def test_parallel_and_sequential_blocks_in_one_model():
    row = placements.get("swin_v2(extra_norm_every=1):0-1,parallel:2-").junctions(dim=4, n_layers=4)
    assert len(row) == 1 + 2 * 2 + 2
    normed = [getattr(junction.join, "norm", None) is not None for junction in row[1:]]
    assert normed == [False, True, False, True, False, False]
