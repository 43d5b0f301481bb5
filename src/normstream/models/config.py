"""The decoder's configuration and its checks."""

import math
from dataclasses import dataclass, field
from typing import Literal

from normstream.layers import Activation, LatentConfig, PositionConfig, default_ffn_dim
from normstream.layers.inner import Inner
from normstream.names import check_choice
from normstream.norms import NormConfig
from normstream.placements import DEFAULT, InitScheme, get

FromPlacement = Literal["placement"]
BiasKind = Literal["none", "all", "qkv", "feed_forward"]
SUBLAYERS = ("attention", "feed_forward")
"""Kinds of the sublayers of a block, in order."""


@dataclass(frozen=True)
class DecoderConfig:
    """Dimensions and conventions of a decoder language model; every value is checked when it is made.

    Raises ValueError for dimensions that do not fit each other.

    >>> DecoderConfig(dim=64, n_heads=4).resolved_head_dim
    16
    """

    placement: str = DEFAULT
    """Where the norms sit: a name from `normstream list`, with options as in siamese(depth_scale=paper)."""
    vocab_size: int = 257
    """Number of tokens; training sets it from the tokenizer."""
    dim: int = 64
    """Width of the residual streams."""
    n_layers: int = 12
    """Number of blocks, each an attention and a feed-forward sublayer."""
    n_heads: int = 4
    """Number of query heads."""
    n_kv_heads: int | None = None
    """Number of key-value heads (grouped queries); None means n_heads."""
    head_dim: int | None = None
    """Width of a head; None means dim / n_heads."""
    ffn_dim: int | None = None
    """Hidden width of the feed-forward; None means 4 dim, or with a gate 8/3 dim rounded up to 32."""
    activation: Activation = "swiglu"
    """Feed-forward kind: with a gate swiglu, geglu or geglu_tanh, without gelu, gelu_tanh, relu or relu2."""
    max_seq_len: int = 1024
    """Longest sequence that the model accepts."""
    causal: bool = True
    """Whether a position sees only those before it; false makes an encoder."""
    positions: PositionConfig = field(default_factory=PositionConfig)
    """How attention knows where a token stands."""
    window: int | None = None
    """Number of keys that a query of a windowed layer sees, itself included; None means all."""
    full_every: int = 0
    """Every how many layers one sees all keys (layers k - 1, 2 k - 1, ...); 0 means that all layers are windowed."""
    query_scale: float | None = None
    """Factor on the products of queries and keys; None means one over the square root of the head's width."""
    attention_cap: float | None = None
    """Soft cap c of the attention scores s: c tanh(s / c); None means no cap."""
    latent: LatentConfig = field(default_factory=LatentConfig)
    """Multi-head latent attention; off while its kv_rank is 0."""
    depth_stride: int | None = None
    """With inner.link=depth: every how many layers one is a source for later ones; None means half the layers."""
    norm: NormConfig = field(default_factory=NormConfig)
    """Conventions of every norm."""
    inner: Inner = field(default_factory=Inner)
    """Norms, scales and links inside the sublayers; placement takes what the placement's recipe says."""
    bias: BiasKind = "none"
    """Matrices of the sublayers that have biases: none, all, qkv, or feed_forward."""
    tied: bool = False
    """Whether the output head shares the embedding matrix."""
    head_bias: bool = False
    """Whether the output head has a bias."""
    embedding_multiplier: float = 1.0
    """Factor on the token embedding (Gemma: the square root of dim)."""
    logit_multiplier: float = 1.0
    """Factor on the logits (Cohere), before any cap."""
    logit_cap: float | None = None
    """Soft cap c of the logits l: c tanh(l / c); None means no cap."""
    init: Literal[FromPlacement, InitScheme] = "placement"
    """Initialization; placement takes what the placement's recipe says."""
    init_std: float | None = None
    """Standard deviation of the initial matrices, before any depth scaling; None means sqrt(2 / (5 dim))."""
    dropout: float = 0.0
    """Dropout of every update, drawn once for all streams."""
    drop_path: float = 0.0
    """Drop-path rate of the last block's updates, growing linearly from 0 in the first."""

    def __post_init__(self) -> None:
        self._check_numbers()
        check_choice("activation", self.activation, Activation)
        check_choice("bias", self.bias, BiasKind)
        check_choice("init", self.init, Literal[FromPlacement, InitScheme])
        get(self.placement).blocks(self.n_layers, SUBLAYERS)
        self._check_heads()
        self._check_windows()
        self._check_inner()

    def _check_numbers(self) -> None:
        sizes = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "max_seq_len")
        for name in (*sizes, "window", "depth_stride"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.full_every < 0:
            raise ValueError(f"full_every must be at least 0, got {self.full_every}")
        positive = ("embedding_multiplier", "logit_multiplier", "logit_cap", "attention_cap", "query_scale")
        for name in (*positive, "resolved_init_std"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name.removeprefix('resolved_')} must be a positive number, got {value}")
        for name in ("dropout", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")

    def _check_heads(self) -> None:
        if self.latent.kv_rank:
            if self.n_kv_heads not in (None, self.n_heads) or self.head_dim is not None:
                raise ValueError(
                    "latent attention has as many key-value heads as query heads, of widths given in latent; "
                    f"leave out n_kv_heads and head_dim, got {self.n_kv_heads} and {self.head_dim}"
                )
            if self.positions.kind == "rotary" and self.positions.fraction != 1:
                raise ValueError(
                    f"latent attention rotates latent.rope_head_dim channels; leave positions.fraction at 1, "
                    f"got {self.positions.fraction}"
                )
            return
        if self.head_dim is None and self.dim % self.n_heads:
            raise ValueError(f"dim {self.dim} is not divisible by n_heads {self.n_heads}; change one or give head_dim")
        rotated = self.positions.rotated(self.resolved_head_dim)
        if self.positions.kind == "rotary" and (rotated < 2 or rotated % 2):
            raise ValueError(
                f"rotary positions need an even head_dim, got {self.resolved_head_dim}, of which {rotated} are "
                "rotated; change dim, n_heads, head_dim or positions.fraction"
            )
        if self.n_heads % self.resolved_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.resolved_kv_heads}; change one of them"
            )

    def _check_windows(self) -> None:
        positions = self.positions
        for name, default in (("fraction", 1.0), ("pairing", "half"), ("local_theta", None), ("layers", "all")):
            if positions.kind != "rotary" and getattr(positions, name) != default:
                raise ValueError(
                    f"positions.{name} is for rotary positions, but positions.kind is {positions.kind}; "
                    f"leave positions.{name} out"
                )
        if self.window is None:
            given = {
                "full_every": self.full_every > 0,
                "positions.local_theta": positions.local_theta is not None,
                "positions.layers=windowed": positions.layers == "windowed",
            }
            for name in (name for name, is_given in given.items() if is_given):
                raise ValueError(f"{name} is about windowed layers, but there are none; give window")

    def _check_inner(self) -> None:
        for layer in range(self.n_layers):
            inner = self.inner_of(layer)
            if inner.head_scale == "after_output" and self.dim % self.n_heads:
                raise ValueError(
                    f"a head scale after the output matrix needs dim {self.dim} divisible by n_heads {self.n_heads}; "
                    "change one of them, or set inner.head_scale to before_output or none"
                )
            if self.latent.kv_rank and (inner.qk, inner.v, inner.link) != ("none",) * 3:
                raise ValueError(
                    "latent attention norms its low-rank vectors; it takes no inner.qk, inner.v or inner.link, got "
                    f"{inner.qk}, {inner.v} and {inner.link}; set them to none or take another placement"
                )

    def inner_of(self, layer: int) -> Inner:
        """Norms, scales and links inside the sublayers of block ``layer``, nothing left to the placement.

        >>> DecoderConfig(placement="pre").inner_of(0).qk
        'none'
        """
        return self.inner.over(get(self.placement).at(layer).inner)

    def is_windowed(self, layer: int) -> bool:
        """Whether block ``layer`` (0-based) sees only the nearest keys.

        >>> [DecoderConfig(window=8, full_every=2).is_windowed(layer) for layer in range(4)]
        [True, False, True, False]
        """
        return self.window is not None and (self.full_every == 0 or (layer + 1) % self.full_every != 0)

    @property
    def resolved_head_dim(self) -> int:
        """``head_dim``, or its default."""
        return self.dim // self.n_heads if self.head_dim is None else self.head_dim

    @property
    def resolved_kv_heads(self) -> int:
        """``n_kv_heads``, or its default."""
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def resolved_ffn_dim(self) -> int:
        """``ffn_dim``, or its default."""
        return default_ffn_dim(self.dim, self.activation) if self.ffn_dim is None else self.ffn_dim

    @property
    def resolved_depth_stride(self) -> int:
        """``depth_stride``, or its default."""
        return max(1, self.n_layers // 2) if self.depth_stride is None else self.depth_stride

    @property
    def resolved_init_std(self) -> float:
        """``init_std``, or its default: "small init" (Nguyen and Salazar 2019, arXiv 1910.05895), 0.0198 at dim 1024.

        >>> round(DecoderConfig(dim=1024).resolved_init_std, 4)
        0.0198
        """
        return math.sqrt(2 / (5 * self.dim)) if self.init_std is None else self.init_std
