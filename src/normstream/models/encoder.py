"""An encoder: an embedding, a row of sublayers and junctions in which every position sees all others, a head.

Shape suffixes: B batch, T sequence, D width, V vocabulary, K chosen positions, P = 1 or B.
"""

import math
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from normstream.layers import Context
from normstream.layers.feed_forward import FUNCTIONS
from normstream.layers.learned_scale import LearnedScale
from normstream.layers.links import Links
from normstream.layers.masks import attention_mask
from normstream.layers.positions import add_positions
from normstream.models.encoder_config import EncoderConfig
from normstream.models.ids import check_ids
from normstream.models.roles import StartRole
from normstream.models.sublayers import block_sublayers
from normstream.models.text_context import text_context
from normstream.models.trunk import Trunk


class TextEncoder(Trunk):
    """An encoder without its head: from token ids to final hidden vectors.

        tokens (+ positions, types) -> before_layers -> layers.0 -> ... -> layers.L-1 -> final hidden vectors

    Padding never changes what comes out at other positions, nor any gradient of it: no position sees a padded one, and
    a padded one starts as a zero vector. Padded positions see each other, so that nothing there is NaN; what comes out
    of them means nothing. This holds for norms over a token, not for those whose statistics are over the whole tensor
    (``NormConfig(scope="tensor")``).

    Raises ValueError for a token id outside the vocabulary, a type that the model has not, a sequence that is empty or
    longer than ``max_seq_len``, learned positions outside their table, and a padding of another shape.

    >>> from normstream.models.encoder_config import EncoderConfig
    >>> encoder = TextEncoder(EncoderConfig(placement="pre", vocab_size=10, dim=8, n_layers=2, n_heads=2))
    >>> encoder.hidden(torch.zeros(1, 3, dtype=torch.int64)).shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config, lambda layer: block_sublayers(config, layer))
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        learned = config.positions.kind == "learned"
        self.pos_embeddings = nn.Embedding(config.max_seq_len, config.dim) if learned else None
        self.type_embeddings = nn.Embedding(config.n_types, config.dim) if config.n_types else None

    def start_roles(self) -> dict[nn.Module | None, StartRole]:
        """What the matrices outside the blocks are for, see ``normstream.init``."""
        return {
            self.tok_embeddings: "vocabulary",
            self.type_embeddings: "vocabulary",
            self.pos_embeddings: "positions",
        }

    def hidden(
        self,
        tokens_BT: Int[Tensor, "B T"],
        padding_BT: Bool[Tensor, "B T"] | None = None,
        types_BT: Int[Tensor, "B T"] | None = None,
        *,
        documents_BT: Int[Tensor, "B T"] | None = None,
        positions_BT: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        """The final hidden vector of each position; see ``hidden_and_aux``."""
        return self.hidden_and_aux(
            tokens_BT, padding_BT, types_BT, documents_BT=documents_BT, positions_BT=positions_BT
        )[0]

    def hidden_and_aux(
        self,
        tokens_BT: Int[Tensor, "B T"],
        padding_BT: Bool[Tensor, "B T"] | None = None,
        types_BT: Int[Tensor, "B T"] | None = None,
        *,
        documents_BT: Int[Tensor, "B T"] | None = None,
        positions_BT: Int[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T D"], tuple[Any, ...]]:
        """The final hidden vector of each position, and what the sublayers report (routers their balance).

        Args:
            tokens_BT: token ids.
            padding_BT: True at padding; None: there is none.
            types_BT: token types; None means type 0 everywhere.
            documents_BT: document ids; a position sees only its own document. None: one document a row.
            positions_BT: positions in the row; None counts from its start.
        """
        self._check(tokens_BT, padding_BT, types_BT, positions_BT)
        if positions_BT is None:
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)[None]
        embedding_BTD = self._embed(tokens_BT, types_BT, positions_BT)
        if padding_BT is not None:
            embedding_BTD = embedding_BTD.masked_fill(padding_BT[..., None], 0.0)
            documents_BT = padding_apart(padding_BT, documents_BT)
        context = self._context(positions_BT, documents_BT, tokens_BT.shape[1])
        return self.run(embedding_BTD, lambda layer: context)

    def _embed(self, tokens_BT: Tensor, types_BT: Tensor | None, positions_PT: Tensor) -> Tensor:
        config, embedding = self.config, self.tok_embeddings(tokens_BT)
        embedding = embedding * embedding.new_full((), config.embedding_multiplier)
        if self.type_embeddings is not None:
            embedding = embedding + self.type_embeddings(torch.zeros_like(tokens_BT) if types_BT is None else types_BT)
        return add_positions(embedding, positions_PT, config.positions, self.pos_embeddings)

    def _context(self, positions_PT: Tensor, documents_BT: Tensor | None, length: int) -> Context:
        """What the sublayers of all layers share in one forward pass."""
        mask = attention_mask(documents_BT, length, length, positions_PT.device, causal=False)
        links, dtype = Links(self.config.resolved_depth_stride), self.tok_embeddings.weight.dtype
        return text_context(self.config, positions_PT, mask, length, dtype, causal=False, links=links)

    def _check(
        self, tokens_BT: Tensor, padding_BT: Tensor | None, types_BT: Tensor | None, positions_BT: Tensor | None
    ) -> None:
        config, length = self.config, tokens_BT.shape[1]
        check_ids("token ids", tokens_BT, config.vocab_size, "vocab_size")
        if not 1 <= length <= config.max_seq_len:
            raise ValueError(
                f"sequence of {length} tokens, but there must be at least 1 and at most max_seq_len "
                f"{config.max_seq_len}; change the sequence or raise that"
            )
        if padding_BT is not None and padding_BT.shape != tokens_BT.shape:
            raise ValueError(
                f"padding_BT must have the tokens' shape {tuple(tokens_BT.shape)}, True at padding, "
                f"got {tuple(padding_BT.shape)}"
            )
        if types_BT is not None and not config.n_types:
            raise ValueError("the model has no token types; leave types_BT out, or give n_types")
        if types_BT is not None:
            check_ids("token types", types_BT, config.n_types, "n_types")
        if self.pos_embeddings is not None and positions_BT is not None:
            check_ids("learned positions", positions_BT, config.max_seq_len, "max_seq_len")


class Encoder(TextEncoder):
    """Encoder with any placement and a head that predicts tokens: a masked language model.

        tokens -> final hidden vectors -> lm_head -> logits

    With ``head="bert"``, ``head_transform`` comes before ``lm_head``. The parameters' values are torch's defaults until
    ``normstream.initialize(model, seed)`` sets them; the model can be built on the meta device.

    Source: Devlin et al. 2018, arXiv 1810.04805; with ``bert_config`` it is the same function as
    huggingface/transformers:src/transformers/models/bert/modeling_bert.py. See ``TextEncoder`` for padding and errors.

    >>> from normstream.models.encoder_config import EncoderConfig
    >>> model = Encoder(EncoderConfig(placement="post", vocab_size=10, dim=8, n_layers=2, n_heads=2))
    >>> tokens, padding = torch.tensor([[5, 3, 0]]), torch.tensor([[False, False, True]])
    >>> model(tokens, padding).shape
    torch.Size([1, 3, 10])
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.head_transform = HeadTransform(config) if config.head == "bert" else None
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
        roles = super().start_roles()
        roles[self.lm_head] = "vocabulary"
        return roles

    def forward(
        self,
        tokens_BT: Int[Tensor, "B T"],
        padding_BT: Bool[Tensor, "B T"] | None = None,
        types_BT: Int[Tensor, "B T"] | None = None,
        *,
        documents_BT: Int[Tensor, "B T"] | None = None,
        positions_BT: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits of the token at each position; arguments as for ``hidden_and_aux``."""
        return self.logits(
            self.hidden(tokens_BT, padding_BT, types_BT, documents_BT=documents_BT, positions_BT=positions_BT)
        )

    def logits(self, hidden_BKD: Float[Tensor, "B K D"]) -> Float[Tensor, "B K V"]:
        """The logits of final hidden vectors, of all positions or of some."""
        if self.head_transform is not None:
            hidden_BKD = self.head_transform(hidden_BKD)
        logits_BKV = self.lm_head(hidden_BKD)
        return logits_BKV if self.logit_scale is None else self.logit_scale(logits_BKV)


class HeadTransform(nn.Module):
    """``N(f(W h + b))`` with the function f of the feed-forward: what BERT has before its output matrix.

    Shape: ``(B, K, D)`` to ``(B, K, D)``.

    >>> HeadTransform(EncoderConfig(dim=8, n_heads=2, activation="gelu"))(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.dim, config.dim)
        self.function = FUNCTIONS[config.activation]
        self.norm = config.norm.build(config.dim)

    def forward(self, hidden_BKD: Float[Tensor, "B K D"]) -> Float[Tensor, "B K D"]:
        return self.norm(self.function(self.dense(hidden_BKD)))


def padding_apart(padding_BT: Bool[Tensor, "B T"], documents_BT: Int[Tensor, "B T"] | None) -> Int[Tensor, "B T"]:
    """Document ids in which padding is a document of its own: nobody sees it, and it sees something.

    >>> padding_apart(torch.tensor([[False, False, True]]), None).tolist()
    [[0, 0, -1]]
    """
    if documents_BT is None:
        return -padding_BT.to(torch.int64)
    return documents_BT.where(~padding_BT, documents_BT.amin() - 1)
