"""SiameseNorm, post-pre and hybrid-pre: constants, structure, derivatives, against arXiv 2602.08064 and its code."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normstream import placements
from normstream.norms import NormConfig

DEPTH_CONSTANTS = {
    "code": lambda layer, sublayer: math.sqrt(2 * (layer + 1)),
    "paper": lambda layer, sublayer: math.sqrt(layer + 1),
    "sublayer": lambda layer, sublayer: math.sqrt(sublayer + 1),
    "none": lambda layer, sublayer: 1.0,
}


def randomize(module: nn.Module, generator: torch.Generator) -> None:
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(1 + 0.3 * noise)


# --- depth constants ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DEPTH_CONSTANTS)
@pytest.mark.parametrize("name", ["siamese", "siamese_hybrid_pre"])
def test_x_receives_the_update_divided_by_the_depth_constant(name, kind):
    row: Any = placements.get(f"{name}(depth_scale={kind})").junctions(dim=4, n_layers=5)
    o = torch.randn(2, 3, 4, dtype=torch.float64)
    for sublayer, junction in enumerate(row[1:]):
        c = DEPTH_CONSTANTS[kind](sublayer // 2, sublayer)
        to_x, to_y = junction.join.contributions(o)
        torch.testing.assert_close(to_x, o / c, rtol=1e-14, atol=0)
        assert torch.equal(to_y, o)


def test_depth_constants_by_hand():
    def scales(kind: str) -> list[float]:
        row: Any = placements.get(f"siamese(depth_scale={kind})").junctions(dim=1, n_layers=2)
        return [j.join.contributions(torch.ones(1, 1, 1, dtype=torch.float64))[0].item() for j in row[1:]]

    assert scales("code") == pytest.approx([0.70710678, 0.70710678, 0.5, 0.5])
    assert scales("paper") == pytest.approx([1.0, 1.0, 0.70710678, 0.70710678])
    assert scales("sublayer") == pytest.approx([1.0, 0.70710678, 0.57735027, 0.5])
    assert scales("none") == [1.0] * 4


def test_the_default_constant_is_that_of_the_released_code():
    assert placements.get("siamese") == placements.get("siamese(depth_scale=code)")
    assert placements.get("siamese_hybrid_pre") == placements.get("siamese_hybrid_pre(depth_scale=code)")


def test_depth_constants_are_no_tensors():
    """They are Python floats, so a dtype change or a checkpoint cannot touch them."""
    row = nn.ModuleList(placements.get("siamese").junctions(dim=4, n_layers=2))
    assert list(row.buffers()) == []


def cosine_by_hand(kind: str, n_layers: int) -> float:
    """With orthonormal embedding and updates both streams are known by their coefficients on them."""
    x = [1.0]
    for sublayer in range(2 * n_layers):
        x.append(1 / DEPTH_CONSTANTS[kind](sublayer // 2, sublayer))
        length = math.sqrt(sum(a * a for a in x))
        x = [a / length for a in x]
    return sum(x) / math.sqrt(len(x))


@pytest.mark.parametrize(("kind", "cosine"), [("sublayer", 0.9999), ("code", 0.998), ("paper", 0.950), ("none", 0.44)])
def test_scaled_x_stream_against_the_normed_y_stream(kind, cosine, run_row):
    """Orthogonal unit updates dilute Pre-Norm's stream at 1/sqrt(s+1): with that constant both streams are one vector.

    16 blocks of width 4096. The cosines given are of one draw of random updates, which leaves 1/sqrt(4096) = 0.016 of
    spread where the last few updates make up the x stream (none); orthogonal updates have a closed form.
    """
    dim, n_layers = 4096, 16
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(dim, 2 * n_layers + 1, generator=generator, dtype=torch.float64)).Q.T
    embedding, *updates = math.sqrt(dim) * basis[:, None, None]
    row = placements.get(f"siamese(depth_scale={kind})").junctions(dim, n_layers, norm=NormConfig(eps=1e-12))
    with torch.no_grad():
        states, _ = run_row(nn.ModuleList(row).double(), embedding, [lambda z, o=o: o for o in updates])
    x, y = states[-1]
    got = torch.cosine_similarity(x, y, dim=-1).item()
    assert got == pytest.approx(cosine_by_hand(kind, n_layers), abs=1e-9)
    assert got == pytest.approx(cosine, abs=0.02 if kind == "none" else 0.01)


# --- structure ------------------------------------------------------------------------------------------------------


def by_hand_rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return gain * x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


@pytest.mark.parametrize("embedding_norm", [True, False])
@pytest.mark.parametrize("input_norm", [True, False])
@pytest.mark.parametrize("read_out", ["code", "paper"])
def test_post_pre_with_every_option(embedding_norm, input_norm, read_out, run_row):
    """Unit gains; the streams are followed by hand."""
    options = f"embedding_norm={embedding_norm},input_norm={input_norm},read_out={read_out}".lower()
    row = nn.ModuleList(
        placements.get(f"siamese({options})").junctions(dim=6, n_layers=2, norm=NormConfig(eps=1e-5))
    ).double()
    generator = torch.Generator().manual_seed(0)
    embedding, *updates = torch.randn(5, 2, 3, 6, generator=generator, dtype=torch.float64)
    states, inputs = run_row(row, embedding, [lambda z, o=o: o for o in updates])

    def norm(t: Tensor) -> Tensor:
        return by_hand_rms(t, torch.ones(6), 1e-5)

    x, y = (norm(embedding) if embedding_norm else embedding), embedding
    for i, (state, z) in enumerate(zip(states, inputs, strict=True)):
        if i > 0:
            o = updates[i - 1]
            x, y = norm(x + o / math.sqrt(2 * ((i - 1) // 2 + 1))), y + o
        fused = x + norm(y)
        is_last = i == len(updates)
        normed = read_out == "code" if is_last else input_norm
        torch.testing.assert_close(state, (x, y), rtol=0, atol=1e-12)
        torch.testing.assert_close(z, norm(fused) if normed else fused, rtol=0, atol=1e-12)


def test_hybrid_pre_by_hand(run_row):
    """x is normed once a block, before the feed-forward, and enters attention raw, times c1."""
    row = nn.ModuleList(
        placements.get("siamese_hybrid_pre").junctions(dim=6, n_layers=2, norm=NormConfig(eps=1e-5))
    ).double()
    c1s = [p for name, p in row.named_parameters() if name.endswith("c1")]
    assert len(c1s) == 2
    assert all(torch.equal(c1.data, torch.ones(6)) for c1 in c1s)
    generator = torch.Generator().manual_seed(0)
    for c1 in c1s:
        c1.data.copy_(torch.randn(6, generator=generator))
    embedding, *updates = torch.randn(5, 2, 3, 6, generator=generator, dtype=torch.float64)
    states, inputs = run_row(row, embedding, [lambda z, o=o: o for o in updates])

    def norm(t: Tensor) -> Tensor:
        return by_hand_rms(t, torch.ones(6), 1e-5)

    x = y = embedding
    for layer in range(2):
        c = math.sqrt(2 * (layer + 1))
        torch.testing.assert_close(inputs[2 * layer], c1s[layer] * x + norm(y), rtol=0, atol=1e-12)
        x, y = norm(x + updates[2 * layer] / c), y + updates[2 * layer]
        torch.testing.assert_close(states[2 * layer + 1], (x, y), rtol=0, atol=1e-12)
        torch.testing.assert_close(inputs[2 * layer + 1], norm(x + norm(y)), rtol=0, atol=1e-12)
        x, y = x + updates[2 * layer + 1] / c, y + updates[2 * layer + 1]
    torch.testing.assert_close(states[-1][1], y, rtol=0, atol=1e-12)
    torch.testing.assert_close(inputs[-1], norm(norm(x) + norm(y)), rtol=0, atol=1e-12)


def test_zero_sublayers_closed_form(run_row):
    """microsoft/ResiDual#1: y stays the embedding, x its norm (twice is once, up to eps)."""
    row = placements.get("siamese").junctions(dim=2, n_layers=6, norm=NormConfig(eps=0.0))
    x0 = torch.tensor([[[3.0, 4.0]]])
    states, inputs = run_row(row, x0, [torch.zeros_like] * 12)
    unit = x0 / math.sqrt(12.5)
    for x, y in states:
        torch.testing.assert_close(x, unit)
        assert torch.equal(y, x0)
    for z in inputs:
        torch.testing.assert_close(z, unit)  # N(unit + unit)


