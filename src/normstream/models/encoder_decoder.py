"""An encoder-decoder: two stacks of one placement, the decoder's blocks with cross-attention between their sublayers.

Shape suffixes: B batch, S source positions, T target positions, D width, V target vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from normstream import placements
from normstream.layers import Context, KVCache
from normstream.layers.learned_scale import LearnedScale
from normstream.layers.links import Links
from normstream.layers.masks import attention_mask
from normstream.layers.positions import add_positions
from normstream.models.config import TextConfig
from normstream.models.ids import check_ids
from normstream.models.model_config import SUBLAYERS
from normstream.models.roles import StartRole
from normstream.models.sublayers import block_sublayers
from normstream.models.text_context import text_context
from normstream.models.trunk import Trunk
from normstream.placements import Stack

DECODER_SUBLAYERS = ("attention", "cross_attention", "feed_forward")
"""Kinds of the sublayers of a decoder block, in order."""


@dataclass(frozen=True)
class EncoderDecoderConfig(TextConfig):
    """Dimensions and conventions of an encoder-decoder; ``n_layers`` counts the decoder's blocks.

    Positions, ``max_seq_len``, ``embedding_multiplier`` and everything about sublayers are the same for both stacks.

    Raises ValueError for dimensions that do not fit each other.

    >>> EncoderDecoderConfig(n_layers=6).resolved_encoder_layers
    6
    """

    sublayers: ClassVar[tuple[str, ...]] = DECODER_SUBLAYERS

    n_encoder_layers: int | None = None
    """Number of the encoder's blocks; None means n_layers, the number of the decoder's."""
    source_vocab_size: int | None = None
    """Number of source tokens; None means vocab_size, that of target tokens."""
    shared_embeddings: bool | None = None
    """Whether source and target tokens share one embedding matrix; None means yes if they are equally many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_counts("n_encoder_layers", "source_vocab_size")
        placements.get(self.placement).blocks(self.resolved_encoder_layers, SUBLAYERS)
        if self.shared_embeddings and self.resolved_source_vocab_size != self.vocab_size:
            raise ValueError(
                f"shared_embeddings needs one vocabulary, but there are {self.resolved_source_vocab_size} source and "
                f"{self.vocab_size} target tokens; leave source_vocab_size out, or set shared_embeddings to false"
            )

    @property
    def resolved_encoder_layers(self) -> int:
        """``n_encoder_layers``, or its default."""
        return self.n_layers if self.n_encoder_layers is None else self.n_encoder_layers

    @property
    def resolved_source_vocab_size(self) -> int:
        """``source_vocab_size``, or its default."""
        return self.vocab_size if self.source_vocab_size is None else self.source_vocab_size

    @property
    def shares_embeddings(self) -> bool:
        """``shared_embeddings``, or its default."""
        same = self.resolved_source_vocab_size == self.vocab_size
        return same if self.shared_embeddings is None else self.shared_embeddings


