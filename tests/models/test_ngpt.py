"""nGPT against a short model of the paper's equations (arXiv 2410.01131), and its unit weights."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normstream.init import initialize
from normstream.layers.inner import Inner
from normstream.models import DecoderConfig, DecoderLM

DIM, HEADS, HEAD_DIM, FFN, VOCAB = 24, 4, 6, 32, 23


def build(n_kv_heads: int = 4, **options) -> DecoderLM:
    config = DecoderConfig(
        placement="ngpt", vocab_size=VOCAB, dim=DIM, n_layers=3, n_heads=HEADS, n_kv_heads=n_kv_heads, ffn_dim=FFN,
        **options,
    )  # fmt: skip
    model = DecoderLM(config).double()
    initialize(model, seed=0)
    return model


def randomize_factors(model: DecoderLM) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data *= 1 + 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


def norm(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True)


def rotated(x: Tensor) -> Tensor:
    """x (B, H, T, K): pairs (j, j + K/2) as complex numbers, turned by t theta_j."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * 10_000 ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def reference(model: DecoderLM, tokens: Tensor, olmo_core: bool = False) -> Tensor:
    """The paper's forward pass, its scaled parameters written out.

    OLMo-core's NormalizedAttention norms all heads as one vector and applies the factors before the rotation.
    """
    w, root = dict(model.named_parameters()), math.sqrt(DIM)
    groups = HEADS // model.config.resolved_kv_heads
    h = w["tok_embeddings.weight"][tokens]
    for i in range(3):
        layer = f"layers.{i}"

        def heads(name: str, layer: str = layer, h: Tensor = h) -> Tensor:
            x = h @ w[f"{layer}.attention.{name}.weight"].T
            return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

        s_q, s_k = (w[f"{layer}.attention.{n}_norm.weight"].view(-1, 1, HEAD_DIM) * root for n in "qk")
        if olmo_core:
            q, k = (
                rotated(heads(n) / heads(n).norm(dim=(1, 3), keepdim=True) * s) for n, s in (("wq", s_q), ("wk", s_k))
            )
        else:
            q, k = norm(rotated(heads("wq"))) * s_q, norm(rotated(heads("wk"))) * s_k
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, heads("wv")))
        scores = math.sqrt(HEAD_DIM) * q @ k.transpose(-1, -2)
        later = torch.ones(scores.shape[-2:]).triu(1).bool()
        mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ v
        h_a = norm(mixed.transpose(1, 2).flatten(-2) @ w[f"{layer}.attention.wo.weight"].T)
        alpha = (w[f"{layer}.after_attention.join.alpha"] * 0.05 * root).abs()
        h = norm(h + alpha * (h_a - h))

        u = h @ w[f"{layer}.feed_forward.w_up.weight"].T * w[f"{layer}.feed_forward.up_scale.weight"]
        v = h @ w[f"{layer}.feed_forward.w_gate.weight"].T * w[f"{layer}.feed_forward.gate_scale.weight"] * root
        h_m = norm((u * F.silu(v)) @ w[f"{layer}.feed_forward.w_down.weight"].T)
        alpha = (w[f"{layer}.after_feed_forward.join.alpha"] * 0.05 * root).abs()
        h = norm(h + alpha * (h_m - h))
    return h @ w["lm_head.weight"].T * w["logit_scale.weight"] * root


TOKENS = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("olmo_core", [False, True])
@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_the_forward_pass_of_paper_and_olmo_core(n_kv_heads, olmo_core):
    model = build(n_kv_heads, inner=Inner(qk_statistics="all_heads", qk_after_rope="no") if olmo_core else Inner())
    randomize_factors(model)
    loss_weight = torch.randn(2, 9, VOCAB, dtype=torch.float64)
    names, parameters = zip(*model.named_parameters(), strict=True)
    ours, wanted = model(TOKENS), reference(model, TOKENS, olmo_core)
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad((loss_weight * x).sum(), parameters) for x in (ours, wanted)]
    for name, one, other in zip(names, *gradients, strict=True):
        assert one.abs().max() > 1e-8, name
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12, msg=name)


def test_factors_start_at_the_papers_values():
    """alpha 0.05, s_qk 1, s_u 1, s_v sqrt(D) with it, s_z 1; all but s_u and s_v are kept at 1 / sqrt(D)."""
    parameters = {n: p for n, p in build().named_parameters() if p.ndim == 1}
    assert len(parameters) == 3 * 6 + 1
    for name, parameter in parameters.items():
        start = 1.0 if "feed_forward.up_scale" in name or "feed_forward.gate_scale" in name else 1 / math.sqrt(DIM)
        torch.testing.assert_close(parameter.data, torch.full_like(parameter, start), msg=name)


def assert_unit(model: DecoderLM) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            lengths = parameter.norm(dim=0 if name.endswith(("wo.weight", "w_down.weight")) else 1)
            torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=0, atol=1e-12, msg=name)


def test_every_matrix_is_normed_at_the_start_and_after_a_step():
    model = build()
    assert_unit(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    F.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
    optimizer.step()
    model.placement.after_step(model)
    assert_unit(model)
    assert all((p - before[n]).abs().max() > 1e-6 for n, p in model.named_parameters())


def test_streams_stay_on_the_unit_sphere():
    model, lengths = build(), []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, output: lengths.append(output[0][0].norm(dim=-1)))
    with torch.no_grad():
        model(TOKENS)
    for length in lengths:
        torch.testing.assert_close(length, torch.ones_like(length), rtol=0, atol=1e-12)


def test_a_tied_head_and_a_feed_forward_without_gate():
    model = build(tied=True, activation="gelu")
    assert_unit(model)
    scale = model.get_submodule("layers.0.feed_forward.up_scale")
    torch.testing.assert_close(scale(torch.ones(FFN, dtype=torch.float64)), torch.full((FFN,), 24**0.5).double())
    assert model(TOKENS).isfinite().all()