# --- derivatives ----------------------------------------------------------------------------------------------------


def norm_jacobian(x: Tensor, gain: Tensor, kind: str) -> Tensor:
    """At eps 0: diag(gain) (sqrt(d)/|c|) (I - c c^T/|c|^2) P with c = P x, P the centring of layer norm (else I)."""
    dim = x.shape[0]
    eye = torch.eye(dim, dtype=x.dtype)
    centring = eye - 1 / dim if kind == "layer" else eye
    c = centring @ x
    length = c.norm()
    return torch.diag(gain) @ (math.sqrt(dim) / length * (eye - torch.outer(c, c) / length**2)) @ centring


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(("depth_scale", "c"), [("code", 2.0), ("paper", math.sqrt(2)), ("none", 1.0)])
def test_block_jacobian_of_the_joint_state(kind, depth_scale, c):
    """Row x: J_NX (I + J_F/c), J_NX (J_F/c) J_NY; row y: J_F, I + J_F J_NY. c = 1 is the paper's matrix."""
    dim, generator = 5, torch.Generator().manual_seed(0)
    placement = placements.get(f"siamese(input_norm=false,depth_scale={depth_scale})")
    norm = NormConfig(kind=kind, eps=0.0, bias=kind == "layer")
    row: Any = nn.ModuleList(placement.junctions(dim, n_layers=2, norm=norm)).double()
    randomize(row, generator)
    read, join = row[2].read, row[3].join  # around the attention of the second block
    w1, w2 = torch.randn(2, dim, dim, generator=generator, dtype=torch.float64)
    x, y = torch.randn(2, dim, generator=generator, dtype=torch.float64)

    def sublayer(z: Tensor) -> Tensor:
        return torch.tanh(z @ w1) @ w2 + z.square()

    def block(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        state, z = read((x[None, None], y[None, None]))
        x, y = join(state, sublayer(z))
        return x[0, 0], y[0, 0]

    (j_xx, j_xy), (j_yx, j_yy) = torch.autograd.functional.jacobian(block, (x, y))

    (gain_y, *_), (gain_x, *_) = ([p.detach() for p in half.parameters()] for half in (read, join))
    _, z = read((x[None, None], y[None, None]))
    z = z[0, 0].detach()
    j_f = torch.autograd.functional.jacobian(sublayer, z)
    j_ny = norm_jacobian(y, gain_y, kind)
    j_nx = norm_jacobian(x + sublayer(z) / c, gain_x, kind)
    eye = torch.eye(dim, dtype=torch.float64)
    pairs = [
        (j_xx, j_nx @ (eye + j_f / c)),
        (j_xy, j_nx @ (j_f / c) @ j_ny),
        (j_yx, j_f),
        (j_yy, eye + j_f @ j_ny),
    ]
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12 * max(1, wanted.abs().max().item()))


