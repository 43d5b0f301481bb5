"""QK-Clip: after each optimizer step, weights of queries and keys shrink until no attention logit is above a threshold.

For a head whose largest logit S = scale q k in the forward passes of that step is above the threshold tau:

    gamma = tau / S                    all logits of the head are to shrink by this factor

    own keys (MHA)     rows of W_q  x gamma^alpha     rows of W_k  x gamma^(1 - alpha)     biases as the rows
    shared keys (GQA)  ``group``: one gamma for the group, of its largest logit; as above. Quieter heads shrink too.
                       ``query``: rows of W_q of that head x gamma; the keys stay
    latent (MLA)       position-free rows of W_q x gamma^alpha and of W_k x gamma^(1 - alpha), rotated rows of W_q
                       x gamma; the rotated key, which all heads share, and the values stay

S is the signed maximum, which is what softmax reacts to, of the product alone, without position biases, caps and the
scores that RealFormer adds. Heads at or below tau keep every bit.

Source: Kimi K2, arXiv 2507.20534, section 2.1; ``group`` is NVIDIA/Megatron-LM:megatron/core/transformer/attention.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from normstream.layers import Attention
from normstream.layers.latent_attention import LatentAttention
from normstream.norms import precise_dtype
from normstream.optim.config import QKClipConfig

QK_NORM = (
    "QK-Clip shrinks the weights of queries and keys, but QK-norm ({where}) divides any scale out of them again, and "
    "bounds the logits by itself; set model.inner.qk to none, or clip nothing (optimizer.kind muon instead of muonclip)"
)


class QKClip:
    """Watches the largest attention logit of every head of a model, and clips the heads above a threshold.

    Args:
        model: any module with ``Attention`` or ``LatentAttention`` inside.
        threshold: tau.
        config: alpha, and what to do where keys are shared; its threshold is not read.

    Raises:
        ValueError: if the model has no attention, or one with QK-norm.

    >>> attention = Attention(8, n_heads=2, n_kv_heads=2, head_dim=4, layer=0)
    >>> clip = QKClip(attention, threshold=100.0)
    >>> with clip.watching():
    ...     pass  # forward and backward passes of one update
    >>> clip.clip()  # after the optimizer's step
    >>> clip.max_logits()
    [[-inf, -inf]]
    """

    def __init__(self, model: nn.Module, threshold: float, config: QKClipConfig | None = None) -> None:
        self.threshold, self.config = threshold, config or QKClipConfig()
        self.attentions: list[Attention | LatentAttention] = []
        for name, module in model.named_modules():
            if isinstance(module, Attention) and (module.q_norm is not None or module.k_norm is not None):
                raise ValueError(QK_NORM.format(where=f"in {name or 'the attention'}"))
            if isinstance(module, Attention | LatentAttention):
                self.attentions.append(module)
        if not self.attentions:
            raise ValueError("QK-Clip needs a model with Attention or LatentAttention modules, but there are none")
        self.records = [_record(attention) for attention in self.attentions]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While entered, forward passes record their largest logits, from nothing; recomputing one changes nothing."""
        for attention, record in zip(self.attentions, self.records, strict=True):
            record.fill_(-torch.inf)
            attention.max_logits = record
        try:
            yield
        finally:
            for attention in self.attentions:
                attention.max_logits = None

    def n_over(self) -> Tensor:
        """How many heads are above the threshold."""
        return torch.stack([(_gamma(record, self.threshold) < 1).sum() for record in self.records]).sum()

    def largest(self) -> Tensor:
        """The largest logit of all heads."""
        return torch.stack([record.max() for record in self.records]).max()

    def max_logits(self) -> list[list[float]]:
        """The largest logit of each head, layer by layer."""
        return [record.tolist() for record in self.records]

    @torch.no_grad()
    def clip(self) -> None:
        """Scales the weights of every head that is above the threshold; the device is not waited for."""
        for attention, record in zip(self.attentions, self.records, strict=True):
            gamma = _gamma(record, self.threshold)
            if isinstance(attention, LatentAttention):
                _clip_latent(attention, gamma, self.config.alpha)
            elif self.config.shared_keys == "query" and attention.n_kv_heads < attention.n_heads:
                _scale_heads(attention.wq, gamma)
            else:
                _clip_groups(attention, gamma, self.config.alpha)


def _record(attention: Attention | LatentAttention) -> Tensor:
    weight = attention.wo.weight
    return torch.full((attention.n_heads,), -torch.inf, dtype=precise_dtype(weight), device=weight.device)


def _gamma(max_logits: Tensor, threshold: float) -> Tensor:
    """The factor of each head: 1 at or below the threshold, and where the logit overflowed."""
    over = (max_logits > threshold) & max_logits.isfinite()
    return torch.where(over, threshold / max_logits, torch.ones_like(max_logits))


def _scale_heads(linear: nn.Linear, factor: Tensor, rows: slice = slice(None)) -> None:
    """Multiplies those rows of each head, bias included, by the head's factor."""
    for parameter in (linear.weight, linear.bias):
        if parameter is not None:
            heads = parameter.unflatten(0, (len(factor), -1))[:, rows]
            heads.mul_(factor.to(heads.dtype).view(-1, *[1] * (heads.ndim - 1)))


def _clip_groups(attention: Attention, gamma: Tensor, alpha: float) -> None:
    """One factor for each key head, the smallest of the query heads that share it."""
    shared = gamma.view(attention.n_kv_heads, -1)
    per_key = shared.amin(1)
    per_query = per_key[:, None].expand_as(shared).flatten()
    _scale_heads(attention.wq, per_query**alpha)
    _scale_heads(attention.wk, per_key ** (1 - alpha))


def _clip_latent(attention: LatentAttention, gamma: Tensor, alpha: float) -> None:
    """The rotated key is shared, so that the rotated query takes the whole factor."""
    nope = attention.sizes.nope_head_dim
    _scale_heads(attention.wq, gamma**alpha, slice(nope))
    _scale_heads(attention.wq, gamma, slice(nope, None))
    _scale_heads(attention.wkv_up, gamma ** (1 - alpha), slice(nope))
