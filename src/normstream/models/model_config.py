"""What every kind of model has: width, blocks, attention, feed-forward, norms, initialization, and their checks."""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from normstream.checks import check_types
from normstream.layers import Activation, default_ffn_dim
from normstream.layers.inner import Inner
from normstream.names import check_choice
from normstream.norms import NormConfig
from normstream.placements import DEFAULT, InitScheme, get

FromPlacement = Literal["placement"]
BiasKind = Literal["none", "all", "qkv", "feed_forward"]
SUBLAYERS = ("attention", "feed_forward")
"""Kinds of the sublayers of a block, in order."""


@dataclass(frozen=True)
class ModelConfig:
    """The part of a configuration that all kinds of models share; every value is checked when it is made.

    Raises ValueError for a value of the wrong type, and for dimensions that do not fit each other.

    >>> ModelConfig(dim=64, n_heads=4).resolved_head_dim
    16
    """

    sublayers: ClassVar[tuple[str, ...]] = SUBLAYERS
    """Kinds of the sublayers of a block of the deepest stack, which a placement has to take."""

    placement: str = DEFAULT
    """Where the norms sit: a name from `normstream list`, with options as in siamese(depth_scale=paper)."""
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
    query_scale: float | None = None
    """Factor on the products of queries and keys; None means one over the square root of the head's width."""
    attention_cap: float | None = None
    """Soft cap c of the attention scores s: c tanh(s / c); None means no cap."""
    depth_stride: int | None = None
    """With inner.link=depth: every how many layers one is a source for later ones; None means half the layers."""
    norm: NormConfig = field(default_factory=NormConfig)
    """Conventions of every norm."""
    inner: Inner = field(default_factory=Inner)
    """Norms, scales and links inside the sublayers; placement takes what the placement's recipe says."""
    bias: BiasKind = "none"
    """Matrices of the sublayers that have biases: none, all, qkv, or feed_forward."""
    init: Literal[FromPlacement, InitScheme] = "placement"
    """Initialization; placement takes what the placement's recipe says."""
    init_std: float | None = None
    """Standard deviation of the initial matrices, before any depth scaling; None means sqrt(2 / (5 dim))."""
    dropout: float = 0.0
    """Dropout of every update, drawn once for all streams."""
    drop_path: float = 0.0
    """Drop-path rate of the last block's updates, growing linearly from 0 in the first."""

    def __post_init__(self) -> None:
        check_types(self)
        self.check_counts("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "depth_stride")
        self.check_positive("attention_cap", "query_scale", "resolved_init_std")
        for name in ("dropout", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        check_choice("activation", self.activation, Activation)
        check_choice("bias", self.bias, BiasKind)
        check_choice("init", self.init, Literal[FromPlacement, InitScheme])
        get(self.placement).blocks(self.n_layers, self.sublayers)
        self.check_heads()
        self._check_head_scale()

    def check_counts(self, *names: str) -> None:
        """Raises ValueError unless each of these fields is None or at least 1."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def check_positive(self, *names: str) -> None:
        """Raises ValueError unless each of these fields is None or a finite number above 0."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name.removeprefix('resolved_')} must be a positive number, got {value}")

    def check_heads(self) -> None:
        """Raises ValueError unless heads fit into the width and key-value heads divide the query heads."""
        if self.head_dim is None and self.dim % self.n_heads:
            raise ValueError(f"dim {self.dim} is not divisible by n_heads {self.n_heads}; change one or give head_dim")
        if self.n_heads % self.resolved_kv_heads:
            raise ValueError(
                f"n_heads {self.n_heads} is not divisible by n_kv_heads {self.resolved_kv_heads}; change one of them"
            )

    def _check_head_scale(self) -> None:
        for layer in range(self.n_layers):
            if self.inner_of(layer).head_scale == "after_output" and self.dim % self.n_heads:
                raise ValueError(
                    f"a head scale after the output matrix needs dim {self.dim} divisible by n_heads {self.n_heads}; "
                    "change one of them, or set inner.head_scale to before_output or none"
                )

    def inner_of(self, layer: int) -> Inner:
        """Norms, scales and links inside the sublayers of block ``layer``, nothing left to the placement.

        >>> ModelConfig(placement="pre").inner_of(0).qk
        'none'
        """
        return self.inner.over(get(self.placement).at(layer).inner)

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

        >>> round(ModelConfig(dim=1024).resolved_init_std, 4)
        0.0198
        """
        return math.sqrt(2 / (5 * self.dim)) if self.init_std is None else self.init_std
