"""ResiDual, SiameseNorm and hyper-connections, as papers and released code write them."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from normstream.layers import PositionConfig
from normstream.layers.inner import Inner
from normstream.norms import NormConfig

Model = Callable[[Any, Tensor], Tensor]


def residual(scale: float, alpha: float) -> Model:
    def run(m: Any, x: Tensor) -> Tensor:
        dual = scale * x
        for s in range(m.n):
            update = m.F(s, x)
            dual = dual + scale * update
            x = m.N(s + 1, "join.norm", x + update)
        wide = replace(m, config=replace(m.config, norm=replace(m.config.norm, eps=1e-7)))
        return alpha * x + wide.N(m.n, "read.norm_d", dual)

    return run


def siamese_code(m: Any, x: Tensor) -> Tensor:
    """The DeiT file: norms of x at the start of the next sublayer, c = sqrt(2 (l + 1)), a norm on every sum."""
    y = x
    for s in range(m.n):
        x = m.N(s, "join.norm_x", x)
        update = m.F(s, m.N(s, "read.norm_in", x + m.N(s, "read.norm_y", y)))
        x, y = x + update / math.sqrt(2 * (s // 2 + 1)), y + update
    return m.N(m.n, "read.norm_in", m.N(m.n, "join.norm_x", x) + m.N(m.n, "read.norm_y", y))


def siamese_paper(m: Any, x: Tensor) -> Tensor:
    """Algorithm 1 with depth-wise scaling by 1 / sqrt(l + 1)."""
    y = x
    for s in range(m.n):
        update = m.F(s, x + m.N(s, "read.norm_y", y))
        x, y = m.N(s + 1, "join.norm_x", x + update / math.sqrt(s // 2 + 1)), y + update
    return x + m.N(m.n, "read.norm_y", y)


def hybrid_pre(first_layer_pre: bool) -> Model:
    """OLMo_model_hybrid_pre.py; in the first layer optionally attn_norm=True and ffn_residual_after_norm=False."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = x
        for layer in range(m.n // 2):
            s, c = 2 * layer, math.sqrt(2 * (layer + 1))
            pre = first_layer_pre and layer == 0
            from_x = m.N(s, "read.norm_x", x) if pre else m.of(s, "read.c1") * x
            update = m.F(s, from_x + m.N(s, "read.norm_y", y))
            x, y = x + update / c, y + update
            normed = m.N(s + 1, "read.norm_x" if pre else "join.norm_x", x)
            update = m.F(s + 1, m.N(s + 1, "read.norm_in", normed + m.N(s + 1, "read.norm_y", y)))
            x, y = (x if pre else normed) + update / c, y + update
        return m.N(m.n, "read.norm_in", m.N(m.n, "join.norm_x", x) + m.N(m.n, "read.norm_y", y))

    return run


def depth_attention(m: Any, x: Tensor) -> Tensor:
    """archspace's olmo3_siamese_depth.py: hybrid-pre; every (L // 2)-th layer keeps its keys and mixed values.

    The values of a layer are mixed with those kept before it, by query and key at the same position, itself included.
    """
    y, kept = x, []

    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = (torch.stack([pair[i] for pair in [*kept, (k, v)]], dim=-2) for i in (0, 1))
        weights = (keys @ q[..., None] / math.sqrt(q.shape[-1])).softmax(-2)
        v = (weights * values).sum(-2)
        if layer % (m.config.n_layers // 2) == 0:
            kept.append((k, v))
        return v

    for layer in range(m.config.n_layers):
        s, c = 2 * layer, math.sqrt(2 * (layer + 1))
        z = m.of(s, "read.c1") * x + m.N(s, "read.norm_y", y)
        update = m.attention(f"layers.{layer}.attention", z, mix)
        x, y = m.N(s + 1, "join.norm_x", x + update / c), y + update
        update = m.F(s + 1, m.N(s + 1, "read.norm_in", x + m.N(s + 1, "read.norm_y", y)))
        x, y = x + update / c, y + update
    return m.N(m.n, "read.norm_in", m.N(m.n, "join.norm_x", x) + m.N(m.n, "read.norm_y", y))


def siamese_hyper_connections(m: Any, x: Tensor) -> Tensor:
    """SiameseNorm, whose y is read and written as hyper-connections do it, with two streams."""
    x, streams = m.N(0, "join.norm_x", x), torch.stack((x, x), dim=-2)
    for s in range(m.n):
        normed = m.of(s, "read.mix.norm.weight") * streams / streams.square().mean(-1, keepdim=True).sqrt()
        alpha, beta = (
            m.of(s, f"read.mix.static_{k}")
            + m.of(s, f"read.mix.scale_{k}") * torch.tanh(normed @ m.of(s, f"read.mix.dynamic_{k}").squeeze(-1))
            for k in ("alpha", "beta")
        )
        mixed = alpha.transpose(-1, -2) @ streams
        update = m.F(s, m.N(s, "read.norm_in", x + m.N(s, "read.norm_y", mixed[..., 0, :])))
        x = m.N(s + 1, "join.norm_x", x + update / math.sqrt(2 * (s // 2 + 1)))
        streams = mixed[..., 1:, :] + beta[..., None] * update[..., None, :]
    return m.N(m.n, "read.norm_in", x + m.N(m.n, "read.norm_y", streams.sum(-2)))


def hyper_connections(kind: str, n: int, *, tanh: bool = True, rounds: int = 0) -> Model:
    """lucidrains/hyper-connections: kind static, dynamic or mhc; streams (B, T, N, D), an RMSNorm without eps."""

    def run(m: Any, x: Tensor) -> Tensor:
        streams = torch.stack((x,) * n, dim=-2)
        for s in range(m.n):
            p = {k: m.of(s, f"read.mix.static_{k}") for k in ("alpha", "beta")}
            if kind != "static":
                normed = m.of(s, "read.mix.norm.weight") * streams / streams.square().mean(-1, keepdim=True).sqrt()
                made = {k: normed @ m.of(s, f"read.mix.dynamic_{k}").squeeze(-1) for k in p}
            if kind == "dynamic":
                made = {k: torch.tanh(v) if tanh else v for k, v in made.items()}
                p = {k: p[k] + m.of(s, f"read.mix.scale_{k}") * made[k] for k in p}
            if kind == "mhc":
                scales = [m.of(s, f"read.mix.scale_{k}") for k in ("pre", "res", "post")]
                pre = torch.sigmoid(p["alpha"][:, :1] + scales[0] * made["alpha"][..., :1])
                mixing = (p["alpha"][:, 1:] + scales[1] * made["alpha"][..., 1:]).exp()
                for axis in (-2, -1) * rounds:
                    mixing = mixing / mixing.sum(axis, keepdim=True)
                p = {
                    "alpha": torch.cat((pre, mixing), -1),
                    "beta": 2 * torch.sigmoid(p["beta"] + scales[2] * made["beta"]),
                }
            mixed = p["alpha"].transpose(-1, -2) @ streams
            update = m.F(s, m.N(s, "read.norm", mixed[..., 0, :]))
            streams = mixed[..., 1:, :] + p["beta"][..., None] * update[..., None, :]
        return m.N(m.n, "read.norm", streams.sum(-2))

    return run


LAYER = NormConfig(kind="layer", eps=1e-5, bias=True)
TORCHSCALE: dict[str, Any] = {
    "norm": LAYER,
    "bias": "all",
    "activation": "gelu",
    "positions": PositionConfig(kind="none"),
}
OLMO = {"n_kv_heads": 2}

CASES: dict[str, tuple[str, Model, dict[str, Any]]] = {
    "ResiDual decoder, OPUS": ("residual(scale=0.05)", residual(0.05, 1), TORCHSCALE),
    "ResiDual decoder, alpha": ("residual(alpha=0.3)", residual(1, 0.3), TORCHSCALE),
    "SiameseNorm post-pre LM": ("siamese", siamese_code, OLMO | {"inner": Inner(qk="model")}),
    "SiameseNorm, the paper": (
        "siamese(depth_scale=paper,read_out=paper,embedding_norm=false,input_norm=false)",
        siamese_paper,
        OLMO,
    ),
    "SiameseNorm hybrid-pre, plain": (
        "siamese_hybrid_pre",
        hybrid_pre(False),
        TORCHSCALE | {"inner": Inner(qk="none", v="none"), "positions": PositionConfig(kind="learned")},
    ),
    "SiameseNorm hybrid-pre, first layer pre": ("siamese_hybrid_pre(first_block=pre)", hybrid_pre(True), OLMO),
    "SiameseNorm with Depth-Attention": ("siamese_depth_attention", depth_attention, {"n_layers": 4}),
    "SiameseNorm with hyper-connections": (
        "siamese_hyper_connections(n_streams=2,mapping_norm=code)",
        siamese_hyper_connections,
        OLMO,
    ),
    "hyper-connections, no tanh": (
        "hyper_connections(n_streams=2,mapping_norm=code,tanh=false)",
        hyper_connections("dynamic", 2, tanh=False),
        {},
    ),
    "hyper-connections, five streams": (
        "hyper_connections(n_streams=5,mapping_norm=code)",
        hyper_connections("dynamic", 5),
        {},
    ),
    "hyper-connections, one stream": (
        "hyper_connections(n_streams=1,mapping_norm=code)",
        hyper_connections("dynamic", 1),
        {},
    ),
    "hyper-connections, static": ("hyper_connections(n_streams=3,mode=static)", hyper_connections("static", 3), {}),
    "mHC, two streams, 3 rounds": (
        "mhc(n_streams=2,mapping=code,sinkhorn=3)",
        hyper_connections("mhc", 2, rounds=3),
        {},
    ),
    "mHC, four streams, 1 round": ("mhc(mapping=code,sinkhorn=1)", hyper_connections("mhc", 4, rounds=1), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_every_gradient(name, check_reference):
    check_reference(*CASES[name])
