"""The configurations of models of tokens: what they share, and the decoder's."""

from dataclasses import dataclass, field

from normstream.layers import LatentConfig, MoEConfig, PositionConfig
from normstream.models.model_config import ModelConfig


@dataclass(frozen=True)
class TextConfig(ModelConfig):
    """What decoders, encoders and encoder-decoders share besides ``ModelConfig``.

    >>> TextConfig().positions.kind
    'rotary'
    """

    vocab_size: int = 257
    """Number of tokens; training sets it from the tokenizer."""
    max_seq_len: int = 1024
    """Longest sequence that the model accepts."""
    positions: PositionConfig = field(default_factory=PositionConfig)
    """How attention knows where a token stands."""
    tied: bool = False
    """Whether the output head shares the embedding matrix."""
    head_bias: bool = False
    """Whether the output head has a bias."""
    embedding_multiplier: float = 1.0
    """Factor on the token embedding (Gemma: the square root of dim)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_counts("vocab_size", "max_seq_len")
        self.check_positive("embedding_multiplier")
        self._check_positions()

    def check_heads(self) -> None:
        super().check_heads()
        rotated = self.positions.rotated(self.resolved_head_dim)
        if self.positions.kind == "rotary" and (rotated < 2 or rotated % 2):
            raise ValueError(
                f"rotary positions need an even head_dim, got {self.resolved_head_dim}, of which {rotated} are "
                "rotated; change dim, n_heads, head_dim or positions.fraction"
            )

    def _check_positions(self) -> None:
        positions = self.positions
        for name, default in (("fraction", 1.0), ("pairing", "half"), ("local_theta", None), ("layers", "all")):
            if positions.kind != "rotary" and getattr(positions, name) != default:
                raise ValueError(
                    f"positions.{name} is for rotary positions, but positions.kind is {positions.kind}; "
                    f"leave positions.{name} out"
                )
        if positions.kind == "sinusoidal" and self.dim % 2:
            raise ValueError(f"sinusoidal positions need an even dim, got {self.dim}; change it or positions.kind")
        self.check_windows()

    def check_windows(self) -> None:
        """Raises ValueError for options of windowed layers where there are none."""
        given = {
            "positions.local_theta": self.positions.local_theta is not None,
            "positions.layers=windowed": self.positions.layers == "windowed",
        }
        for name in (name for name, is_given in given.items() if is_given):
            raise ValueError(f"{name} is about windowed layers, but there are none; give window")


@dataclass(frozen=True)
class DecoderConfig(TextConfig):
    """Dimensions and conventions of a decoder language model; every value is checked when it is made.

    Raises ValueError for dimensions that do not fit each other.

    >>> DecoderConfig(dim=64, n_heads=4).resolved_head_dim
    16
    """

    causal: bool = True
    """Whether a position sees only those before it."""
    window: int | None = None
    """Number of keys that a query of a windowed layer sees, itself included; None means all."""
    full_every: int = 0
    """Every how many layers one sees all keys (layers k - 1, 2 k - 1, ...); 0 means that all layers are windowed."""
    latent: LatentConfig = field(default_factory=LatentConfig)
    """Multi-head latent attention; off while its kv_rank is 0."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """Experts instead of one feed-forward; off while its n_experts is 0."""
    logit_multiplier: float = 1.0
    """Factor on the logits (Cohere), before any cap."""
    logit_cap: float | None = None
    """Soft cap c of the logits l: c tanh(l / c); None means no cap."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_counts("window")
        self.check_positive("logit_multiplier", "logit_cap")
        self._check_latent()
        self._check_experts()

    def check_heads(self) -> None:
        if not self.latent.kv_rank:
            super().check_heads()
            return
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

    def check_windows(self) -> None:
        if self.full_every < 0:
            raise ValueError(f"full_every must be at least 0, got {self.full_every}")
        if self.window is None:
            if self.full_every > 0:
                raise ValueError("full_every is about windowed layers, but there are none; give window")
            super().check_windows()

    def _check_latent(self) -> None:
        for layer in range(self.n_layers):
            inner = self.inner_of(layer)
            if self.latent.kv_rank and (inner.qk, inner.v, inner.link) != ("none",) * 3:
                raise ValueError(
                    "latent attention norms its low-rank vectors; it takes no inner.qk, inner.v or inner.link, got "
                    f"{inner.qk}, {inner.v} and {inner.link}; set them to none or take another placement"
                )

    def _check_experts(self) -> None:
        if not self.moe.n_experts:
            return
        if self.moe.first_dense >= self.n_layers:
            raise ValueError(
                f"moe.first_dense {self.moe.first_dense} leaves none of the {self.n_layers} blocks to experts; lower it"
            )
        if self.bias in ("all", "feed_forward"):
            raise ValueError(f"experts have no biases, but bias is {self.bias}; set bias to none or qkv")

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward of block ``layer`` (0-based) is a mixture of experts.

        >>> config = DecoderConfig(moe=MoEConfig(n_experts=4, first_dense=1))
        >>> config.has_experts(0), config.has_experts(1)
        (False, True)
        """
        return self.moe.n_experts > 0 and layer >= self.moe.first_dense

    def is_windowed(self, layer: int) -> bool:
        """Whether block ``layer`` (0-based) sees only the nearest keys.

        >>> [DecoderConfig(window=8, full_every=2).is_windowed(layer) for layer in range(4)]
        [True, False, True, False]
        """
        return self.window is not None and (self.full_every == 0 or (layer + 1) % self.full_every != 0)
