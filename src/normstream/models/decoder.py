"""A decoder language model: an embedding, a row of sublayers and junctions, a head. It knows no placement by name.

Shape suffixes: B batch, T sequence, D width, V vocabulary.
"""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from normstream.layers import Context, KVCache
from normstream.layers.learned_scale import LearnedScale
from normstream.layers.links import Links
from normstream.layers.masks import attention_mask
from normstream.layers.positions import add_positions
from normstream.layers.scores import soft_cap
from normstream.models.config import DecoderConfig
from normstream.models.ids import check_ids
from normstream.models.roles import StartRole
from normstream.models.sublayers import block_sublayers
from normstream.models.text_context import text_context
from normstream.models.trunk import Trunk


class DecoderLM(Trunk):
    """Decoder language model with any placement.

        tokens -> tok_embeddings -> before_layers -> layers.0 -> ... -> layers.L-1 -> lm_head -> logits

    The parameters' values are torch's defaults until ``normstream.init.initialize(model, seed)`` sets them; the
    model can be built on the meta device.

    Raises ValueError for a token id outside the vocabulary (on a CPU, see ``check_ids``), a sequence longer than
    ``max_seq_len``, learned positions outside their table, and a cache together with documents or with a model that is
    not causal.

    >>> model = DecoderLM(DecoderConfig(placement="pre", vocab_size=10, dim=8, n_layers=2, n_heads=2))
    >>> model(torch.zeros(1, 3, dtype=torch.int64)).shape
    torch.Size([1, 3, 10])
    """

    tok_embeddings: nn.Embedding
    pos_embeddings: nn.Embedding | None

    def __init__(self, config: DecoderConfig) -> None:
        learned = config.positions.kind == "learned"
        embeddings = {
            "tok_embeddings": nn.Embedding(config.vocab_size, config.dim),
            "pos_embeddings": nn.Embedding(config.max_seq_len, config.dim) if learned else None,
        }
        super().__init__(config, lambda layer: block_sublayers(config, layer), embeddings=embeddings)
        self.config = config
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=config.head_bias)
        self.logit_scale = (
            LearnedScale(config.vocab_size, unit=math.sqrt(config.dim)) if self.placement.logit_scale else None
        )
        self.tie()

    def tie(self) -> None:
        """Makes the head share the embedding matrix if the configuration says so; to repeat after ``to_empty``."""
        if self.config.tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def start_roles(self) -> dict[nn.Module | None, StartRole]:
        """What the matrices outside the blocks are for, see ``normstream.init``."""
        return {self.tok_embeddings: "vocabulary", self.lm_head: "vocabulary", self.pos_embeddings: "positions"}

    def hidden(
        self,
        tokens_BT: Int[Tensor, "B T"],
        *,
        documents_BT: Int[Tensor, "B T"] | None = None,
        positions_BT: Int[Tensor, "B T"] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "B T D"]:
        """The final hidden vector of each position, what ``lm_head`` reads; see ``hidden_and_aux``."""
        return self.hidden_and_aux(tokens_BT, documents_BT=documents_BT, positions_BT=positions_BT, cache=cache)[0]

    def hidden_and_aux(
        self,
        tokens_BT: Int[Tensor, "B T"],
        *,
        documents_BT: Int[Tensor, "B T"] | None = None,
        positions_BT: Int[Tensor, "B T"] | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Float[Tensor, "B T D"], tuple[Any, ...]]:
        """The final hidden vector of each position, and what the sublayers report (routers their balance).

        Args:
            tokens_BT: token ids.
            documents_BT: document ids; a position attends only to its own document. None: one document a row.
            positions_BT: rotary or learned positions; None counts from the start of the row (or of the cache).
            cache: keys and values of the positions before these, appended to in place.
        """
        n_cached = 0 if cache is None else cache.length
        self._check(tokens_BT, documents_BT, positions_BT, cache)
        if positions_BT is None:
            positions_BT = torch.arange(n_cached, n_cached + tokens_BT.shape[1], device=tokens_BT.device)[None]
        embedding = self.tok_embeddings(tokens_BT)
        embedding = embedding * embedding.new_full((), self.config.embedding_multiplier)  # rounded first, as Gemma's is
        embedding = add_positions(embedding, positions_BT, self.config.positions, self.pos_embeddings)
        contexts = self._contexts(positions_BT, documents_BT, tokens_BT.shape[1], cache)
        return self.run(embedding, lambda layer: contexts[self.config.is_windowed(layer)])

    def forward(
        self,
        tokens_BT: Int[Tensor, "B T"],
        *,
        documents_BT: Int[Tensor, "B T"] | None = None,
        positions_BT: Int[Tensor, "B T"] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits of the next token at each position; arguments as for ``hidden``."""
        return self.logits(self.hidden(tokens_BT, documents_BT=documents_BT, positions_BT=positions_BT, cache=cache))

    def logits(self, hidden_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        """The logits of final hidden vectors."""
        logits_BTV = self.lm_head(hidden_BTD)
        if self.logit_scale is not None:
            logits_BTV = self.logit_scale(logits_BTV)
        if self.config.logit_multiplier != 1:
            logits_BTV = logits_BTV * self.config.logit_multiplier
        return logits_BTV if self.config.logit_cap is None else soft_cap(logits_BTV, self.config.logit_cap)

    def _check(
        self, tokens_BT: Tensor, documents_BT: Tensor | None, positions_BT: Tensor | None, cache: KVCache | None
    ) -> None:
        check_ids("token ids", tokens_BT, self.config.vocab_size, "vocab_size")
        n_cached = 0 if cache is None else cache.length
        n_keys = n_cached + tokens_BT.shape[1]
        if n_keys > self.config.max_seq_len:
            raise ValueError(
                f"sequence of {n_keys} tokens, but max_seq_len is {self.config.max_seq_len}; shorten it or raise that"
            )
        if self.pos_embeddings is not None and positions_BT is not None:
            check_ids("learned positions", positions_BT, self.config.max_seq_len, "max_seq_len")
        if n_cached and documents_BT is not None:
            raise ValueError("a KV cache holds one document a row; leave documents out")
        if cache is not None and not self.config.causal:
            raise ValueError("a KV cache is for causal models, but causal is false; leave the cache out")

    def _contexts(
        self, positions_PT: Tensor, documents_BT: Tensor | None, n_queries: int, cache: KVCache | None
    ) -> dict[bool, Context]:
        """What the sublayers of full (False) and of windowed layers (True) share in one forward pass."""
        config, device = self.config, positions_PT.device
        n_keys = n_queries + (0 if cache is None else cache.length)
        rotated = config.latent.rope_head_dim if config.latent.kv_rank else None
        links = Links(config.resolved_depth_stride)

        def context(windowed: bool) -> Context:
            window = config.window if windowed else None
            mask = attention_mask(documents_BT, n_queries, n_keys, device, causal=config.causal, window=window)
            return text_context(
                config,
                positions_PT,
                mask,
                n_keys,
                self.tok_embeddings.weight.dtype,
                causal=config.causal,
                links=links,
                windowed=windowed,
                rotated=rotated,
            )._replace(cache=cache)

        return {windowed: context(windowed) for windowed in {config.is_windowed(i) for i in range(config.n_layers)}}
