"""The configurations of encoders: with a head that predicts tokens, and with one that predicts a class."""

from dataclasses import dataclass, replace
from typing import Literal

from normstream.layers import PositionConfig
from normstream.models.config import TextConfig
from normstream.names import check_choice
from normstream.norms import NormConfig

HeadKind = Literal["linear", "bert"]
Pooling = Literal["first", "mean"]


@dataclass(frozen=True)
class EncoderConfig(TextConfig):
    """Dimensions and conventions of an encoder that predicts masked tokens; every position sees all others.

    The defaults are those of every text model here (rotary positions, SwiGLU, RMSNorm); ``bert_config`` has BERT's.

    Raises ValueError for dimensions that do not fit each other.

    >>> EncoderConfig(dim=64, n_heads=4).head
    'linear'
    """

    n_types: int = 0
    """Number of token types (BERT: 2, for the first and the second text), each with an embedding; 0 means none."""
    head: HeadKind = "linear"
    """linear, or bert: a square matrix with bias, the activation's function and a norm before the output matrix."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("head", self.head, HeadKind)
        if self.n_types < 0:
            raise ValueError(f"n_types must be at least 0, got {self.n_types}")


@dataclass(frozen=True)
class ClassifierConfig(EncoderConfig):
    """Dimensions and conventions of an encoder that predicts the class of a text or of a pair of texts.

    Raises ValueError for dimensions that do not fit each other, and for options of a head that predicts tokens.

    >>> ClassifierConfig(n_classes=3).pooling
    'mean'
    """

    n_classes: int = 2
    """Number of classes; training sets it from the data."""
    pooling: Pooling = "mean"
    """Which final hidden vectors make the one that is classified: mean, of all that are not padding, or first, that of
    the first position (BERT)."""
    pooler: bool = False
    """Whether a square matrix with bias and tanh come between pooling and the head (BERT)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("pooling", self.pooling, Pooling)
        self.check_counts("n_classes")
        for name, default in (("tied", False), ("head", "linear")):
            if getattr(self, name) != default:
                raise ValueError(
                    f"{name} is for a head that predicts tokens, but a classifier has none; "
                    f"leave it at {str(default).lower()}, got {str(getattr(self, name)).lower()}"
                )


def bert_config(**changes: object) -> EncoderConfig:
    """BERT's conventions at the size of BERT-base, with any fields changed.

    Post-Norm with a normed embedding, LayerNorm with eps 1e-12, biases, GELU, learned positions, two token types, and a
    tied head with a transform. Source: Devlin et al. 2018, arXiv 1810.04805; google-research/bert:modeling.py.

    >>> config = bert_config(dim=128, n_layers=2, n_heads=2)
    >>> config.resolved_ffn_dim, config.placement
    (512, 'post(embedding_norm=true)')
    """
    base = EncoderConfig(
        placement="post(embedding_norm=true)",
        dim=768,
        n_layers=12,
        n_heads=12,
        activation="gelu",
        bias="all",
        norm=NormConfig(kind="layer", eps=1e-12, bias=True),
        init_std=0.02,
        vocab_size=30_522,
        max_seq_len=512,
        positions=PositionConfig(kind="learned"),
        tied=True,
        head_bias=True,
        n_types=2,
        head="bert",
    )
    return replace(base, **changes)  # pyright: ignore[reportArgumentType]
