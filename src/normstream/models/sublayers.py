"""The sublayers of one block, built from a model's configuration."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from normstream import placements
from normstream.layers import Attention, CrossAttention, FeedForward, LatentAttention, MoE, Parallel
from normstream.layers.feed_forward import is_gated
from normstream.layers.head_norm import head_norm, inner_norm
from normstream.layers.inner import GainSharing, InnerNorm, Statistics
from normstream.layers.learned_scale import LearnedScale
from normstream.layers.moe import Experts
from normstream.layers.router import Router
from normstream.models.config import DecoderConfig
from normstream.models.model_config import SUBLAYERS, ModelConfig
from normstream.norms import NormConfig


def block_sublayers(config: ModelConfig, layer: int, kinds: Sequence[str] = SUBLAYERS) -> dict[str, nn.Module]:
    """The sublayers of block ``layer`` by kind, in the order of ``kinds``, or parallel, which holds all of them.

    >>> list(block_sublayers(DecoderConfig(placement="pre"), 0))
    ['attention', 'feed_forward']
    """
    placement = placements.get(config.placement).at(layer)
    makers = {"attention": attention, "cross_attention": cross_attention, "feed_forward": feed_forward}
    sublayers = {kind: makers[kind](config, layer) for kind in kinds}
    if not placement.parallel:
        return sublayers
    norms = {kind: config.norm.build(config.dim) for kind in sublayers} if placement.branch_norms else None
    return {"parallel": Parallel(sublayers, norms)}


def attention(config: ModelConfig, layer: int) -> Attention | LatentAttention:
    """The attention of block ``layer``, latent if the configuration gives it a rank."""
    inner: Any = config.inner_of(layer)  # its fields no longer say placement
    latent = config.latent if isinstance(config, DecoderConfig) and config.latent.kv_rank else None
    if latent is not None:
        conventions = _inner_conventions(config, inner)
        return LatentAttention(
            config.dim,
            sizes=latent,
            q_norm=conventions.build(latent.q_rank) if latent.q_rank else None,
            kv_norm=conventions.build(latent.kv_rank),
            **_head_options(config, inner, layer, latent.v_head_dim),
        )
    return Attention(
        config.dim,
        norm_after_rope=inner.qk_after_rope == "yes",
        linked_values=inner.link == "depth",
        **_own_key_options(config, inner, layer),
    )


def cross_attention(config: ModelConfig, layer: int) -> CrossAttention:
    """The cross-attention of block ``layer``, with the norms that the placement wants inside it.

    >>> cross_attention(DecoderConfig(placement="hybridnorm", dim=8, n_heads=2), 0).k_norm
    RMSNorm(4, eps=1e-05, gain=plain, bias=False, cast=after_gain)
    """
    inner: Any = config.inner.over(placements.get(config.placement).at(layer).cross_inner)
    return CrossAttention(config.dim, **_own_key_options(config, inner, layer))


def _own_key_options(config: ModelConfig, inner: Any, layer: int) -> dict[str, Any]:
    """What attention and cross-attention share: heads with keys of their own, and norms on them."""
    conventions, head_dim = _inner_conventions(config, inner), config.resolved_head_dim

    def norm(kind: InnerNorm, n_heads: int, statistics: Statistics, gain: GainSharing) -> nn.Module | None:
        unit = math.sqrt(head_dim * config.dim) if inner.scales == "ngpt" else 1.0
        return head_norm(kind, conventions, n_heads, head_dim, statistics=statistics, gain=gain, unit=unit)

    return _head_options(config, inner, layer, head_dim) | {
        "n_kv_heads": config.resolved_kv_heads,
        "head_dim": head_dim,
        "q_norm": norm(inner.qk, config.n_heads, inner.qk_statistics, inner.qk_gain),
        "k_norm": norm(inner.qk, config.resolved_kv_heads, inner.qk_statistics, inner.qk_gain),
        "v_norm": norm(inner.v, config.resolved_kv_heads, "head", inner.v_gain),
    }


def _head_options(config: ModelConfig, inner: Any, layer: int, v_head_dim: int) -> dict[str, Any]:
    """What every kind of attention takes."""
    return {
        "n_heads": config.n_heads,
        "layer": layer,
        "bias": config.bias in ("all", "qkv"),
        "output_bias": config.bias == "all",
        "scale": config.query_scale,
        "cap": config.attention_cap,
        "linked_scores": inner.link == "scores",
        "context_norm": inner_norm(inner.context, _inner_conventions(config, inner), config.n_heads * v_head_dim),
        "head_scale": inner.head_scale,
    }


def feed_forward(config: ModelConfig, layer: int) -> FeedForward | MoE:
    """The feed-forward of block ``layer``, or its experts if the configuration gives it some."""
    if isinstance(config, DecoderConfig) and config.has_experts(layer):
        return _experts(config, layer)
    return _dense(config, layer, config.resolved_ffn_dim)


def _dense(config: ModelConfig, layer: int, ffn_dim: int) -> FeedForward:
    bias = config.bias in ("all", "feed_forward")
    return FeedForward(config.dim, bias=bias, **_feed_forward_options(config, layer, ffn_dim))


def _experts(config: DecoderConfig, layer: int) -> MoE:
    moe, inner = config.moe, config.inner_of(layer)
    ffn_dim = config.resolved_ffn_dim if moe.ffn_dim is None else moe.ffn_dim
    router = Router(
        config.dim,
        n_experts=moe.n_experts,
        top_k=moe.top_k,
        gates=moe.gates,
        normalized=moe.normalized,
        scale=moe.scale,
        bias_rate=moe.bias_rate,
        logit_scale=LearnedScale(moe.n_experts, unit=math.sqrt(config.dim)) if inner.scales == "ngpt" else None,
    )
    experts = Experts(config.dim, n_experts=moe.n_experts, **_feed_forward_options(config, layer, ffn_dim))
    shared = _dense(config, layer, moe.n_shared * ffn_dim) if moe.n_shared else None
    return MoE(router, experts, shared, moe.capacity)


def _feed_forward_options(config: ModelConfig, layer: int, ffn_dim: int) -> dict[str, Any]:
    """What a feed-forward and experts share: the width, the activation, and what is on the hidden vector."""
    inner: Any = config.inner_of(layer)
    return {
        "ffn_dim": ffn_dim,
        "activation": config.activation,
        "hidden_norm": inner_norm(inner.hidden, _inner_conventions(config, inner), ffn_dim),
        **(_feed_forward_scales(config, ffn_dim) if inner.scales == "ngpt" else {}),
    }


def _inner_conventions(config: ModelConfig, inner: Any) -> NormConfig:
    return config.norm if inner.eps is None else replace(config.norm, eps=inner.eps)


def _feed_forward_scales(config: ModelConfig, ffn_dim: int) -> dict[str, nn.Module]:
    """nGPT's: the vector that the activation acts on starts sqrt(D) times as large, to leave its linear range."""
    large = LearnedScale(ffn_dim, start=math.sqrt(config.dim), unit=math.sqrt(config.dim))
    if not is_gated(config.activation):
        return {"up_scale": large}
    return {"up_scale": LearnedScale(ffn_dim), "gate_scale": large}
