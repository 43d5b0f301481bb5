"""Text for masked language models: packed documents, and the tokens of them that a model has to guess.

Shape suffixes: B samples, T tokens, K the most tokens that are chosen in one sample.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from normstream.data.batches import split_rows, to_device
from normstream.data.config import DataConfig
from normstream.data.corpus import Data, load_data
from normstream.data.packing import IGNORE, PackedTokens
from normstream.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class MaskedDataConfig(DataConfig):
    """A corpus as for language modelling, and how much of it is masked; ``load_masked`` makes a ``MaskedData`` of it.

    Raises ValueError for a number out of range.

    >>> MaskedDataConfig(seq_len=256).mask_fraction
    0.15
    """

    mask_fraction: float = 0.15
    """The part of the tokens of a sample that is chosen to be predicted; at least one token is."""
    masked_share: float = 0.8
    """The share of the chosen tokens that the mask token takes the place of."""
    random_share: float = 0.1
    """The share of the chosen tokens that a random token takes the place of; the rest stays."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.mask_fraction <= 1:
            raise ValueError(f"mask_fraction must be above 0 and at most 1, got {self.mask_fraction}")
        shares = self.masked_share, self.random_share
        if min(shares) < 0 or sum(shares) > 1 + 1e-9:
            raise ValueError(
                f"masked_share and random_share must be at least 0 and not above 1 together, got {shares[0]} and "
                f"{shares[1]}"
            )


@dataclass(frozen=True)
class MaskableBatch:
    """Samples in which nothing is masked yet: which tokens may be chosen, and how many are to be.

    >>> tokens, candidates = torch.tensor([[1, 2]]), torch.tensor([[True, True]])
    >>> MaskableBatch(tokens, candidates, torch.tensor([1])).n_targets
    1
    """

    tokens_BT: Int[Tensor, "B T"]
    candidates_BT: Bool[Tensor, "B T"]
    """Tokens that may be chosen: all but end-of-text."""
    n_chosen_B: Int[Tensor, " B"]
    """How many of them are chosen."""
    documents_BT: Int[Tensor, "B T"] | None = None
    """As in ``Batch``."""
    positions_BT: Int[Tensor, "B T"] | None = None
    """As in ``Batch``."""

    @property
    def n_targets(self) -> int:
        """How many tokens are chosen."""
        return int(self.n_chosen_B.sum())

    def split(self, parts: int) -> Iterator["MaskableBatch"]:
        """The batch cut into equal micro-batches along its first axis."""
        return split_rows(self, parts)

    def to(self, device: torch.device | str) -> "MaskableBatch":
        """The same batch on another device."""
        return to_device(self, device)


class Masked(NamedTuple):
    """What a model sees of a ``MaskableBatch``, and what it has to say.

    >>> Masked(torch.tensor([[9, 2]]), torch.tensor([[0]]), torch.tensor([[1]])).places_BK.shape
    torch.Size([1, 1])
    """

    inputs_BT: Int[Tensor, "B T"]
    """The tokens, the chosen ones replaced or not."""
    places_BK: Int[Tensor, "B K"]
    """Where the chosen tokens are; in samples with fewer than K of them, other places at the end."""
    targets_BK: Int[Tensor, "B K"]
    """The tokens that were there, -100 at the places at the end that are not chosen."""


@dataclass(frozen=True)
class Masking:
    """Chooses tokens and replaces them, anew at every call (RoBERTa's dynamic masking).

    Of each sample a fixed number of tokens is chosen, all sets of that size equally likely, as BERT does. So the number
    of targets of a batch is known before anything is drawn, and the parts of a batch add up to its mean. Random tokens
    are uniform over all but end-of-text and the mask token.

    Sources: Devlin et al. 2018, arXiv 1810.04805, section 3.1; Liu et al. 2019, arXiv 1907.11692, section 4.1.

    >>> masking = Masking(eot=256, mask=257)
    >>> batch = MaskableBatch(torch.tensor([[5, 6, 256]]), torch.tensor([[True, True, False]]), torch.tensor([2]))
    >>> masking(batch, torch.Generator().manual_seed(0)).targets_BK.sort().values
    tensor([[-100,    5,    6]])
    """

    eot: int
    """The id of end-of-text, which is never chosen."""
    mask: int
    """The id of the mask token, which is also the number of ids below it."""
    masked_share: float = 0.8
    """As in ``MaskedDataConfig``."""
    random_share: float = 0.1
    """As in ``MaskedDataConfig``."""
    fraction: float = 1.0
    """At most this part of a sample is chosen."""

    def __call__(self, batch: MaskableBatch, generator: torch.Generator | None = None) -> Masked:
        """Draws on the batch's device, from a generator or torch's global one, without waiting for the device."""
        tokens_BT, device = batch.tokens_BT, batch.tokens_BT.device
        scores_BT = torch.rand(tokens_BT.shape, generator=generator, device=device)
        scores_BT = scores_BT.masked_fill(~batch.candidates_BT, 2.0)
        n_most = n_chosen(tokens_BT.shape[1], self.fraction)
        places_BK = scores_BT.argsort(dim=1)[:, :n_most]
        chosen_BK = torch.arange(n_most, device=device) < batch.n_chosen_B[:, None]
        originals_BK = tokens_BT.gather(1, places_BK)

        share_BK = torch.rand(places_BK.shape, generator=generator, device=device)
        random_BK = torch.randint(self.mask - 1, places_BK.shape, generator=generator, device=device)
        random_BK = random_BK + (random_BK >= self.eot)
        replaced_BK = originals_BK.where(share_BK >= self.masked_share + self.random_share, random_BK)
        replaced_BK = replaced_BK.where(share_BK >= self.masked_share, self.mask)
        inputs_BT = tokens_BT.scatter(1, places_BK, replaced_BK.where(chosen_BK, originals_BK))
        return Masked(inputs_BT, places_BK, originals_BK.masked_fill(~chosen_BK, IGNORE))


