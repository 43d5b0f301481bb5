"""Decoding with an encoder-decoder: the likeliest target of a source, greedily or with a beam.

Shape suffixes: B batch, S source positions, T new tokens, K beams, V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from normstream.layers import KVCache
from normstream.models import EncoderDecoder
from normstream.models.evaluating import evaluating
from normstream.norms import precise_dtype


@torch.no_grad()
def greedy_search(
    model: EncoderDecoder,
    source_BS: Int[Tensor, "B S"],
    padding_BS: Bool[Tensor, "B S"] | None = None,
    *,
    bos: int,
    eos: int,
    max_new_tokens: int,
) -> Int[Tensor, "B T"]:
    """The target that takes the likeliest token at each step; arguments and result as for ``beam_search``.

    >>> from normstream.models import EncoderDecoderConfig
    >>> model = EncoderDecoder(EncoderDecoderConfig(placement="pre", vocab_size=10, dim=8, n_layers=1, n_heads=2))
    >>> greedy_search(model, torch.tensor([[3, 4], [5, 6]]), bos=0, eos=1, max_new_tokens=3).shape[0]
    2
    """
    _check(model, source_BS, bos, eos, max_new_tokens)
    with evaluating(model):
        memory_BSD, cache = model.encode(source_BS, padding_BS), KVCache()
        new_B1 = source_BS.new_full((source_BS.shape[0], 1), bos)
        finished_B1, tokens_BT = torch.zeros_like(new_B1, dtype=torch.bool), new_B1[:, :0]
        while tokens_BT.shape[1] < max_new_tokens and not finished_B1.all():
            logits_BV = model.decode(new_B1, memory_BSD, padding_BS, cache)[:, -1]
            new_B1 = torch.where(finished_B1, eos, logits_BV.argmax(-1, keepdim=True))
            finished_B1 = finished_B1 | (new_B1 == eos)
            tokens_BT = torch.cat((tokens_BT, new_B1), dim=1)
    return tokens_BT


@torch.no_grad()
def beam_search(
    model: EncoderDecoder,
    source_BS: Int[Tensor, "B S"],
    padding_BS: Bool[Tensor, "B S"] | None = None,
    *,
    bos: int,
    eos: int,
    max_new_tokens: int,
    beam_size: int = 4,
    length_penalty: float = 0.6,
) -> Int[Tensor, "B T"]:
    """The best target that a beam finds for each source: the tokens after ``bos``, ``eos`` included.

        score(y) = log P(y | source) / ((5 + n) / 6)^length_penalty        for the n tokens of y

    At each step the ``beam_size`` likeliest continuations of all beams are kept. Those that end with ``eos`` leave the
    beam for good; the others go on, until the best that is finished is at least what any other can still reach. A
    row of which nothing has finished after ``max_new_tokens`` gives its likeliest beam as it is. With one beam this is
    ``greedy_search``. Every row is searched by itself.

    Args:
        model: an encoder-decoder; it is put into evaluation mode for the search.
        source_BS: token ids.
        padding_BS: True at padding; None: there is none.
        bos: the token that the decoder starts with.
        eos: the token that ends a target; rows that end early are filled up with it.
        max_new_tokens: most tokens of a target; the model must be able to read as many.
        beam_size: number of continuations that are kept, at most the vocabulary.
        length_penalty: the exponent, 0 or more; 0 compares log-probabilities, more favours longer targets.

    Returns:
        Token ids (B, T), T being the length of the longest target.

    Raises ValueError for arguments outside these bounds.

    Source: the score of GNMT, Wu et al. 2016, arXiv 1609.08144, without its coverage penalty; scores are summed in
    float32 (float64 of a float64 model).

    >>> from normstream.models import EncoderDecoderConfig
    >>> model = EncoderDecoder(EncoderDecoderConfig(placement="pre", vocab_size=10, dim=8, n_layers=1, n_heads=2))
    >>> beam_search(model, torch.tensor([[3, 4], [5, 6]]), bos=0, eos=1, max_new_tokens=3).shape[0]
    2
    """
    _check(model, source_BS, bos, eos, max_new_tokens)
    _check_beam(beam_size, length_penalty, model.config.vocab_size)
    with evaluating(model):
        memory = model.encode(source_BS, padding_BS).repeat_interleave(beam_size, dim=0)
        padding = None if padding_BS is None else padding_BS.repeat_interleave(beam_size, dim=0)
        beams, cache = _Beams(source_BS, beam_size, eos, precise_dtype(memory)), KVCache()
        last = source_BS.new_full((len(memory), 1), bos)
        for length in range(1, max_new_tokens + 1):
            logits = model.decode(last, memory, padding, cache)[:, -1]
            rows = beams.step(logits.log_softmax(-1, dtype=beams.dtype), penalty(length, length_penalty))
            if beams.are_decided(penalty(max_new_tokens, length_penalty)):
                break
            cache.reorder(rows)
            last = beams.tokens_BKT[:, :, -1].reshape(-1, 1)
    return beams.best()


def penalty(length: int, exponent: float) -> float:
    """What the log-probability of a target is divided by: ``((5 + length) / 6)^exponent``.

    >>> penalty(1, 0.6), penalty(7, 1.0)
    (1.0, 2.0)
    """
    return ((5 + length) / 6) ** exponent


class _Beams:
    """The live beams of every row, and the best finished target of each; log-probability -inf means that there is none.

    A step takes the K likeliest continuations; the finished ones leave, so that fewer than K may go on.
    """

    def __init__(self, source_BS: Tensor, beam_size: int, eos: int, dtype: torch.dtype) -> None:
        n_rows, self.beam_size, self.eos, self.dtype = len(source_BS), beam_size, eos, dtype
        self.rows_B = torch.arange(n_rows, device=source_BS.device)
        self.tokens_BKT = source_BS.new_empty(n_rows, beam_size, 0)
        self.live_BK = torch.full((n_rows, beam_size), -math.inf, dtype=dtype, device=source_BS.device)
        self.live_BK[:, 0] = 0
        self.best_BT = source_BS.new_empty(n_rows, 0)
        self.best_score_B = self.live_BK.new_full((n_rows,), -math.inf)

    def step(self, log_p: Tensor, penalty: float) -> Tensor:
        """Goes on by one token, given its log-probabilities (B K, V); returns the old row (B K) of each new beam."""
        vocab_size = log_p.shape[-1]
        totals = self.live_BK.unsqueeze(-1) + log_p.view(*self.live_BK.shape, vocab_size)
        scores_BK, picks_BK = totals.flatten(1).topk(self.beam_size)
        origins_BK = picks_BK // vocab_size
        kept = self.tokens_BKT.gather(1, origins_BK.unsqueeze(-1).expand_as(self.tokens_BKT))
        self.tokens_BKT = torch.cat((kept, (picks_BK % vocab_size).unsqueeze(-1)), dim=-1)
        ended_BK = self.tokens_BKT[:, :, -1] == self.eos
        self._finish(scores_BK.masked_fill(~ended_BK, -math.inf) / penalty)
        self.live_BK = scores_BK.masked_fill(ended_BK, -math.inf)
        return (origins_BK + self.beam_size * self.rows_B[:, None]).flatten()

    def _finish(self, score_BK: Tensor) -> None:
        score_B, beam_B = score_BK.max(1)
        better_B = score_B > self.best_score_B
        before_BT = F.pad(self.best_BT, (0, 1), value=self.eos)
        self.best_BT = torch.where(better_B[:, None], self.tokens_BKT[self.rows_B, beam_B], before_BT)
        self.best_score_B = torch.where(better_B, score_B, self.best_score_B)

    def are_decided(self, largest_penalty: float) -> bool:
        """Whether in no row a live beam can become better than the best: more tokens only lower log P."""
        return bool((self.best_score_B >= self.live_BK.amax(1) / largest_penalty).all())

    def best(self) -> Tensor:
        """The best finished target of each row, or else its likeliest beam; (B, T), T the longest."""
        running_BT = self.tokens_BKT[self.rows_B, self.live_BK.argmax(1)]
        best_BT = torch.where(self.best_score_B.isneginf()[:, None], running_BT, self.best_BT)
        return best_BT[:, : int((best_BT != self.eos).sum(1).amax()) + 1]


def _check(model: EncoderDecoder, source_BS: Tensor, bos: int, eos: int, max_new_tokens: int) -> None:
    config = model.config
    if len(source_BS) < 1:
        raise ValueError("there is no source to decode; give at least one row")
    for name, token in (("bos", bos), ("eos", eos)):
        if not 0 <= token < config.vocab_size:
            raise ValueError(f"{name} must be a token id below vocab_size {config.vocab_size}, got {token}")
    if not 1 <= max_new_tokens <= config.max_seq_len:
        raise ValueError(
            f"max_new_tokens must be at least 1 and at most max_seq_len {config.max_seq_len}, got {max_new_tokens}"
        )


def _check_beam(beam_size: int, length_penalty: float, vocab_size: int) -> None:
    if not 1 <= beam_size <= vocab_size:
        raise ValueError(f"beam_size must be at least 1 and at most vocab_size {vocab_size}, got {beam_size}")
    if not 0 <= length_penalty < math.inf:
        raise ValueError(f"length_penalty must be a finite number of at least 0, got {length_penalty}")
