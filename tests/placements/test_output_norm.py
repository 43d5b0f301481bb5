"""Placements that norm the update: Sandwich-LN, Peri-LN, Gemma, GLM-4, OLMo 2, Swin Transformer v2."""

import pytest
import torch
from torch import Tensor, nn

from normstream import placements
from normstream.norms import LayerNorm, NormConfig

EXACT = NormConfig(kind="rms", eps=0.0)


def unit(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize(
    ("name", "embedding_norm", "input_norm"),
    [
        ("sandwich", False, True),
        ("gemma2", False, True),
        ("gemma3", False, True),
        ("glm4", False, True),
        ("peri", True, True),
        ("olmo2", False, False),
    ],
)
def test_equations(name, embedding_norm, input_norm, run_row):
    embedding = torch.randn(2, 3, 4)
    row = placements.get(name).junctions(dim=4, n_layers=1, norm=EXACT)
    states, inputs = run_row(row, embedding, [torch.tanh, torch.sin])
    x = unit(embedding) if embedding_norm else embedding
    for i, function in enumerate((torch.tanh, torch.sin)):
        z = unit(x) if input_norm else x
        torch.testing.assert_close(inputs[i], z)
        x = x + unit(function(z))
    torch.testing.assert_close(states[-1][0], x)
    torch.testing.assert_close(inputs[-1], unit(x))


def test_peri_is_sandwich_with_an_embedding_norm():
    rows = [
        placements.get(spec).junctions(dim=4, n_layers=2)
        for spec in ("peri(embedding_norm=false)", "sandwich", "gemma2", "gemma3", "glm4")
    ]
    assert len({str(nn.ModuleList(row)) for row in rows}) == 1


def test_what_is_inside_the_sublayers():
    inner = {name: placements.get(name).inner for name in ("gemma2", "glm4", "gemma3", "olmo2", "swin_v2")}
    assert inner["gemma2"].qk == inner["glm4"].qk == "none"
    assert (inner["gemma3"].qk, inner["gemma3"].qk_statistics) == ("model", "head")
    assert (inner["olmo2"].qk, inner["olmo2"].qk_statistics, inner["olmo2"].qk_gain) == (
        "model",
        "all_heads",
        "per_head",
    )
    assert (inner["swin_v2"].qk, inner["swin_v2"].qk_gain) == ("l2", "number_per_head")


@pytest.mark.parametrize(("name", "start"), [("peri", 1.0), ("olmo2", 0.0)])
def test_the_stream_grows_by_two_a_block(name, start, run_row):
    """With branches independent of the stream, E[x^2] is start + 2 l: each of two branches adds unit variance."""
    blocks, dim = 24, 2048
    row = placements.get(name).junctions(dim=dim, n_layers=blocks, norm=EXACT)
    embedding = torch.randn(1, 1, dim) * (1.0 if start else 0.02)
    with torch.no_grad():
        states, _ = run_row(row, embedding, [torch.randn_like] * (2 * blocks))
    for block in (1, 6, 12, 24):
        (x,) = states[2 * block]
        assert x.square().mean().item() == pytest.approx(start + 2 * block, rel=0.1)


def test_the_size_of_a_branch_does_not_matter(run_row):
    embedding = torch.randn(1, 3, 8)
    finals = []
    for factor in (1.0, 1000.0):
        row = placements.get("peri").junctions(dim=8, n_layers=3, norm=EXACT)
        functions = [lambda z, c=factor: c * torch.tanh(z)] * 6
        finals.append(run_row(row, embedding, functions)[1][-1])
    torch.testing.assert_close(*finals)


@pytest.mark.parametrize("scope", ["token", "tensor"])
def test_pb_relax_norms_are_layer_norms_with_another_eps(scope, run_row):
    """N(x / max) is N(x) if eps is 0, whatever the maximum is taken over: every norm of the row is relaxed."""
    embedding = torch.randn(2, 3, 4, dtype=torch.float64)
    norm = NormConfig(kind="layer", eps=0.0, bias=True)
    finals = []
    for spec in ("sandwich", f"sandwich(pb_relax={scope})"):
        row = nn.ModuleList(placements.get(spec).junctions(dim=4, n_layers=2, norm=norm)).double()
        finals.append(run_row(list(row), embedding, [torch.tanh, torch.sin] * 2)[1][-1])
        kinds = {type(m).__name__ for m in row.modules() if isinstance(m, LayerNorm)}
        assert kinds == ({"LayerNorm"} if spec == "sandwich" else {"PBRelaxNorm"})
    torch.testing.assert_close(*finals, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_swin_v2_block_starts_as_the_identity(kind, run_row):
    """Gain and bias of the norms on the updates start at 0, whatever the sublayers give."""
    row = placements.get("swin_v2").junctions(dim=4, n_layers=3, norm=NormConfig(kind=kind, bias=kind == "layer"))
    states, _ = run_row(row, torch.randn(2, 3, 4), [torch.exp] * 6)
    for (x,) in states[1:]:
        assert torch.equal(x, states[0][0])


def test_swin_v2_norms_the_stream_every_so_many_blocks():
    row = placements.get("swin_v2(extra_norm_every=6)").junctions(dim=4, n_layers=13)
    normed = [i for i, junction in enumerate(row[1:]) if getattr(junction.join, "norm", None) is not None]
    assert normed == [2 * 5 + 1, 2 * 11 + 1]
    with pytest.raises(ValueError, match="extra_norm_every"):
        placements.get("swin_v2(extra_norm_every=-1)")