def n_chosen(n_candidates: int, fraction: float) -> int:
    """How many of some tokens are chosen: the rounded part of them, but at least one where there is one.

    >>> n_chosen(128, 0.15), n_chosen(2, 0.15), n_chosen(0, 0.15)
    (19, 1, 0)
    """
    return min(n_candidates, max(1, round(fraction * n_candidates)))


@dataclass(frozen=True, eq=False)
class MaskableTokens:
    """Packed documents as samples to mask: sample i is tokens[i*T : (i+1)*T].

    >>> packed = PackedTokens(np.array([5, 6, 9, 7, 9]), seq_len=2, eot=9, n_bytes=3)
    >>> MaskableTokens(packed, fraction=0.5).batch([1]).candidates_BT
    tensor([[False,  True]])
    """

    packed: PackedTokens
    """The documents."""
    fraction: float
    """The part of a sample that is chosen."""

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.packed.size

    @property
    def tokens_per_sample(self) -> float:
        """T."""
        return self.packed.tokens_per_sample

    def batch(self, samples: Sequence[int] | np.ndarray) -> MaskableBatch:
        """The samples with these numbers, in this order; raises IndexError for a number outside [0, len)."""
        batch = self.packed.batch(samples)
        candidates_BT = batch.inputs_BT != self.packed.eot
        counts = [n_chosen(count, self.fraction) for count in candidates_BT.sum(1).tolist()]
        n_chosen_B = torch.tensor(counts, dtype=torch.int64)
        return MaskableBatch(batch.inputs_BT, candidates_BT, n_chosen_B, batch.documents_BT, batch.positions_BT)


@dataclass(frozen=True, eq=False)
class MaskedData:
    """A corpus ready for a masked language model; its vocabulary has one token more than its tokenizer, the mask.

    >>> path = getfixture("tmp_path") / "text.txt"
    >>> path.write_text("to be or not to be " * 20)
    380
    >>> data = load_masked(MaskedDataConfig(source=str(path), seq_len=8))
    >>> len(data.train), data.vocab_size, data.masking.mask
    (45, 258, 257)
    """

    config: MaskedDataConfig
    """What it was made from."""
    corpus: Data
    """The text, as for language modelling."""
    train: MaskableTokens
    """The training split."""
    validation: MaskableTokens
    """The held-out split."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the text; it does not know the mask token."""
        return self.corpus.tokenizer

    @property
    def corpus_hash(self) -> str:
        """SHA-256 over the documents and the side of the split that each is on."""
        return self.corpus.corpus_hash

    @property
    def vocab_size(self) -> int:
        """The number of token ids, the mask token included."""
        return self.tokenizer.vocab_size + 1

    @property
    def masking(self) -> Masking:
        """How its samples are masked."""
        config, tokenizer = self.config, self.tokenizer
        return Masking(
            eot=tokenizer.eot,
            mask=tokenizer.vocab_size,
            masked_share=config.masked_share,
            random_share=config.random_share,
            fraction=config.mask_fraction,
        )


def load_masked(config: MaskedDataConfig) -> MaskedData:
    """Reads, splits, tokenizes and packs the corpus; raises the errors of ``load_data``.

    >>> load_masked(MaskedDataConfig(source="stdlb"))
    Traceback (most recent call last):
    ValueError: unknown source 'stdlb'; did you mean 'stdlib'? Known: ...
    """
    corpus = load_data(config)
    train, validation = (MaskableTokens(split, config.mask_fraction) for split in (corpus.train, corpus.validation))
    return MaskedData(config, corpus, train, validation)
