"""Placements with one stream, as papers and released code write them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from normstream.layers import PositionConfig
from normstream.layers.inner import Inner
from normstream.norms import NormConfig

Model = Callable[[Any, Tensor], Tensor]


def pre_norm(m: Any, x: Tensor) -> Tensor:
    """Sub-LN, and NormFormer's pieces inside the sublayers, are Pre-Norm outside."""
    for s in range(m.n):
        x = x + m.F(s, m.N(s, "read.norm", x))
    return m.N(m.n, "read.norm", x)


def pre_norm_residual_scale(m: Any, x: Tensor) -> Tensor:
    """x-transformers with scale_residual=True."""
    for s in range(m.n):
        x = m.of(s + 1, "join.residual_scale") * x + m.F(s, m.N(s, "read.norm", x))
    return m.N(m.n, "read.norm", x)


def x_transformers_normformer(m: Any, x: Tensor) -> Tensor:
    """sandwich_norm, scale_residual, attn_head_scale and ff_post_act_ln, all on."""
    for s in range(m.n):
        update = m.N(s + 1, "join.norm_out", m.F(s, m.N(s, "read.norm", x)))
        x = m.of(s + 1, "join.residual_scale") * x + update
    return m.N(m.n, "read.norm", x)


def fairseq_normformer(attention_norm: bool, residual_scale: bool) -> Model:
    def run(m: Any, x: Tensor) -> Tensor:
        for s in range(m.n):
            update = m.F(s, m.N(s, "read.norm", x))
            if s % 2 == 0 and attention_norm:
                update = m.N(s + 1, "join.norm_out", update)
            if s % 2 == 1 and residual_scale:
                x = m.of(s + 1, "join.residual_scale") * x
            x = x + update
        return m.N(m.n, "read.norm", x)

    return run


def x_transformers_keel(m: Any, x: Tensor) -> Tensor:
    """pre_and_post_norm, scale_residual_constant=2.5: both norms on every branch, no final norm."""
    for s in range(m.n):
        x = m.N(s + 1, "join.norm", 2.5 * x + m.F(s, m.N(s, "read.norm", x)))
    return x


def deepnorm(alpha: float, final_norm: bool) -> Model:
    def run(m: Any, x: Tensor) -> Tensor:
        for s in range(m.n):
            x = m.N(s + 1, "join.norm", alpha * x + m.F(s, x))
        return m.N(m.n, "read.norm", x) if final_norm else x

    return run


def torchscale_decoder_with_deepnorm_alone(m: Any, x: Tensor) -> Tensor:
    """Before 0.3 the flag left the decoder Pre-Norm, with residual factor (2M)^(1/4), M = 3, and a final norm."""
    for s in range(m.n):
        x = 6**0.25 * x + m.F(s, m.N(s, "read.norm", x))
    return m.N(m.n, "read.norm", x)


