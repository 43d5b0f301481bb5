"""Placements that norm the update before it is added: Sandwich-LN and its descendants, OLMo 2, Swin Transformer v2."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import nn

from normstream.junctions import Join, OutputNormJoin, PostNormRead, Read, ResidualScaleJoin
from normstream.layers.inner import NOTHING_INNER, Inner
from normstream.placements.placement import Build, InitScheme, Slot
from normstream.placements.registry import register
from normstream.placements.single_stream import SingleStream


@dataclass(frozen=True)
class InputOutputNorm(SingleStream):
    """The junction of Sandwich-LN, Peri-LN, Gemma and GLM-4: a norm on either side of every sublayer.

        x ---+---------------------------- + ---> x
             |                             ^
             +-> N_in -> F -> N_out -------+

    >>> from normstream import placements
    >>> row = placements.get("gemma2").junctions(dim=2, n_layers=1)
    >>> [name for name, _ in row[1].named_children()], row[1].join.__class__.__name__
    (['join', 'read'], 'OutputNormJoin')
    """

    equation: ClassVar[str] = "x <- x + N_out(o);  z = N_in(x);  final: N(x)"

    def join(self, slot: Slot, build: Build) -> Join:
        return OutputNormJoin(build.norm(), build.drop(slot))


@register
@dataclass(frozen=True)
class SandwichLN(InputOutputNorm):
    """Sandwich-LN of CogView, optionally with its PB-Relax LayerNorm ("precision bottleneck relaxation").

        x ---+---------------------------- + ---> x
             |                             ^
             +-> N_in -> F -> N_out -------+

    ``pb_relax`` divides what a norm reads by its largest entry first, of each token (the paper) or of the whole
    tensor (the code; the output then depends on the rest of the batch). PB-Relax attention subtracts the row's maximum
    before the softmax, which leaves the softmax as it is and which every softmax of torch does already.

    >>> SandwichLN().junctions(dim=2, n_layers=1)[1].join.norm_out
    RMSNorm(2, eps=1e-05, gain=plain, bias=False, cast=after_gain)
    """

    name: ClassVar[str] = "sandwich"
    title: ClassVar[str] = "Sandwich-LN (CogView)"
    paper: ClassVar[str] = "Ding et al. 2021, arXiv 2105.13290"
    code: ClassVar[str] = "THUDM/CogView:mpu/sparse_transformer.py"
    differs: ClassVar[str] = (
        "paper: PB-Relax LayerNorm by each token's maximum, PB-Relax attention with alpha = 32; code: by an eighth of "
        "the whole tensor's maximum (pb_relax=tensor), attention not relaxed, and dropout before N_out (here after "
        "it). PB-Relax attention equals the plain softmax in exact arithmetic; torch's attention subtracts the row's "
        "maximum in float32, so ours has no switch for it, and gives no guard for fp16 products of q and k"
    )
    init: ClassVar[InitScheme] = "gpt2"

    pb_relax: Literal["none", "token", "tensor"] = "none"
    """Divide the input of every norm by its largest entry: none, each token's, or the whole tensor's."""
    residual_scale: bool = False
    """Whether every residual has a learned factor for each channel, lambda * x + N_out(o) (x-transformers)."""

    def first(self, build: Build) -> nn.Module:
        return super().first(self._relaxed(build))

    def read(self, slot: Slot, build: Build) -> Read:
        return super().read(slot, self._relaxed(build))

    def join(self, slot: Slot, build: Build) -> Join:
        build = self._relaxed(build)
        if self.residual_scale:
            return ResidualScaleJoin(build.dim, build.drop(slot), build.norm())
        return super().join(slot, build)

    def last_read(self, build: Build) -> Read:
        return super().last_read(self._relaxed(build))

    def _relaxed(self, build: Build) -> Build:
        if self.pb_relax == "none":
            return build
        changes: dict[str, Any] = {"kind": "pb_relax", "scope": self.pb_relax}
        inputs = build.input_norm_config
        return replace(
            build,
            norm_config=replace(build.norm_config, **changes),
            input_norm_config=None if inputs is None else replace(inputs, **changes),
        )


@register
@dataclass(frozen=True)
class PeriLN(InputOutputNorm):
    """Peri-LN: norms on both sides of every sublayer, on the embedding and at the end.

        e -> N -> x ---+---------------------------- + ---> x
                       |                             ^
                       +-> N_in -> F -> N_out -------+

    >>> PeriLN().junctions(dim=2, n_layers=1)[0].join.norm
    RMSNorm(2, eps=1e-05, gain=plain, bias=False, cast=after_gain)
    """

    name: ClassVar[str] = "peri"
    title: ClassVar[str] = "Peri-LN"
    equation: ClassVar[str] = "x_0 = N(e);  x <- x + N_out(o);  z = N_in(x);  final: N(x)"
    paper: ClassVar[str] = "Kim et al. 2025, arXiv 2502.02732"
    code: ClassVar[str] = "allenai/OLMo-core:src/olmo_core/nn/transformer/block.py"
    differs: ClassVar[str] = (
        "the authors released no code; OLMo-core's PeriNormTransformerBlock leaves the embedding norm to the model, "
        "peri(embedding_norm=false)"
    )

    embedding_norm: bool = True


@register
@dataclass(frozen=True)
class Gemma2(InputOutputNorm):
    """Gemma 2: norms on both sides of every sublayer.

        x ---+---------------------------- + ---> x
             |                             ^
             +-> N_in -> F -> N_out -------+

    Not part of the placement: gains stored as 1 + w, the embedding times sqrt(D), soft caps on scores and logits.

    >>> len(Gemma2().junctions(dim=2, n_layers=3))
    7
    """

    name: ClassVar[str] = "gemma2"
    title: ClassVar[str] = "Gemma 2"
    paper: ClassVar[str] = "Gemma Team 2024, arXiv 2408.00118"
    code: ClassVar[str] = "google/gemma_pytorch:gemma/model.py"
    differs: ClassVar[str] = (
        "the code's flags use_pre_ffw_norm and use_post_ffw_norm could leave out the feed-forward's norms; both are on"
    )


@register
@dataclass(frozen=True)
class Gemma3(InputOutputNorm):
    """Gemma 3: Gemma 2's norms, and norms on each head's queries and keys instead of soft caps.

        x ---+-------------------------------------------- + ---> x
             |                                             ^
             +-> N_in -> F (norms on Q and K) -> N_out ----+

    >>> Gemma3().inner.qk
    'model'
    """

    name: ClassVar[str] = "gemma3"
    title: ClassVar[str] = "Gemma 3"
    equation: ClassVar[str] = "x <- x + N_out(o);  z = N_in(x);  norms on Q and K;  final: N(x)"
    paper: ClassVar[str] = "Gemma Team 2025, arXiv 2503.19786"
    code: ClassVar[str] = "google/gemma_pytorch:gemma/model.py"
    differs: ClassVar[str] = "the norms on queries and keys act before the rotation, one gain for all heads"
    inner: ClassVar[Inner] = replace(NOTHING_INNER, qk="model")


@register
@dataclass(frozen=True)
class GLM4(InputOutputNorm):
    """GLM-4 (0414): norms on both sides of every sublayer.

        x ---+---------------------------- + ---> x
             |                             ^
             +-> N_in -> F -> N_out -------+

    >>> GLM4().title
    'GLM-4'
    """

    name: ClassVar[str] = "glm4"
    title: ClassVar[str] = "GLM-4"
    paper: ClassVar[str] = "GLM-4-0414, model card 2025"
    code: ClassVar[str] = "huggingface/transformers:src/transformers/models/glm4/modeling_glm4.py"
    differs: ClassVar[str] = (
        "the code's names mislead: post_attention_layernorm is the feed-forward's N_in, post_self_attn_layernorm "
        "attention's N_out"
    )


@dataclass(frozen=True)
class OutputNorm(SingleStream):
    """The junction of OLMo 2 and Swin Transformer v2: sublayers read the raw stream, updates are normed.

        x ---+------------------- + ---> x
             |                    ^
             +-> F -> N_out ------+

    >>> OutputNorm().junctions(dim=2, n_layers=1)[0].read
    PostNormRead()
    """

    equation: ClassVar[str] = "x <- x + N_out(o);  z = x;  final: N(x)"

    def read(self, slot: Slot, build: Build) -> Read:
        return PostNormRead()

    def join(self, slot: Slot, build: Build) -> Join:
        return OutputNormJoin(build.norm(), build.drop(slot))


@register
@dataclass(frozen=True)
class OLMo2(OutputNorm):
    """OLMo 2's reordered norm: norms on the updates and on all heads' queries and keys, none before a sublayer.

        x ---+------------------------------------ + ---> x
             |                                     ^
             +-> F (norms on Q and K) -> N_out ----+

    >>> OLMo2().inner.qk_statistics
    'all_heads'
    """

    name: ClassVar[str] = "olmo2"
    title: ClassVar[str] = "OLMo 2 (reordered norm)"
    equation: ClassVar[str] = "x <- x + N_out(o);  z = x;  norms on Q and K over all heads;  final: N(x)"
    paper: ClassVar[str] = "OLMo Team 2025, arXiv 2501.00656"
    code: ClassVar[str] = "allenai/OLMo-core:src/olmo_core/nn/transformer/block.py"
    differs: ClassVar[str] = (
        "paper and code agree (ReorderedNormTransformerBlock); both start at N(0, 0.02), the code cut at three "
        "standard deviations"
    )
    inner: ClassVar[Inner] = replace(NOTHING_INNER, qk="model", qk_statistics="all_heads", qk_gain="per_head")


@register
@dataclass(frozen=True)
class SwinV2(OutputNorm):
    """Swin Transformer v2's res-post-norm: normed updates whose gains start at 0, so that a block starts as x -> x.

        e -> N -> x ---+------------------- + ---> x      (every k-th block ends with one more norm of x)
                       |                    ^
                       +-> F -> N_out ------+

    >>> row = SwinV2(extra_norm_every=2).junctions(dim=2, n_layers=2)
    >>> [junction.join.norm is not None for junction in row[1:]]
    [False, False, False, True]
    """

    name: ClassVar[str] = "swin_v2"
    title: ClassVar[str] = "Swin Transformer v2 (res-post-norm)"
    equation: ClassVar[str] = (
        "x_0 = N(e);  x <- x + N_out(o), N_out starting at gain 0;  z = x;  cosine attention;  final: N(x)"
    )
    paper: ClassVar[str] = "Liu et al. 2022, arXiv 2111.09883"
    code: ClassVar[str] = "microsoft/Swin-Transformer:models/swin_transformer_v2.py"
    differs: ClassVar[str] = (
        "paper: the largest models norm the stream every 6 blocks, swin_v2(extra_norm_every=6); the released file does "
        "not, huggingface/pytorch-image-models:timm/models/swin_transformer_v2_cr.py does. Cosine attention: the code "
        "learns the logarithm of one scale a head, starting at 10 and at most 100; here one number a head for queries "
        "and one for keys, the scores starting at sqrt(head_dim) times the cosine, without a limit. No windows and no "
        "continuous position bias"
    )
    inner: ClassVar[Inner] = replace(NOTHING_INNER, qk="l2", qk_gain="number_per_head")

    embedding_norm: bool = True
    extra_norm_every: int = 0
    """The stream is normed at the end of every so many blocks; 0 never."""

    def __post_init__(self) -> None:
        if self.extra_norm_every < 0:
            raise ValueError(f"swin_v2(extra_norm_every=...) must be 0 or more, got {self.extra_norm_every}")

    def join(self, slot: Slot, build: Build) -> Join:
        norm = build.norm() if self._ends_with_norm(slot) else None
        return OutputNormJoin(build.norm(gain_init=0.0), build.drop(slot), norm)

    def _ends_with_norm(self, slot: Slot) -> bool:
        return self.extra_norm_every > 0 and slot.ends_block and (slot.layer + 1) % self.extra_norm_every == 0
