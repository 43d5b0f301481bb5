"""A decoder language model: an embedding, a row of sublayers and junctions, a head. It knows no placement by name.

Shape suffixes: B batch, T sequence, D width, V vocabulary.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from normstream import placements
from normstream.junctions import Junction
from normstream.layers import Attention, Context, FeedForward, KVCache, Layer
from normstream.layers.context import attention_mask, rope_table
from normstream.models.config import DecoderConfig


class DecoderLM(nn.Module):
    """Decoder language model with any placement.

        tokens -> tok_embeddings -> before_layers -> layers.0 -> ... -> layers.L-1 -> lm_head -> logits

    The parameters' values are torch's defaults until ``normstream.init.initialize(model, seed)`` sets them; the
    model can be built on the meta device.

    Raises ValueError for an unknown placement and for a sequence longer than ``max_seq_len``.

    >>> model = DecoderLM(DecoderConfig(placement="pre", vocab_size=10, dim=8, n_layers=2, n_heads=2))
    >>> model(torch.zeros(1, 3, dtype=torch.int64)).shape
    torch.Size([1, 3, 10])
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        placement = placements.get(config.placement)
        self.config, self.placement = config, placement
        self.before_layers: Junction
        self.before_layers, *rest = placement.junctions(
            config.dim, config.n_layers, norm=config.norm, dropout=config.dropout, drop_path=config.drop_path
        )
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(
            Layer(
                {"attention": self._attention(layer), "feed_forward": self._feed_forward()},
                rest[2 * layer : 2 * layer + 2],
            )
            for layer in range(config.n_layers)
        )
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Makes the head share the embedding matrix if the configuration says so; to repeat after ``to_empty``."""
        if self.config.tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def _attention(self, layer: int) -> Attention:
        config = self.config
        inner = config.inner.over(self.placement.at(layer).inner)
        head_dim = config.resolved_head_dim
        return Attention(
            config.dim,
            n_heads=config.n_heads,
            n_kv_heads=config.resolved_kv_heads,
            head_dim=head_dim,
            layer=layer,
            bias=config.bias,
            q_norm=config.norm.build(head_dim) if inner.qk != "none" else None,
            k_norm=config.norm.build(head_dim) if inner.qk != "none" else None,
            v_norm=config.norm.build(head_dim) if inner.v != "none" else None,
        )

    def _feed_forward(self) -> FeedForward:
        config = self.config
        return FeedForward(config.dim, ffn_dim=config.resolved_ffn_dim, activation=config.activation, bias=config.bias)

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the residual streams, in the order of the state."""
        return self.placement.streams

    def hidden(
        self,
        tokens_BT: Int[Tensor, "B T"],
        *,
        documents_BT: Int[Tensor, "B T"] | None = None,
        positions_BT: Int[Tensor, "B T"] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "B T D"]:
        """The final hidden vector of each position, what ``lm_head`` reads.

        Args:
            tokens_BT: token ids.
            documents_BT: document ids; a position attends only to its own document. None: one document a row.
            positions_BT: rotary positions; None counts from the start of the row (or of the cache).
            cache: keys and values of the positions before these, appended to in place.
        """
        context = self._context(tokens_BT, documents_BT, positions_BT, cache)
        embedding = self.tok_embeddings(tokens_BT) * self.config.embedding_multiplier
        state, z_BTD = self.before_layers((), embedding)
        for layer in self.layers:
            state, z_BTD = layer(state, z_BTD, context)
        return z_BTD

    def forward(
        self,
        tokens_BT: Int[Tensor, "B T"],
        *,
        documents_BT: Int[Tensor, "B T"] | None = None,
        positions_BT: Int[Tensor, "B T"] | None = None,
        cache: KVCache | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits of the next token at each position; arguments as for ``hidden``."""
        return self.lm_head(self.hidden(tokens_BT, documents_BT=documents_BT, positions_BT=positions_BT, cache=cache))

    def _context(
        self, tokens_BT: Tensor, documents_BT: Tensor | None, positions_BT: Tensor | None, cache: KVCache | None
    ) -> Context:
        n_cached = 0 if cache is None else cache.length
        n_queries, n_keys = tokens_BT.shape[1], n_cached + tokens_BT.shape[1]
        if n_keys > self.config.max_seq_len:
            raise ValueError(f"sequence of {n_keys} tokens, but max_seq_len is {self.config.max_seq_len}")
        if n_cached and documents_BT is not None:
            raise ValueError("a KV cache holds one document a row; leave documents out")
        if positions_BT is None:
            positions_BT = torch.arange(n_cached, n_keys, device=tokens_BT.device)[None]
        return Context(
            rope=rope_table(
                positions_BT, self.config.resolved_head_dim, self.config.rope_theta, self.tok_embeddings.weight.dtype
            ),
            mask=attention_mask(documents_BT, n_queries, n_keys, tokens_BT.device),
            cache=cache,
        )
