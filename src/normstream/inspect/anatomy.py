"""What a probe finds out about a model's wiring: stacks of layers, their sublayers, and every norm's place.

Everything is named by *calls*: ``Call("layers.0.norm", 1)`` is the second time that ``layers.0.norm`` runs in one
forward pass. Layers that are shared or looped have several calls of the same modules.
"""

from dataclasses import dataclass, field
from typing import Literal

SublayerKind = Literal["mixer", "ffn", "cross", "other"]
"""Mixes tokens; works on each token alone; mixes tokens of another stack in; neither could be shown."""
Place = Literal[
    "pre",  # reads the stream, feeds one or more sublayers
    "output",  # norms a sublayer's output before it is added
    "trunk",  # stands on the stream: the stream goes on with its output (Post-Norm)
    "embedding",  # stands on the stream before the first sublayer
    "final",  # reads the stream after the last layer
    "head",  # behind the layers and a matrix: inside the head
    "q",
    "k",
    "v",
    "latent_q",  # norms a low-rank vector that queries are made of
    "latent_kv",
    "sub",  # inside a sublayer, before its output matrix (or inside the feed-forward)
    "context",  # norms what a cross-attention reads from the other stack
    "no_effect",  # inside a sublayer, nothing that comes out depends on it for these inputs
    "unknown",  # the probe could not tell; Anatomy.notes says why
]
Gain = Literal["plain", "one_plus_w", "none", "other"]
"""The output is multiplied by w, by 1 + w, has no gain, or follows its weights in another way."""


@dataclass(frozen=True, order=True)
class Call:
    """The ``index``-th time (from 0) that the module at ``path`` runs in one forward pass."""

    path: str
    index: int = 0

    def __str__(self) -> str:
        return self.path if self.index == 0 else f"{self.path} (call {self.index})"


@dataclass(frozen=True)
class NormFacts:
    """What a norm module computes, measured by calling it; the same wherever it stands."""

    path: str
    kind: Literal["rms", "layer"]
    gain: Gain
    has_bias: bool
    eps: float | None
    """Measured; None where it could not be."""
    cast: Literal["before_gain", "after_gain", "float32", "unknown"]
    """Whether the normed value is rounded to the input's dtype before or after the gain; float32: never rounded."""
    width: int
    """Number of features that share one statistic."""
    features: int
    """Size of the input's last axis: ``width < features`` means groups."""


@dataclass(frozen=True)
class NormSite:
    """One call of a norm, and its place."""

    call: Call
    place: Place
    feeds: tuple[SublayerKind, ...]
    """Kinds of the sublayers that its output reaches first (pre, q, k, ...) or that it is behind (output, trunk)."""
    sublayers: tuple[str, ...]
    """Names of those sublayers (``Sublayer.name``)."""
    layer: int | None
    """Index of its layer in the stack; None outside the layers."""
    scope: Literal["stream", "per_head", "flattened", "latent"]
    """Over the stream's width, over each head, over all heads together, over a latent vector."""
    facts: NormFacts


@dataclass(frozen=True)
class Sublayer:
    """One branch of a layer, from where it reads the stream to where its update is added."""

    name: str
    """``layers.3.mixer``; a second one of the same kind in a layer is ``layers.3.mixer_2``."""
    kind: SublayerKind
    layer: int
    output: Call
    """The module whose output naive tools take for what is added: the branch before its output norm."""
    update: Call
    """The module whose output, times ``multiplier``, is really added (the output norm, a dropout, or the branch)."""
    multiplier: float
    """Residual multiplier: gain from the update to the stream right after the add."""
    reads: tuple[Call, ...]
    """Calls that take the sublayer's input from the stream: its pre norms, or else the matrices on the raw stream."""
    pre_norm: Call | None
    output_norm: Call | None
    trunk_norm: Call | None
    """The norm on the stream right behind the add, before anything else reads the stream."""
    readers: tuple[Call, ...]
    """Matrix modules whose input is the sublayer's input (q, k, v; gate, up; router and experts)."""
    writers: tuple[Call, ...]
    """Matrix modules that end the branch (output projection; down projection, experts, shared expert)."""
    parallel_to: tuple[str, ...] = ()
    """Sublayers that read the stream before this one's update is added, although they do not come before it."""
    skip: float = 1.0
    """Gain of the stream itself across the addition: ``after = skip * before + multiplier * update``."""


@dataclass(frozen=True)
class LayerSite:
    """One call of a layer."""

    index: int
    call: Call
    skip: float
    """Gain from the layer's input to its output along the stream alone: 1, or a skip multiplier."""
    sublayers: tuple[Sublayer, ...]


@dataclass(frozen=True)
class StackAnatomy:
    """One residual stream with its layers: a decoder, an encoder."""

    name: str
    """``main`` if there is only one, else ``encoder`` and ``decoder``."""
    layers: tuple[LayerSite, ...]
    norms: tuple[NormSite, ...]
    embeddings: tuple[Call, ...]
    """Embedding modules (tokens, positions, types, patches) that the stream starts from."""
    embedding_multiplier: float
    """Gain from the token embedding to the first layer's input, before an embedding norm."""
    end_readers: tuple[Call, ...] = ()
    """Matrix modules that read the stream behind the last layer, or the final norm's output: the head, its first dense
    layer, a pooler, another stack's cross-attention."""

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        return tuple(sublayer for layer in self.layers for sublayer in layer.sublayers)

    @property
    def placement(self) -> str:
        """pre, post, sandwich, reordered, hybrid ..., in the words of the documentation; see ``placement_name``."""
        from normstream.inspect.probing.placement_name import placement_name

        return placement_name(self)

    @property
    def is_parallel(self) -> bool:
        """Whether sublayers of different kinds, attention and feed-forward, run in parallel."""
        kinds = {sublayer.name: sublayer.kind for sublayer in self.sublayers}
        return any(kinds[other] != sublayer.kind for sublayer in self.sublayers for other in sublayer.parallel_to)


@dataclass(frozen=True)
class Anatomy:
    """The wiring of a whole model."""

    stacks: tuple[StackAnatomy, ...]
    head: Call | None
    """The matrix that makes logits."""
    is_tied: bool
    """Whether the head shares the token embedding."""
    logit_multiplier: float | None
    """Factor on the head's output; None where there is no head, or a soft cap behind it."""
    functional_norms: int = 0
    """Normalising operations outside norm modules: blind spots."""
    notes: tuple[str, ...] = field(default=())
    """Assumptions that failed, in sentences; empty when everything could be shown."""

    @property
    def norms(self) -> tuple[NormSite, ...]:
        return tuple(norm for stack in self.stacks for norm in stack.norms)
