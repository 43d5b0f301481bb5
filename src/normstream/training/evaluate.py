"""The loss of a model on held-out text.

Shape suffixes: B batch, T sequence, V vocabulary.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from normstream.data import Batch, PackedTokens
from normstream.models import DecoderLM
from normstream.norms import precise_dtype
from normstream.training.config import Precision

NO_TARGET = (
    "the samples to evaluate on have no token to predict, they are end-of-text only; "
    "give other text, or more of it (eval_batches, validation_fraction)"
)
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a forward pass has this precision.

    >>> autocast("fp32", torch.device("cpu")).__class__.__name__
    'nullcontext'
    """
    return nullcontext() if precision == "fp32" else torch.autocast(device.type, _AUTOCAST[precision])


def logits_of(model: DecoderLM, batch: Batch) -> Tensor:
    """The logits (B, T, V) of a batch, in float32 or float64."""
    logits_BTV = model(batch.inputs_BT, documents_BT=batch.documents_BT, positions_BT=batch.positions_BT)
    return logits_BTV.to(precise_dtype(logits_BTV))


def hidden_of(model: DecoderLM, batch: Batch) -> Tensor:
    """The final hidden vectors (B, T, D) of a batch, which the output head reads."""
    return model.hidden(batch.inputs_BT, documents_BT=batch.documents_BT, positions_BT=batch.positions_BT)


def loss_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The sum of the cross-entropies of all targets that count (those that are not -100).

    >>> loss_sum(torch.zeros(1, 2, 2), torch.tensor([[0, -100]]))
    tensor(0.6931)
    """
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")


def z_loss_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The sum of ``log^2 Z`` with ``Z = sum_v exp(logit_v)`` over all targets that count; it keeps logits near 0.

    Its gradient is ``2 log Z softmax(logits)``. Source: PaLM, arXiv 2204.02311, section 5; OLMo 2, arXiv 2501.00656.

    >>> z_loss_sum(torch.zeros(1, 2, 2), torch.tensor([[0, -100]]))
    tensor(0.4805)
    """
    log_z_BT = logits_BTV.logsumexp(-1).masked_fill(targets_BT < 0, 0.0)
    return log_z_BT.square().sum()


def count_targets(batch: Batch) -> int:
    """How many targets count.

    >>> count_targets(Batch(torch.tensor([[1, 2]]), torch.tensor([[2, -100]])))
    1
    """
    return int((batch.targets_BT >= 0).sum())


def eval_batches(packed: PackedTokens, batch_size: int, batches: int | None) -> Iterator[Batch]:
    """``batches`` batches of samples spread evenly over the text, all samples in order if None or if there are no more.

    Each batch is made when its turn comes, so a long text stays where it is.

    Raises:
        ValueError: if the text has no sample.
    """
    n = len(packed) if batches is None else min(len(packed), batches * batch_size)
    if n == 0:
        raise ValueError(
            f"text of {len(packed.tokens)} tokens is shorter than one sample of {packed.seq_len + 1}; give a longer one"
        )
    samples = np.arange(n) * len(packed) // n
    return (packed.batch(samples[start : start + batch_size]) for start in range(0, n, batch_size))


@torch.no_grad()
def mean_loss(model: DecoderLM, batches: Iterable[Batch], precision: Precision = "fp32") -> float:
    """The loss per target over batches, in evaluation mode; the mode of the model is restored.

    Raises:
        ValueError: if no batch has a target.
    """
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    sums, targets = [], 0
    try:
        with autocast(precision, device):
            for batch in batches:
                batch = batch.to(device)
                sums.append(loss_sum(logits_of(model, batch), batch.targets_BT))
                targets += count_targets(batch)
    finally:
        model.train(was_training)
    if targets == 0:
        raise ValueError(NO_TARGET)
    return torch.stack(sums).cpu().double().sum().item() / targets


def evaluate(
    model: DecoderLM,
    packed: PackedTokens,
    *,
    batch_size: int = 8,
    batches: int | None = None,
    precision: Precision = "fp32",
) -> dict[str, float]:
    """Loss (nats a token), perplexity (``exp(loss)``) and bits per byte (``loss / (ln 2 * bytes per token)``).

    Args:
        model: on any device; its mode is restored.
        packed: the text.
        batch_size: samples at a time.
        batches: how many batches, spread evenly over the text; all if None.
        precision: fp32, or autocast to bf16 or fp16.

    Raises:
        ValueError: if the text is shorter than one sample or is nothing but end-of-text.

    >>> import normstream
    >>> model = DecoderLM(normstream.DecoderConfig(vocab_size=257, dim=8, n_layers=1, n_heads=2))
    >>> normstream.initialize(model, seed=0)
    >>> scores = evaluate(model, PackedTokens(np.arange(100), seq_len=10, eot=256, n_bytes=100))
    >>> abs(scores["bits_per_byte"] - 8.0) < 0.5  # an untrained model guesses
    True
    """
    if packed.n_bytes == 0:
        raise ValueError(NO_TARGET)
    loss = mean_loss(model, eval_batches(packed, batch_size, batches), precision)
    return {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": loss / (math.log(2) * packed.bytes_per_token),
    }