class EncoderDecoder(nn.Module):
    """Encoder-decoder with any placement, the same in both stacks.

        source -> embedding -> encoder.before_layers -> encoder.layers.0 -> ... -> memory
                                                                                     |  (cross-attention)
        target -> embedding -> decoder.before_layers -> decoder.layers.0 -> ... -----+-> lm_head -> logits

    The memory is the encoder's final hidden vector, read by the placement's last junction. Padded source positions
    start as zero vectors and no position sees them; where a source is nothing but padding, all of it is seen, which
    keeps it finite. Target padding needs no mask where it follows the tokens: nobody looks ahead.

    The embedding is ``tok_embeddings`` if both stacks share it, else ``encoder_tok_embeddings`` and
    ``decoder_tok_embeddings``; a tied head shares the decoder's. The parameters' values are torch's defaults until
    ``normstream.initialize(model, seed)`` sets them.

    Raises ValueError for a token id outside its vocabulary, a sequence longer than ``max_seq_len``, and shapes that do
    not fit each other.

    Source: Vaswani et al. 2017, arXiv 1706.03762.

    >>> model = EncoderDecoder(EncoderDecoderConfig(placement="post", vocab_size=10, dim=8, n_layers=2, n_heads=2))
    >>> source, target = torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 3, dtype=torch.int64)
    >>> model(source, target).shape
    torch.Size([1, 3, 10])
    """

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.config, self.placement = config, placements.get(config.placement)
        depths = config.resolved_encoder_layers, config.n_layers
        self.encoder = Trunk(
            config,
            lambda layer: block_sublayers(config, layer),
            n_layers=config.resolved_encoder_layers,
            stack=Stack("encoder", *depths),
        )
        self.decoder = Trunk(
            config,
            lambda layer: block_sublayers(config, layer, DECODER_SUBLAYERS),
            kinds=DECODER_SUBLAYERS,
            stack=Stack("decoder", *depths),
        )
        shared, learned = config.shares_embeddings, config.positions.kind == "learned"
        sizes = config.resolved_source_vocab_size, config.vocab_size
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim) if shared else None
        self.encoder_tok_embeddings = None if shared else nn.Embedding(sizes[0], config.dim)
        self.decoder_tok_embeddings = None if shared else nn.Embedding(sizes[1], config.dim)
        self.encoder_pos_embeddings = nn.Embedding(config.max_seq_len, config.dim) if learned else None
        self.decoder_pos_embeddings = nn.Embedding(config.max_seq_len, config.dim) if learned else None
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=config.head_bias)
        self.logit_scale = (
            LearnedScale(config.vocab_size, unit=math.sqrt(config.dim)) if self.placement.logit_scale else None
        )
        self.tie()

    def tie(self) -> None:
        """Makes the head share the decoder's embedding if the configuration says so; to repeat after ``to_empty``."""
        if self.config.tied:
            self.lm_head.weight = self._table(self.decoder_tok_embeddings).weight

    def start_roles(self) -> dict[nn.Module | None, StartRole]:
        """What the matrices outside the blocks are for, see ``normstream.init``."""
        return {
            self.tok_embeddings: "vocabulary",
            self.encoder_tok_embeddings: "vocabulary",
            self.decoder_tok_embeddings: "vocabulary",
            self.encoder_pos_embeddings: "positions",
            self.decoder_pos_embeddings: "positions",
            self.lm_head: "vocabulary",
        }

    def encode(
        self, source_BS: Int[Tensor, "B S"], padding_BS: Bool[Tensor, "B S"] | None = None
    ) -> Float[Tensor, "B S D"]:
        """The memory: the encoder's final hidden vectors.

        Args:
            source_BS: token ids.
            padding_BS: True at padding, which no position sees; None: there is none.
        """
        return self._encode(source_BS, padding_BS)[0]

    def decode(
        self,
        target_BT: Int[Tensor, "B T"],
        memory_BSD: Float[Tensor, "B S D"],
        padding_BS: Bool[Tensor, "B S"] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits of the token after each target position.

        Args:
            target_BT: token ids; with a cache only those that it has not seen.
            memory_BSD: what ``encode`` returned; with a cache that has seen a position, its keys and values are kept.
            padding_BS: the source's.
            cache: keys and values of the positions before these, appended to in place.
        """
        return self.logits(self._decode(target_BT, memory_BSD, padding_BS, cache)[0])

    def forward(
        self,
        source_BS: Int[Tensor, "B S"],
        target_BT: Int[Tensor, "B T"],
        padding_BS: Bool[Tensor, "B S"] | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits of the token after each target position; arguments as for ``encode`` and ``decode``."""
        return self.logits(self.hidden(source_BS, target_BT, padding_BS))

    def hidden(
        self,
        source_BS: Int[Tensor, "B S"],
        target_BT: Int[Tensor, "B T"],
        padding_BS: Bool[Tensor, "B S"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """The decoder's final hidden vectors, what ``lm_head`` reads."""
        return self.hidden_and_aux(source_BS, target_BT, padding_BS)[0]

    def hidden_and_aux(
        self,
        source_BS: Int[Tensor, "B S"],
        target_BT: Int[Tensor, "B T"],
        padding_BS: Bool[Tensor, "B S"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], tuple[Any, ...]]:
        """The decoder's final hidden vectors, and what the sublayers of both stacks report, the encoder's first."""
        memory_BSD, encoder_aux = self._encode(source_BS, padding_BS)
        hidden_BTD, decoder_aux = self._decode(target_BT, memory_BSD, padding_BS, None)
        return hidden_BTD, encoder_aux + decoder_aux

    def logits(self, hidden_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """The logits of final hidden vectors."""
        logits_BTV = self.lm_head(hidden_BTD)
        return logits_BTV if self.logit_scale is None else self.logit_scale(logits_BTV)

    def _encode(self, source_BS: Tensor, padding_BS: Tensor | None) -> tuple[Tensor, tuple[Any, ...]]:
        name = "vocab_size" if self.config.source_vocab_size is None else "source_vocab_size"
        check_ids("token ids", source_BS, self.config.resolved_source_vocab_size, name)
        self._check_length("source", source_BS.shape[1])
        _check_padding(padding_BS, source_BS.shape)
        positions_1S = torch.arange(source_BS.shape[1], device=source_BS.device)[None]
        embedding_BSD = self._embed(source_BS, positions_1S, self.encoder_tok_embeddings, self.encoder_pos_embeddings)
        if padding_BS is not None:
            embedding_BSD = embedding_BSD.masked_fill(padding_BS[..., None], 0.0)
        context = self._context(positions_1S, self.encoder, mask=_memory_mask(padding_BS), causal=False)
        return self.encoder.run(embedding_BSD, lambda layer: context)

    def _decode(
        self, target_BT: Tensor, memory_BSD: Tensor, padding_BS: Tensor | None, cache: KVCache | None
    ) -> tuple[Tensor, tuple[Any, ...]]:
        n_cached = 0 if cache is None else cache.length
        n_queries, n_keys = target_BT.shape[1], n_cached + target_BT.shape[1]
        check_ids("token ids", target_BT, self.config.vocab_size, "vocab_size")
        self._check_length("target", n_keys)
        _check_memory(memory_BSD, (target_BT.shape[0], self.config.dim))
        _check_padding(padding_BS, memory_BSD.shape[:2])
        positions_1T = torch.arange(n_cached, n_keys, device=target_BT.device)[None]
        embedding_BTD = self._embed(target_BT, positions_1T, self.decoder_tok_embeddings, self.decoder_pos_embeddings)
        mask = attention_mask(None, n_queries, n_keys, target_BT.device)
        context = self._context(positions_1T, self.decoder, mask=mask, causal=True)._replace(
            cache=cache, memory=memory_BSD, memory_mask=_memory_mask(padding_BS)
        )
        return self.decoder.run(embedding_BTD, lambda layer: context)

    def _embed(
        self, tokens_BT: Tensor, positions_1T: Tensor, table: nn.Embedding | None, pos_table: nn.Embedding | None
    ) -> Tensor:
        config, embedding = self.config, self._table(table)(tokens_BT)
        embedding = embedding * embedding.new_full((), config.embedding_multiplier)
        return add_positions(embedding, positions_1T, config.positions, pos_table)

    def _table(self, own: nn.Embedding | None) -> nn.Embedding:
        """The embedding of a stack: its own, or the one that both share."""
        table = self.tok_embeddings if own is None else own
        assert table is not None  # one of the two is always there
        return table

    def _context(self, positions_1T: Tensor, trunk: Trunk, *, mask: Tensor | None, causal: bool) -> Context:
        """What the sublayers of a stack share; its queries are the last of as many keys as the last position says."""
        n_keys = positions_1T.shape[1] if mask is None else mask.shape[-1]
        links = Links(self.config.depth_stride or max(1, len(trunk.layers) // 2))
        return text_context(
            self.config, positions_1T, mask, n_keys, self.lm_head.weight.dtype, causal=causal, links=links
        )

    def _check_length(self, what: str, length: int) -> None:
        if length < 1:
            raise ValueError(f"the {what} is empty; give at least one token")
        if length > self.config.max_seq_len:
            raise ValueError(
                f"{what} of {length} tokens, but max_seq_len is {self.config.max_seq_len}; shorten it or raise that"
            )


def _memory_mask(padding_BS: Tensor | None) -> Tensor | None:
    """True where a key may be seen, (B, 1, 1, S); of a row that is all padding, everything."""
    if padding_BS is None:
        return None
    return (~padding_BS | padding_BS.all(-1, keepdim=True))[:, None, None]


def _check_padding(padding_BS: Tensor | None, shape: tuple[int, ...]) -> None:
    if padding_BS is not None and padding_BS.shape != shape:
        raise ValueError(
            f"padding_BS must be of the source's shape {tuple(shape)}, True at padding, got {tuple(padding_BS.shape)}"
        )


def _check_memory(memory_BSD: Tensor, expected: tuple[int, int]) -> None:
    if (memory_BSD.shape[0], memory_BSD.shape[-1]) != expected:
        raise ValueError(
            f"memory must be (batch, source positions, dim) with batch and dim {expected}, got "
            f"{tuple(memory_BSD.shape)}; source and target need one batch size"
        )
