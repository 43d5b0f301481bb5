"""Hyper-connections and mHC one by one: equations written position by position, starts, precision, derivatives."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normstream.junctions import (
    Drop,
    DynamicMix,
    HyperJoin,
    HyperRead,
    HyperStart,
    Junction,
    LibraryManifoldMix,
    PaperManifoldMix,
    SiameseHyperJoin,
    SiameseHyperRead,
    StaticMix,
    SumStreams,
)
from normstream.junctions.manifold import sinkhorn
from normstream.norms import LayerNorm, RMSNorm

DIM, N = 5, 3
MIXES = {
    "static": lambda: StaticMix(N, home=1),
    "dynamic": lambda: DynamicMix(DIM, N, 1, LayerNorm(DIM, eps=1e-5)),
    "no_tanh": lambda: DynamicMix(DIM, N, 1, RMSNorm(DIM, eps=1e-5), tanh=False),
    "mhc_paper": lambda: PaperManifoldMix(DIM, N, home=1, n_iterations=20, eps=1e-5),
    "mhc_library": lambda: LibraryManifoldMix(DIM, N, home=1, n_iterations=20),
}


def randomized(module: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    for p in module.double().parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return module


def random_streams(*shape: int) -> Tensor:
    return torch.randn(*shape, N, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


# --- Sinkhorn -------------------------------------------------------------------------------------------------------


def sinkhorn_by_hand(logits: list[list[float]], n_iterations: int, rows_last: bool) -> list[list[float]]:
    m = [[math.exp(v) for v in row] for row in logits]
    n = len(m)

    def rows() -> None:
        for row in m:
            total = sum(row)
            row[:] = [v / total for v in row]

    def columns() -> None:
        for j in range(n):
            total = sum(m[i][j] for i in range(n))
            for i in range(n):
                m[i][j] /= total

    for _ in range(n_iterations):
        for step in (columns, rows) if rows_last else (rows, columns):
            step()
    return m


@pytest.mark.parametrize("n_iterations", [1, 2, 20])
@pytest.mark.parametrize("last", [-1, -2])
def test_sinkhorn(n_iterations, last):
    logits = 2 * torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = torch.tensor(sinkhorn_by_hand(logits.tolist(), n_iterations, last == -1), dtype=torch.float64)
    got = sinkhorn(logits, n_iterations, last=last)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-14)
    torch.testing.assert_close(got.sum(last), torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-14)
    torch.testing.assert_close(sinkhorn(logits + 1000, n_iterations, last=last), got, rtol=0, atol=1e-11)


def test_twenty_iterations_are_nearly_doubly_stochastic_also_over_depth():
    """T 4.5: not exactly. The product of 64 such matrices keeps the exact sums and drifts in the others."""
    logits = torch.randn(64, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    product = torch.linalg.multi_dot(list(sinkhorn(logits, 20, last=-1)))
    one = torch.ones(4, dtype=torch.float64)
    torch.testing.assert_close(product.sum(-1), one, rtol=0, atol=1e-13)
    torch.testing.assert_close(product.sum(-2), one, rtol=0, atol=1e-2)


# --- starts ---------------------------------------------------------------------------------------------------------


def test_hyper_connections_start_as_one_stream_that_all_receive():
    for mix in (MIXES["static"](), MIXES["dynamic"]()):
        assert mix.static_alpha.tolist() == [[0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]
        assert mix.static_beta.tolist() == [1, 1, 1]
    dynamic = MIXES["dynamic"]()
    assert not dynamic.dynamic_alpha.any()
    assert not dynamic.dynamic_beta.any()
    assert (dynamic.scale_alpha.item(), dynamic.scale_beta.item()) == pytest.approx((0.01, 0.01))


def test_the_library_starts_mhc_far_from_the_identity():
    """Its own figures with four streams: 0.475 on the diagonal, 0.175 off it; 0.73 and 0.5 read, 1.46 written."""
    mix = LibraryManifoldMix(8, n_streams=4, home=2, n_iterations=20)
    alpha, beta = mix.weights(torch.randn(1, 1, 4, 8))
    wanted = torch.full((4, 4), 0.175).fill_diagonal_(0.475)
    torch.testing.assert_close(alpha[0, 0, :, 1:], wanted, rtol=0, atol=5e-4)
    assert alpha[0, 0, :, 0].tolist() == pytest.approx([0.5, 0.5, 0.731, 0.5], abs=1e-3)
    assert beta.unique().tolist() == pytest.approx([1.462], abs=1e-3)


def test_the_paper_starts_mhc_near_the_identity():
    """Off the diagonal e^-6 of the diagonal, before the scaling that makes every row sum to 1."""
    mix = PaperManifoldMix(8, n_streams=4, home=2, n_iterations=20, eps=1e-5)
    alpha, beta = mix.weights(torch.randn(1, 1, 4, 8))
    off = math.exp(-6) / (1 + 3 * math.exp(-6))
    wanted = torch.full((4, 4), off).fill_diagonal_(1 - 3 * off)
    torch.testing.assert_close(alpha[0, 0, :, 1:], wanted, rtol=0, atol=1e-6)
    assert alpha[0, 0, :, 0].tolist() == pytest.approx([0.04743, 0.04743, 0.95257, 0.04743], abs=1e-5)
    assert beta.unique().tolist() == [1.0]


@pytest.mark.parametrize("name", MIXES)
def test_reset_parameters_restores_the_start(name):
    mix, fresh = randomized(MIXES[name]()).float(), MIXES[name]()
    for module in mix.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    for (ours, a), (_, b) in zip(mix.named_parameters(), fresh.named_parameters(), strict=True):
        assert torch.equal(a, b), ours


# --- equations, stream by stream -------------------------------------------------------------------------------------


def layer_norm(x: Tensor, mix: Any) -> Tensor:
    centred = x - x.mean()
    return mix.norm.weight * centred / torch.sqrt(centred.square().mean() + 1e-5) + mix.norm.bias


def test_dynamic_weights_position_by_position():
    mix = randomized(MIXES["dynamic"]())
    h = random_streams(2, 4)
    u, (mixed, b) = mix(h)
    for batch in range(2):
        for t in range(4):
            streams = h[batch, t]
            rows = [layer_norm(stream, mix) for stream in streams]
            a = torch.stack(
                [mix.static_alpha[s] + mix.scale_alpha * (rows[s] @ mix.dynamic_alpha).tanh() for s in range(N)]
            )
            beta = [mix.static_beta[s] + mix.scale_beta * (rows[s] @ mix.dynamic_beta).tanh() for s in range(N)]
            torch.testing.assert_close(u[batch, t], a[0, 0] * streams[0] + a[1, 0] * streams[1] + a[2, 0] * streams[2])
            for target in range(N):
                wanted = sum((a[s, 1 + target] * streams[s] for s in range(N)), torch.zeros(DIM))
                torch.testing.assert_close(mixed[batch, t, target], wanted)
            torch.testing.assert_close(b[batch, t], torch.cat(beta))


def test_mhc_of_the_paper_position_by_position():
    """H_pre, H_post and H_res from all streams as one normed vector; H_res scaled over targets, then over sources."""
    mix = randomized(MIXES["mhc_paper"]())
    h = random_streams(1, 2)
    u, (mixed, b) = mix(h)
    for t in range(2):
        streams = h[0, t]
        flat = streams.flatten()
        x = flat / torch.sqrt(flat.square().mean() + 1e-5)
        logits = (x @ mix.dynamic_alpha).view(N, 1 + N)
        pre = torch.sigmoid(mix.static_alpha[:, 0] + mix.scale_pre * logits[:, 0])
        post = 2 * torch.sigmoid(mix.static_beta + mix.scale_post * (x @ mix.dynamic_beta))
        res = (mix.static_alpha[:, 1:] + mix.scale_res * logits[:, 1:]).detach()
        target_source = torch.tensor(sinkhorn_by_hand(res.T.tolist(), 20, rows_last=True), dtype=torch.float64)
        torch.testing.assert_close(u[0, t], pre @ streams)
        torch.testing.assert_close(mixed[0, t], target_source @ streams)
        torch.testing.assert_close(b[0, t], post)


def test_join_adds_the_weighted_update_to_every_stream():
    h, o = random_streams(2, 4), torch.randn(2, 4, DIM, dtype=torch.float64)
    for beta in (torch.rand(2, 4, N).double(), torch.rand(N).double()):
        (out,) = HyperJoin(Drop())((h, beta), o)
        for s in range(N):
            torch.testing.assert_close(out[..., s, :], h[..., s, :] + beta[..., s, None] * o, rtol=0, atol=1e-15)


def test_one_draw_for_all_streams():
    join = HyperJoin(Drop(dropout=0.5)).train()
    (h,) = join((torch.zeros(4, 3, N, DIM), torch.tensor([1.0, 2.0, -1.0])), torch.ones(4, 3, DIM))
    assert set(h[..., 0, :].unique().tolist()) == {0.0, 2.0}
    assert torch.equal(h[..., 1, :], 2 * h[..., 0, :])
    assert torch.equal(h[..., 2, :], -h[..., 0, :])


def test_first_and_last():
    e = torch.randn(2, 3, DIM)
    (h,) = HyperStart(N)((), e)
    assert h.shape == (2, 3, N, DIM)
    _, z = HyperRead(SumStreams(), nn.Identity())((h,))
    torch.testing.assert_close(z, N * e)


# --- precision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXES)
def test_weights_are_float32_in_autocast_and_for_bfloat16_streams(name):
    """The same streams in float32 and in bfloat16: the weights differ by the rounding of the streams alone."""
    mix = randomized(MIXES[name]()).float()
    h = random_streams(1, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        u, (mixed, beta) = mix(h)
        z = HyperRead(mix, nn.Identity())((h,))[1]
    high, (mixed_high, beta_high) = mix(h.float())
    assert (u.dtype, mixed.dtype, z.dtype) == (torch.bfloat16,) * 3
    assert beta.dtype == beta_high.dtype == torch.float32
    assert torch.equal(beta, beta_high)
    assert torch.equal(u, high.bfloat16())
    assert torch.equal(mixed, mixed_high.bfloat16())


def test_streams_keep_their_dtype_where_weights_are_float32():
    join = HyperJoin(Drop())
    for dtype in (torch.bfloat16, torch.float32):
        (h,) = join((torch.zeros(1, 1, N, DIM, dtype=dtype), torch.ones(N)), torch.ones(1, 1, DIM).bfloat16())
        assert h.dtype == dtype


def test_zero_streams_are_allowed():
    for make in MIXES.values():
        h = torch.zeros(1, 2, N, DIM, requires_grad=True)
        u, (mixed, _) = make()(h)
        (u.sum() + mixed.sum()).backward()
        assert torch.isfinite(u).all()
        assert h.grad is not None
        assert torch.isfinite(h.grad).all()


# --- derivatives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MIXES)
def test_gradcheck_of_the_junction(name):
    """Streams, the weights that travel with them, the update and every parameter."""
    junction = randomized(Junction(HyperJoin(Drop()), HyperRead(MIXES[name](), RMSNorm(DIM, eps=1e-5))))
    names = [n for n, _ in junction.named_parameters()]

    def run(h: Tensor, beta: Tensor, o: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(names, parameters, strict=True))
        state, z = torch.func.functional_call(junction, values, ((h, beta), o))
        return (*state, z)

    inputs = (random_streams(1, 2), torch.rand(1, 2, N).double(), torch.randn(1, 2, DIM).double())
    inputs = [t.requires_grad_() for t in (*inputs, *(p.detach().clone() for p in junction.parameters()))]
    assert torch.autograd.gradcheck(run, inputs, fast_mode=False)


def test_gradcheck_of_siamese_with_hyper_connections():
    def norm() -> nn.Module:
        return RMSNorm(DIM, eps=1e-5)

    junction = randomized(
        Junction(SiameseHyperJoin(norm(), 0.5, Drop()), SiameseHyperRead(MIXES["dynamic"](), norm(), norm()))
    )

    def run(x: Tensor, h: Tensor, beta: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        state, z = junction((x, h, beta), o)
        return (*state, z)

    tensors = (torch.randn(1, 2, DIM), random_streams(1, 2), torch.rand(1, 2, N), torch.randn(1, 2, DIM))
    assert torch.autograd.gradcheck(run, [t.double().requires_grad_() for t in tensors])
