"""What a placement is: for every sublayer a read and a join, plus how the streams start and how the last is read."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from torch import nn

from normstream.junctions import Drop, Join, Junction, Read
from normstream.layers.inner import NOTHING_INNER, Inner
from normstream.norms import NormConfig

InitScheme = Literal[
    "plain", "xavier", "gpt2", "mitchell", "megatron_full", "deepnorm", "deepnorm_code", "sub_ln", "sub_ln_code", "ngpt"
]


@dataclass(frozen=True)
class Stack:
    """Which stack of a model a row of junctions belongs to: DeepNorm's and Sub-LN's constants depend on it.

    >>> Stack()
    Stack(role='only', n_encoder_layers=0, n_decoder_layers=0)
    """

    role: Literal["only", "encoder", "decoder"] = "only"
    """only: an encoder or a decoder by itself."""
    n_encoder_layers: int = 0
    """Blocks of the encoder, where there are two stacks."""
    n_decoder_layers: int = 0
    """Blocks of the decoder, where there are two stacks."""


@dataclass(frozen=True)
class Slot:
    """Where one sublayer stands in the row.

    >>> row = Slot.row([("attention", "feed_forward")] * 2)
    >>> [slot.index for slot in row if slot.kind == "attention"]
    [0, 2]
    """

    kind: str
    """attention, feed_forward, cross_attention, or parallel for a block whose sublayers run side by side."""
    layer: int
    """0-based block."""
    index: int
    """0-based sublayer, counted through all blocks."""
    n_layers: int
    """Number of blocks."""
    n_sublayers: int
    """Number of sublayers in all blocks."""
    following: str | None
    """Kind of the next sublayer, None after the last one."""
    ends_block: bool
    """Whether it is the last sublayer of its block."""

    @staticmethod
    def row(blocks: Sequence[Sequence[str]]) -> list["Slot"]:
        """The slots of a row of blocks, each given by the kinds of its sublayers."""
        kinds = [(layer, kind) for layer, block in enumerate(blocks) for kind in block]
        following = [*kinds[1:], (None, None)]
        return [
            Slot(
                kind=kind,
                layer=layer,
                index=index,
                n_layers=len(blocks),
                n_sublayers=len(kinds),
                following=next_kind,
                ends_block=next_layer != layer,
            )
            for index, ((layer, kind), (next_layer, next_kind)) in enumerate(zip(kinds, following, strict=True))
        ]


@dataclass(frozen=True)
class Build:
    """What a placement builds its junctions with: the width, the norm and the dropout of the model.

    >>> Build(dim=8, norm_config=NormConfig()).norm()
    RMSNorm(8, eps=1e-05, gain=plain, bias=False, cast=after_gain)
    """

    dim: int
    """Width of the residual streams."""
    norm_config: NormConfig
    """Conventions of every norm on a stream."""
    dropout: float = 0.0
    """Dropout of every update."""
    drop_path: float = 0.0
    """Drop-path of the last block's updates; it grows linearly from 0 in the first block."""
    stack: Stack = Stack()
    """Which stack of the model this is."""
    input_norm_config: NormConfig | None = None
    """Conventions of the norms that feed a sublayer directly; None means ``norm_config`` (DiT's have no gain)."""

    def norm(self, **changes: Any) -> nn.Module:
        """A new norm of a stream; ``changes`` replace fields of its configuration."""
        return replace(self.norm_config, **changes).build(self.dim)

    def input_norm(self, **changes: Any) -> nn.Module:
        """A new norm whose output is a sublayer's input or the final hidden vector."""
        return replace(self.input_norm_config or self.norm_config, **changes).build(self.dim)

    def drop(self, slot: Slot) -> Drop:
        """Dropout and drop-path for the update of one sublayer."""
        return Drop(self.dropout, self.drop_path * slot.layer / max(1, slot.n_layers - 1))