def hybridnorm_star(m: Any, x: Tensor) -> Tensor:
    for layer in range(m.n // 2):
        s = 2 * layer
        if layer == 0:
            x = x + m.F(s, m.N(s, "read.norm", x))
            x = x + m.F(s + 1, m.N(s + 1, "read.norm", x))
        else:
            z = m.N(s + 1, "join.norm", x + m.F(s, x))
            x = z + m.F(s + 1, z)
    return m.N(m.n, "read.norm", x)


def mix_ln(post_num: int) -> Model:
    def run(m: Any, x: Tensor) -> Tensor:
        for s in range(m.n):
            post = s // 2 < post_num
            x = m.N(s + 1, "join.norm", x + m.F(s, x)) if post else x + m.F(s, m.N(s, "read.norm", x))
        return m.N(m.n, "read.norm", x)

    return run


def layernorm_scaling(m: Any, x: Tensor) -> Tensor:
    for s in range(m.n):
        x = x + m.F(s, m.N(s, "read.norm", x) / math.sqrt(s // 2 + 1))
    return m.N(m.n, "read.norm", x)


def reordered_norm(m: Any, x: Tensor) -> Tensor:
    for s in range(m.n):
        x = x + m.N(s + 1, "join.norm_out", m.F(s, x))
    return m.N(m.n, "read.norm", x)


def sandwich(m: Any, x: Tensor) -> Tensor:
    """OLMo-core's PeriNormTransformerBlock, which norms no embedding, is Sandwich-LN."""
    for s in range(m.n):
        x = x + m.N(s + 1, "join.norm_out", m.F(s, m.N(s, "read.norm", x)))
    return m.N(m.n, "read.norm", x)


def residual_from_norm(m: Any, x: Tensor) -> Tensor:
    """BLOOM with apply_residual_connection_post_layernorm."""
    x = m.N(0, "join.norm", x)
    for s in range(m.n):
        z = m.N(s, "read.norm", x)
        x = z + m.F(s, z)
    return m.N(m.n, "read.norm", x)


def one_norm_parallel(m: Any, x: Tensor) -> Tensor:
    """Cohere, GPT-J: one norm, one sum."""
    for layer in range(m.config.n_layers):
        before = f"layers.{layer - 1}.after_parallel" if layer else "before_layers"
        z = m.norm(f"{before}.read.norm", x)
        name = f"layers.{layer}.parallel"
        x = x + m.attention(f"{name}.attention", z) + m.feed_forward(f"{name}.feed_forward", z)
    return m.norm(f"layers.{m.config.n_layers - 1}.after_parallel.read.norm", x)


LAYER = NormConfig(kind="layer", eps=1e-5, bias=True)
TORCHSCALE: dict[str, Any] = {
    "norm": LAYER,
    "bias": "all",
    "activation": "gelu",
    "positions": PositionConfig(kind="none"),
}
LAYER_NO_BIAS = NormConfig(kind="layer", eps=1e-5)
X_TRANSFORMERS = TORCHSCALE | {"norm": LAYER_NO_BIAS, "bias": "feed_forward"}
NO_EPS = X_TRANSFORMERS | {"norm": NormConfig(eps=0.0)}
OLMO = {"n_kv_heads": 2}
CHAMELEON = Inner(qk="layer_bias", qk_statistics="head", qk_gain="per_head")

CASES: dict[str, tuple[str, Model, dict[str, Any]]] = {
    "x-transformers, scale_residual": ("pre(residual_scale=true)", pre_norm_residual_scale, X_TRANSFORMERS),
    "x-transformers, RMSNorm": ("pre", pre_norm, NO_EPS),
    "x-transformers, NormFormer": (
        "sandwich(residual_scale=true)",
        x_transformers_normformer,
        X_TRANSFORMERS | {"inner": Inner(head_scale="before_output", hidden="model")},
    ),
    "x-transformers, Keel": ("keel(alpha=2.5,first_block=none)", x_transformers_keel, NO_EPS),
    "fairseq, NormFormer, all four": ("normformer(head_scale=code)", fairseq_normformer(True, True), TORCHSCALE),
    "fairseq, scale_attn": (
        "normformer(head_scale=none,hidden_norm=false,residual_scale=false)",
        fairseq_normformer(True, False),
        TORCHSCALE,
    ),
    "fairseq, scale_fc and scale_resids": (
        "normformer(head_scale=none,attention_norm=false)",
        fairseq_normformer(False, True),
        TORCHSCALE,
    ),
    "fairseq, scale_heads": (
        "normformer(head_scale=code,attention_norm=false,hidden_norm=false,residual_scale=false)",
        pre_norm,
        TORCHSCALE,
    ),
    "torchscale, DeepNorm decoder": ("deepnorm", deepnorm(6**0.25, False), TORCHSCALE),
    "torchscale, DeepNorm decoder as configured": (
        "deepnorm(base=pre)",
        torchscale_decoder_with_deepnorm_alone,
        TORCHSCALE,
    ),
    "torchscale, Sub-LN decoder": ("sub_ln", pre_norm, TORCHSCALE),
    "Mix-LN's deeppost": ("deepnorm(alpha=2.828,final_norm=true)", deepnorm(2.828, True), {}),
    "Mix-LN, POST_NUM=1 of 3": ("mix_ln(alpha=0.34)", mix_ln(1), {}),
    "Mix-LN, POST_NUM=2": ("post:0-1,pre:2-", mix_ln(2), {}),
    "LayerNorm Scaling": ("layernorm_scaling", layernorm_scaling, {"n_layers": 5}),
    "HybridNorm*": ("hybridnorm_star", hybridnorm_star, OLMO),
    "OLMo-core, Peri": ("peri(embedding_norm=false)", sandwich, OLMO),
    "Chameleon, swin_norm": ("olmo2", reordered_norm, OLMO | {"inner": CHAMELEON}),
    "Command R+": (
        "parallel(norms=1)",
        one_norm_parallel,
        OLMO | {"norm": LAYER_NO_BIAS, "inner": Inner(qk="model", qk_gain="per_head")},
    ),
    "BLOOM, residual from the norm": ("bloom(residual_from_norm=true)", residual_from_norm, TORCHSCALE),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_every_gradient(name, check_reference):
    check_reference(*CASES[name])
