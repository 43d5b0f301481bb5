"""The decoder's configuration and its checks."""

import math
from dataclasses import dataclass, field
from typing import Literal

from normstream.layers import Activation, default_ffn_dim
from normstream.layers.inner import Inner
from normstream.names import check_choice
from normstream.norms import NormConfig
from normstream.placements import DEFAULT, InitScheme, get

FromPlacement = Literal["placement"]


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
    """Hidden width of the feed-forward; None means 4 dim for gelu, 8/3 dim rounded up to 32 for swiglu."""
    activation: Activation = "swiglu"
    """Feed-forward kind: swiglu or gelu."""
    max_seq_len: int = 1024
    """Longest sequence that the model accepts."""
    rope_theta: float = 10_000.0
    """Base of the rotary position embedding."""
    norm: NormConfig = field(default_factory=NormConfig)
    """Conventions of every norm."""
    inner: Inner = field(default_factory=Inner)
    """Norms, scales and links inside the sublayers; placement takes what the placement's recipe says."""
    bias: bool = False
    """Whether the matrices of the sublayers have biases."""
    tied: bool = False
    """Whether the output head shares the embedding matrix."""
    embedding_multiplier: float = 1.0
    """Factor on the token embedding (Gemma: the square root of dim)."""
    init: Literal[FromPlacement, InitScheme] = "placement"
    """Initialization; placement takes what the placement's recipe says."""
    init_std: float | None = None
    """Standard deviation of the initial matrices, before any depth scaling; None means sqrt(2 / (5 dim))."""
    dropout: float = 0.0
    """Dropout of every update, drawn once for all streams."""
    drop_path: float = 0.0
    """Drop-path rate of the last block's updates, growing linearly from 0 in the first."""

    def __post_init__(self) -> None:
        get(self.placement)
        check_choice("activation", self.activation, Activation)
        check_choice("init", self.init, Literal[FromPlacement, InitScheme])
        sizes = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "max_seq_len")
        for name in sizes:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("rope_theta", "embedding_multiplier", "resolved_init_std"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"{name.removeprefix('resolved_')} must be a positive number, got {getattr(self, name)}"
                )
        for name in ("dropout", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.head_dim is None and self.dim % self.n_heads:
            raise ValueError(f"dim {self.dim} is not divisible by n_heads {self.n_heads}; change one or give head_dim")
        if self.resolved_head_dim % 2:
            raise ValueError(
                f"rotary positions need an even head_dim, got {self.resolved_head_dim}; change dim, n_heads or head_dim"
            )
        if self.n_heads % self.resolved_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.resolved_kv_heads}")

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
    def resolved_init_std(self) -> float:
        """``init_std``, or its default: "small init" (Nguyen and Salazar 2019, arXiv 1910.05895), 0.0198 at dim 1024.

        >>> round(DecoderConfig(dim=1024).resolved_init_std, 4)
        0.0198
        """
        return math.sqrt(2 / (5 * self.dim)) if self.init_std is None else self.init_std
