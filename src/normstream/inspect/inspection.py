"""Everything that ``normstream inspect`` found, as plain data: the terminal, the JSON file and the report show this."""

from dataclasses import dataclass, field
from typing import Literal

from normstream.inspect.anatomy import Anatomy
from normstream.inspect.report.wiring import Wiring


@dataclass(frozen=True)
class ModelFacts:
    """Which model was looked at, and how."""

    source: str
    weights: Literal["checkpoint", "drawn"]
    parameters: int
    n_layers: int
    dim: int
    dtype: str
    attention: str
    tokens: int
    text: str | None
    """The text that was given, or None for random tokens."""
    seconds: float
    is_tied: bool | None = None
    """Whether the head shares the token embedding; None without a head."""


@dataclass(frozen=True)
class SublayerRow:
    """One stream around one sublayer: ``before`` is what the sublayer reads, ``after`` the sum with its update."""

    stack: str
    stream: str
    name: str
    layer: int
    kind: str
    rms: float
    """Root mean square of the stream after the sublayer, over tokens and channels."""
    update_rms: float
    max_abs: float
    """Largest absolute value of the stream after the sublayer."""
    update_max_abs: float
    headroom_fp16: float
    """65,504 / max_abs: below 1 the stream overflows."""
    lost_in_bf16: float
    """Share of the update's entries below half an ulp of the stream's in bfloat16: adding them changes nothing."""
    cosine: float
    """Mean over tokens of the cosine of the update and the stream before."""
    angular_distance: float
    """Mean over tokens of arccos(cosine(before, after)) / pi: the influence of the sublayer."""


@dataclass(frozen=True)
class IdentityRow:
    """Relative error of layer_out - skip layer_in - sum of updates: norm of that over norm of the updates' sum."""

    stack: str
    stream: str
    layer: int
    naive: float
    """With the outputs of the modules (attention, feed-forward)."""
    true: float
    """With what is really added."""


@dataclass(frozen=True)
class Growth:
    """A law fitted to the stream's RMS by layer: constant c, linear a + b l, exponential a exp(b l)."""

    stack: str
    stream: str
    law: Literal["constant", "linear", "exponential"]
    coefficients: tuple[float, ...]
    errors: dict[str, float]
    """Relative root-mean-square error of each fit; taken is the simplest law within a tenth of the best, or 1 %."""
    sizes: tuple[float, ...] = ()
    """The RMS that was fitted: of the first layer's input, then of every layer's output."""


@dataclass(frozen=True)
class MassiveActivation:
    """An entry of the stream far above its layer's median magnitude (Sun et al. 2024: > 100 and > 1000 x it)."""

    stack: str
    stream: str
    layer: int
    token: int
    text: str | None
    channel: int
    value: float
    ratio: float
    """|value| over the median |h| of the layer."""


@dataclass(frozen=True)
class LayerRow:
    """A layer as a whole. Losses are in nats a token; None where the model has no head or no such measure.

    With several streams everything is joint, of all streams together, except for what is said to be by stream.
    """

    stack: str
    layer: int
    influence: float
    """Angular distance of the stream before and after the layer, mean over tokens, 0 to 1; joint: the mean of the
    streams' own."""
    gradient_norm: float | None
    """Norm of the loss's gradient for the layer's parameters."""
    stream_gradient_norm: float | None
    """Norm of the loss's gradient for the layer's input; joint: for the state of all streams."""
    jacobian_distance: float | None
    """|| d layer_out / d layer_in - skip I ||_F / sqrt(n), n entries at all positions, estimated with random probes;
    joint: of all streams' entries."""
    loss_increase: float | None
    """Loss without the layer minus loss with it; joint: all streams pass as they came."""
    influence_by_stream: dict[str, float] = field(default_factory=dict)
    """Angular distance of each stream before and after the layer."""
    stream_gradient_norms: dict[str, float] = field(default_factory=dict)
    """Norm of the loss's gradient for each stream that enters the layer; their squares add up to the joint one's."""


@dataclass(frozen=True)
class HeadRow:
    """Largest attention logit (after scaling, cap and mask) of each head of a mixer."""

    stack: str
    name: str
    layer: int
    maxima: tuple[float, ...]


@dataclass(frozen=True)
class LensRow:
    """The logit lens: the final norm and the head on the stream as it leaves a layer."""

    stack: str
    stream: str
    layer: int
    loss: float
    kl_to_final: float
    top1_agreement: float


@dataclass(frozen=True)
class DropRow:
    """Loss increase when one sublayer's update is not added."""

    stack: str
    name: str
    layer: int
    kind: str
    loss_increase: float


@dataclass(frozen=True)
class StreamRatio:
    """Two-stream models: RMS of the first stream over RMS of the second, leaving a layer."""

    stack: str
    layer: int
    ratio: float


@dataclass(frozen=True)
class Inspection:
    """A whole inspection. ``dataclasses.asdict`` gives the JSON file."""

    normstream: str
    model: ModelFacts
    anatomy: Anatomy | None
    """None for normstream's own models, whose placement is known."""
    placement: dict[str, str]
    """Placement of each stack, in the words of the documentation."""
    loss: float | None
    """Loss of the model on the tokens, in nats a token."""
    sublayers: tuple[SublayerRow, ...] = ()
    identity: tuple[IdentityRow, ...] = ()
    growth: tuple[Growth, ...] = ()
    massive: tuple[MassiveActivation, ...] = ()
    layers: tuple[LayerRow, ...] = ()
    heads: tuple[HeadRow, ...] = ()
    lens: tuple[LensRow, ...] = ()
    drops: tuple[DropRow, ...] = ()
    ratios: tuple[StreamRatio, ...] = ()
    wiring: tuple[Wiring, ...] = ()
    """What the wiring diagram shows, one for each stack."""
    notes: tuple[str, ...] = field(default=())
    """What could not be measured, and why."""
