"""The scores of a language model on held-out text."""

import math

from normstream.data import PackedTokens
from normstream.models import DecoderLM
from normstream.tasks.language_modeling import NO_TARGET, mean_loss
from normstream.tasks.losses import Precision
from normstream.tasks.task import spread


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
    >>> import numpy as np
    >>> model = DecoderLM(normstream.DecoderConfig(vocab_size=257, dim=8, n_layers=1, n_heads=2))
    >>> normstream.initialize(model, seed=0)
    >>> scores = evaluate(model, PackedTokens(np.arange(100), seq_len=10, eot=256, n_bytes=100))
    >>> abs(scores["bits_per_byte"] - 8.0) < 0.5  # an untrained model guesses
    True
    """
    if packed.n_bytes == 0:
        raise ValueError(NO_TARGET)
    loss = mean_loss(model, spread(packed, batch_size, batches), precision)
    return {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "bits_per_byte": loss / (math.log(2) * packed.bytes_per_token),
    }