@dataclass(frozen=True)
class Placement:
    """A named recipe. A subclass's fields are its options; its class variables say what it is and where it is from.

    Subclasses give the four parts below, each a junction half of ``normstream.junctions``, and are made known by
    ``@register``. ``junctions`` pairs the halves into the row that a model needs.
    """

    name: ClassVar[str]
    """Name in configurations."""
    title: ClassVar[str]
    """Name in the literature."""
    streams: ClassVar[tuple[str, ...]]
    """Names of the residual streams, in the order of the state."""
    equation: ClassVar[str]
    """The junction's equations, o being the update."""
    paper: ClassVar[str]
    """Where it was published."""
    code: ClassVar[str]
    """Official code as repository:path, or where there is none, whose code comes nearest."""
    differs: ClassVar[str] = ""
    """Where paper and code disagree, and which of them the defaults follow."""
    inner: ClassVar[Inner] = NOTHING_INNER
    """Norms, scales and links inside the sublayers that belong to the recipe."""
    init: ClassVar[InitScheme] = "plain"
    """Initialization that belongs to the recipe."""
    parallel: ClassVar[bool] = False
    """Whether a block's sublayers read one z side by side and add one summed update."""
    logit_scale: ClassVar[bool] = False
    """Whether each token's logit has a learned factor (nGPT)."""
    branch_norms: ClassVar[bool] = False
    """In a parallel block: whether each branch norms z with a norm of its own (GPT-NeoX)."""

    def at(self, layer: int) -> "Placement":
        """The placement that governs block ``layer`` (0-based): itself, unless placements change with depth."""
        return self

    @property
    def cross_inner(self) -> Inner:
        """What belongs inside cross-attention: the norms on queries, keys and values, and the link of scores.

        Sub-LN's and NormFormer's authors leave it without the norm of the merged heads and without factors of heads.
        """
        return replace(self.inner, context="none", head_scale="none")

    def after_step(self, model: nn.Module) -> None:
        """What the recipe does to the parameters after each optimizer step: as a rule nothing."""

    def blocks(self, n_layers: int, sublayers: Sequence[str]) -> list[tuple[str, ...]]:
        """The kinds of the sublayers of each block.

        >>> from normstream import placements
        >>> placements.get("pre").blocks(1, ("attention", "feed_forward"))
        [('attention', 'feed_forward')]
        """
        return [("parallel",) if self.at(layer).parallel else tuple(sublayers) for layer in range(n_layers)]

    def first(self, build: Build) -> nn.Module:
        """The join of the first junction: embedding to state."""
        raise NotImplementedError

    def read(self, slot: Slot, build: Build) -> Read:
        """How the sublayer at ``slot`` reads its input."""
        raise NotImplementedError

    def join(self, slot: Slot, build: Build) -> Join:
        """How the update of the sublayer at ``slot`` is added."""
        raise NotImplementedError

    def last_read(self, build: Build) -> Read:
        """How the final hidden vector is read after the last sublayer."""
        raise NotImplementedError

    def junctions(
        self,
        dim: int,
        n_layers: int,
        *,
        sublayers: Sequence[str] = ("attention", "feed_forward"),
        norm: NormConfig | None = None,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        stack: Stack = Stack(),
        input_norm: NormConfig | None = None,
    ) -> list[Junction]:
        """The row of junctions before, between and after the sublayers: one more than there are sublayers.

        Args:
            dim: width of the streams.
            n_layers: number of blocks.
            sublayers: kinds of the sublayers of one block, in order.
            norm: conventions of the norms; RMSNorm with eps 1e-5 if None.
            dropout: dropout of every update.
            drop_path: drop-path rate of the last block's updates, growing linearly from 0.
            stack: which stack of the model this is.
            input_norm: conventions of the norms that feed a sublayer directly; ``norm`` if None.

        >>> from normstream import placements
        >>> len(placements.get("pre").junctions(dim=8, n_layers=3))
        7
        """
        if n_layers < 1:
            raise ValueError(f"n_layers must be at least 1, got {n_layers}")
        build = Build(dim, norm or NormConfig(), dropout, drop_path, stack, input_norm)
        slots = Slot.row(self.blocks(n_layers, sublayers))
        joins = [self.first(build), *(self.join(slot, build) for slot in slots)]
        reads = [*(self.read(slot, build) for slot in slots), self.last_read(build)]
        return [Junction(join, read) for join, read in zip(joins, reads, strict=True)]

    def __str__(self) -> str:
        """The name with every option that is not at its default, as ``placements.get`` reads it."""
        options = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return self.name + (f"({','.join(f'{k}={_text(v)}' for k, v in options)})" if options else "")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
