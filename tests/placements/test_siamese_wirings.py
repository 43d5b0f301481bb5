"""Other wirings of SiameseNorm: other pairs of streams, a Pre-Norm first block, Depth-Attention; exact limits."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normstream import placements
from normstream.junctions import Junction
from normstream.layers.inner import Inner
from normstream.models import DecoderConfig, DecoderLM
from normstream.norms import NormConfig

NORMS = [NormConfig(kind="rms", eps=1e-5), NormConfig(kind="layer", eps=1e-5, bias=True)]
DIM = 6


def unit(t: Tensor) -> Tensor:
    """RMSNorm with unit gain and eps 1e-5."""
    return t / torch.sqrt(t.square().mean(-1, keepdim=True) + 1e-5)


def randomize(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        values = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.data.copy_(values / p.shape[1] ** 0.5 if p.ndim == 2 else 1 + 0.3 * values)


def row_and_updates(spec: str) -> tuple[Any, Tensor, list[Tensor]]:
    """Two blocks at unit gain, an embedding and four updates."""
    row = nn.ModuleList(placements.get(spec).junctions(dim=DIM, n_layers=2, norm=NormConfig(eps=1e-5))).double()
    generator = torch.Generator().manual_seed(0)
    embedding, *updates = torch.randn(5, 2, 3, DIM, generator=generator, dtype=torch.float64)
    return row, embedding, updates


# --- pairs of streams -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [("post", "pre"), ("pre", "pre"), ("post", "post")])
@pytest.mark.parametrize("embedding_norm", [True, False])
@pytest.mark.parametrize("read_out", ["code", "paper"])
def test_a_post_stream_is_normed_after_each_addition_and_a_pre_stream_where_it_is_read(
    kinds, embedding_norm, read_out, run_row
):
    spec = f"siamese(pair={'-'.join(kinds)},embedding_norm={str(embedding_norm).lower()},read_out={read_out})"
    row, embedding, updates = row_and_updates(spec)
    states, inputs = run_row(row, embedding, [lambda z, o=o: o for o in updates])

    streams = [unit(embedding) if kind == "post" and embedding_norm else embedding for kind in kinds]
    for i, (state, z) in enumerate(zip(states, inputs, strict=True)):
        if i > 0:
            o = updates[i - 1]
            raw = [streams[0] + o / math.sqrt(2 * ((i - 1) // 2 + 1)), streams[1] + o]
            streams = [unit(s) if kind == "post" else s for s, kind in zip(raw, kinds, strict=True)]
        read = [unit(s) if kind == "pre" else s for s, kind in zip(streams, kinds, strict=True)]
        fused = read[0] + read[1]
        is_last = i == len(updates)
        torch.testing.assert_close(list(state), streams, rtol=0, atol=1e-12)
        torch.testing.assert_close(z, fused if is_last and read_out == "paper" else unit(fused), rtol=0, atol=1e-12)


def test_without_depth_scale_two_pre_streams_are_one():
    """x and y receive the same updates and start equal: z = N_in(2 N(x)) for equal gains."""
    row, embedding, updates = row_and_updates("siamese(pair=pre-pre,depth_scale=none,input_norm=false)")
    state, z = row[0]((), embedding)
    for junction, o in zip(row[1:4], updates, strict=False):
        state, z = junction(state, o)
        torch.testing.assert_close(state[0], state[1], rtol=0, atol=0)
        torch.testing.assert_close(z, 2 * unit(state[0]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("pair", ["post-pre", "pre-pre", "post-post"])
@pytest.mark.parametrize("input_norm", [True, False])
def test_number_of_norms(pair, input_norm):
    """Each of the 11 junctions of 5 blocks norms each stream once, where it joins or where it is read, and the sum."""
    row = placements.get(f"siamese(pair={pair},input_norm={str(input_norm).lower()})").junctions(dim=8, n_layers=5)
    sums = 11 if input_norm else 1
    assert sum(p.numel() for junction in row for p in junction.parameters()) == 8 * (2 * 11 + sums)


# --- hybrid-pre's first block ---------------------------------------------------------------------------------------


def test_first_block_pre_by_hand(run_row):
    """Block 0: N(x) + N_y(y) for attention, N_in(N_ff(x) + N_y(y)) for the feed-forward, x raw; block 1 as always."""
    row, embedding, updates = row_and_updates("siamese_hybrid_pre(first_block=pre)")
    randomize(row)
    norms: dict[str, Any] = dict(row.named_modules())
    states, inputs = run_row(row, embedding, [lambda z, o=o: o for o in updates])
    c0, c1 = math.sqrt(2), math.sqrt(4)

    x = y = embedding
    wanted = [norms["0.read.norm_x"](x) + norms["0.read.norm_y"](y)]
    x, y = x + updates[0] / c0, y + updates[0]
    wanted.append(norms["1.read.norm_in"](norms["1.read.norm_x"](x) + norms["1.read.norm_y"](y)))
    x, y = x + updates[1] / c0, y + updates[1]
    torch.testing.assert_close(states[2], (x, y), rtol=0, atol=1e-12)
    wanted.append(row[2].read.c1 * x + norms["2.read.norm_y"](y))
    x, y = norms["3.join.norm_x"](x + updates[2] / c1), y + updates[2]
    wanted.append(norms["3.read.norm_in"](x + norms["3.read.norm_y"](y)))
    x, y = norms["4.join.norm_x"](x + updates[3] / c1), y + updates[3]
    wanted.append(norms["4.read.norm_in"](x + norms["4.read.norm_y"](y)))
    torch.testing.assert_close(inputs, wanted, rtol=0, atol=1e-12)


def test_first_block_pre_has_one_norm_in_the_place_of_c1():
    def count(spec: str) -> int:
        return sum(p.numel() for junction in placements.get(spec).junctions(8, 3) for p in junction.parameters())

    per_block, end = 4 + 1, 3
    assert count("siamese_hybrid_pre") == count("siamese_hybrid_pre(first_block=pre)") == 8 * (3 * per_block + end)


def test_a_first_block_that_is_also_the_last_ends_with_the_last_norm():
    row: Any = placements.get("siamese_hybrid_pre(first_block=pre)").junctions(dim=4, n_layers=1)
    assert [junction.join.norm_x is not None for junction in row] == [False, False, True]


# --- hybrid-pre contains Pre-Norm and HybridNorm ---------------------------------------------------------------------


def build(placement: str, norm: NormConfig, **options: Any) -> DecoderLM:
    sizes = {"vocab_size": 23, "dim": 24, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2}
    return DecoderLM(DecoderConfig(placement=placement, norm=norm, **sizes, **options)).double()


def junctions(model: DecoderLM) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Junction)]


def copy_sublayers(source: DecoderLM, target: DecoderLM) -> None:
    theirs = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        if ".join." not in name and ".read." not in name:
            parameter.data.copy_(theirs[name])


def silence(*modules: nn.Module) -> None:
    for module in modules:
        for parameter in module.parameters():
            parameter.data.zero_()


def assert_same_logits(one: DecoderLM, other: DecoderLM) -> None:
    tokens = torch.randint(0, 23, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        a, b = one(tokens), other(tokens)
    assert a.abs().max() > 0.1
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", NORMS, ids=["rms", "layer"])
def test_with_x_gains_and_c1_zero_it_is_pre_norm_with_head_norms(norm):
    """The reference norms twice, by N_y and N_in, before each feed-forward and the head, as hybrid-pre does.

    c1 = 0 hides the raw x of the end of a block from attention, and zero gains the normed x from all others.
    """
    hybrid = build("siamese_hybrid_pre", norm)
    randomize(hybrid)
    for i, junction in enumerate(junctions(hybrid)):
        if junction.join.norm_x is not None:
            silence(junction.join.norm_x)
        if i in (0, 2, 4):
            junction.read.c1.data.zero_()
    pre = build("pre", norm, inner=Inner(qk="model", v="model"))
    copy_sublayers(hybrid, pre)
    for i, (ours, theirs) in enumerate(zip(junctions(pre), junctions(hybrid), strict=True)):
        repeated = (theirs.read.norm_y,) if i in (0, 2, 4) else (theirs.read.norm_y, theirs.read.norm_in)
        ours.read.norm = nn.Sequential(*repeated)
    assert_same_logits(pre, hybrid)


@pytest.mark.parametrize("norm", NORMS, ids=["rms", "layer"])
def test_with_y_gains_zero_and_c_and_c1_one_it_is_hybridnorm(norm):
    """The reference's feed-forward and head read N_in of HybridNorm's normed stream, as hybrid-pre does."""
    hybrid = build("siamese_hybrid_pre(depth_scale=none)", norm)
    randomize(hybrid)
    for i, junction in enumerate(junctions(hybrid)):
        silence(junction.read.norm_y)
        if i in (0, 2, 4):
            junction.read.c1.data.fill_(1)
    reference = build("hybridnorm", norm)
    copy_sublayers(hybrid, reference)
    rows = list(zip(junctions(reference), junctions(hybrid), strict=True))
    for ours, theirs in rows[1:6:2]:
        ours.join.norm = theirs.join.norm_x
        ours.read = placements.get("pre").last_read(placements.Build(24, norm))
        ours.read.norm = theirs.read.norm_in
    last, theirs = rows[-1]
    last.read.norm = nn.Sequential(theirs.join.norm_x, theirs.read.norm_in)
    assert_same_logits(reference, hybrid)


# --- Depth-Attention beside SiameseNorm -----------------------------------------------------------------------------


def test_depth_attention_has_the_junctions_of_hybrid_pre(run_row):
    """Scale sqrt(2 n) for the 1-based layer n, c1 in every layer, N(X) + N(Y) and then the final norm."""
    row, embedding, updates = row_and_updates("siamese_depth_attention")
    other, _, _ = row_and_updates("siamese_hybrid_pre")
    sublayers = [lambda z, o=o: o for o in updates]
    for ours, theirs in zip(run_row(row, embedding, sublayers), run_row(other, embedding, sublayers), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert [junction.join.scale for junction in row[1:]] == [1 / math.sqrt(2 * n) for n in (1, 1, 2, 2)]


def test_depth_attention_norms_queries_and_keys_over_the_whole_projection():
    """OLMo 3's: a gain as wide as the projection (grouped keys have a narrower one), nothing on the values."""
    attention: Any = build("siamese_depth_attention", NORMS[0]).layers[0].attention
    shapes = {name: tuple(p.shape) for name, p in attention.named_parameters() if "norm" in name}
    assert {name: math.prod(shape) for name, shape in shapes.items()} == {"q_norm.weight": 24, "k_norm.weight": 12}
