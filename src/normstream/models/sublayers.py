"""The sublayers of one block, built from the decoder's configuration."""

import math
from dataclasses import replace
from typing import Any

from torch import nn

from normstream import placements
from normstream.layers import Attention, FeedForward, LatentAttention, Parallel
from normstream.layers.feed_forward import is_gated
from normstream.layers.head_norm import head_norm, inner_norm
from normstream.layers.inner import GainSharing, InnerNorm, Statistics
from normstream.layers.learned_scale import LearnedScale
from normstream.models.config import DecoderConfig
from normstream.norms import NormConfig


def block_sublayers(config: DecoderConfig, layer: int) -> dict[str, nn.Module]:
    """The sublayers of block ``layer`` by kind: attention and feed_forward, or parallel, which holds both.

    >>> list(block_sublayers(DecoderConfig(placement="pre"), 0))
    ['attention', 'feed_forward']
    """
    placement = placements.get(config.placement).at(layer)
    sublayers = {"attention": attention(config, layer), "feed_forward": feed_forward(config, layer)}
    if not placement.parallel:
        return sublayers
    norms = {kind: config.norm.build(config.dim) for kind in sublayers} if placement.branch_norms else None
    return {"parallel": Parallel(sublayers, norms)}


def attention(config: DecoderConfig, layer: int) -> Attention | LatentAttention:
    """The attention of block ``layer``, latent if the configuration gives it a rank."""
    inner: Any = config.inner_of(layer)  # its fields no longer say placement
    latent, conventions = config.latent, _inner_conventions(config, inner)
    v_head_dim = latent.v_head_dim if latent.kv_rank else config.resolved_head_dim
    shared: dict[str, Any] = {
        "n_heads": config.n_heads,
        "layer": layer,
        "bias": config.bias in ("all", "qkv"),
        "output_bias": config.bias == "all",
        "scale": config.query_scale,
        "cap": config.attention_cap,
        "linked_scores": inner.link == "scores",
        "context_norm": inner_norm(inner.context, conventions, config.n_heads * v_head_dim),
        "head_scale": inner.head_scale,
    }
    if latent.kv_rank:
        q_norm = conventions.build(latent.q_rank) if latent.q_rank else None
        return LatentAttention(
            config.dim, sizes=latent, q_norm=q_norm, kv_norm=conventions.build(latent.kv_rank), **shared
        )

    def norm(kind: InnerNorm, n_heads: int, statistics: Statistics, gain: GainSharing) -> nn.Module | None:
        head_dim = config.resolved_head_dim
        unit = math.sqrt(head_dim * config.dim) if inner.scales == "ngpt" else 1.0
        return head_norm(kind, conventions, n_heads, head_dim, statistics=statistics, gain=gain, unit=unit)

    return Attention(
        config.dim,
        n_kv_heads=config.resolved_kv_heads,
        head_dim=config.resolved_head_dim,
        q_norm=norm(inner.qk, config.n_heads, inner.qk_statistics, inner.qk_gain),
        k_norm=norm(inner.qk, config.resolved_kv_heads, inner.qk_statistics, inner.qk_gain),
        v_norm=norm(inner.v, config.resolved_kv_heads, "head", inner.v_gain),
        norm_after_rope=inner.qk_after_rope == "yes",
        linked_values=inner.link == "depth",
        **shared,
    )


def feed_forward(config: DecoderConfig, layer: int) -> FeedForward:
    """The feed-forward of block ``layer``."""
    inner: Any = config.inner_of(layer)
    ffn_dim = config.resolved_ffn_dim
    return FeedForward(
        config.dim,
        ffn_dim=ffn_dim,
        activation=config.activation,
        bias=config.bias in ("all", "feed_forward"),
        hidden_norm=inner_norm(inner.hidden, _inner_conventions(config, inner), ffn_dim),
        **(_feed_forward_scales(config) if inner.scales == "ngpt" else {}),
    )


def _inner_conventions(config: DecoderConfig, inner: Any) -> NormConfig:
    return config.norm if inner.eps is None else replace(config.norm, eps=inner.eps)


def _feed_forward_scales(config: DecoderConfig) -> dict[str, nn.Module]:
    """nGPT's: the vector that the activation acts on starts sqrt(D) times as large, to leave its linear range."""
    large = LearnedScale(config.resolved_ffn_dim, start=math.sqrt(config.dim), unit=math.sqrt(config.dim))
    if not is_gated(config.activation):
        return {"up_scale": large}
    return {"up_scale": LearnedScale(config.resolved_ffn_dim), "gate_scale": large}