# --- one draw for both streams --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["siamese", "siamese_hybrid_pre"])
@pytest.mark.parametrize("drop", [{"dropout": 0.5}, {"drop_path": 0.5}, {"dropout": 0.5, "drop_path": 0.5}])
def test_both_streams_receive_the_same_draw(name, drop):
    """The y increment is c times the x increment before its norm: same dropout mask, same dropped samples."""
    dim, batch = 32, 16
    row: Any = placements.get(name).junctions(dim, n_layers=2, **drop)
    join = row[4].join.train() if name == "siamese" else row[3].join.train()  # second block, x normed there
    seen: list[Tensor] = []
    join.norm_x.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    torch.manual_seed(0)
    x, y, o = torch.zeros(batch, 3, dim), torch.zeros(batch, 3, dim), 1 + torch.rand(batch, 3, dim)
    _, new_y = join((x, y), o)
    (x_before_norm,) = seen
    torch.testing.assert_close(new_y, 2 * x_before_norm)  # c = sqrt(2 (1 + 1))

    dropped = (new_y == 0).float().mean().item()
    expected = 1 - 0.5 ** len(drop)
    assert dropped == pytest.approx(expected, abs=0.3)
    kept = new_y != 0
    torch.testing.assert_close(new_y[kept], (o * 2 ** len(drop))[kept])
    if "drop_path" in drop:
        whole = (new_y == 0).flatten(1).all(1)
        assert 0 < int(whole.sum()) < batch
    if "dropout" not in drop:
        assert all(sample.all() or not sample.any() for sample in kept.flatten(1))
    if "drop_path" not in drop:
        assert dropped == pytest.approx(0.5, abs=0.05)

    join.eval()
    seen.clear()
    _, new_y = join((x, y), o)
    assert torch.equal(new_y, o)
    torch.testing.assert_close(seen[0], o / 2)


@pytest.mark.parametrize("name", ["siamese", "siamese_hybrid_pre", "pre", "post"])
def test_contributions_come_after_dropout(name):
    join: Any = placements.get(name).junctions(8, n_layers=1, dropout=0.5)[1].join.train()
    o = torch.ones(4, 3, 8)
    torch.manual_seed(0)
    contributions = join.contributions(o)
    values = contributions[-1].unique()
    assert values.tolist() == [0.0, 2.0]
    if len(contributions) == 2:
        torch.testing.assert_close(contributions[0], contributions[1] / math.sqrt(2))


def test_drop_path_grows_linearly_with_depth():
    """Zero in the first block, the given rate in the last."""
    row: Any = placements.get("pre").junctions(1, n_layers=3, drop_path=0.5)
    torch.manual_seed(0)
    samples = torch.ones(20000, 1, 1)
    rates = [(j.join.train().contributions(samples)[0] == 0).float().mean().item() for j in row[1:]]
    assert rates == pytest.approx([0.0, 0.0, 0.25, 0.25, 0.5, 0.5], abs=0.02)
