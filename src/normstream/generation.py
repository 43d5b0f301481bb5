"""Text generation with a key-value cache.

Shape suffixes: B batch, T sequence, V vocabulary.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normstream.layers import KVCache
from normstream.models import DecoderLM
from normstream.models.evaluating import evaluating

MIN_TEMPERATURE = 1e-3
"""Below it, logits divided by the temperature can overflow float32."""


@torch.no_grad()
def generate(
    model: DecoderLM,
    prompt_BT: Int[Tensor, "B T"],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
    eot: int | None = None,
) -> Int[Tensor, "B T2"]:
    """The prompt and up to ``max_new_tokens`` further tokens.

    Args:
        model: the language model.
        prompt_BT: token ids, at least one a row, all rows of one length.
        max_new_tokens: tokens to add; prompt and answer must fit into ``max_seq_len``.
        temperature: 0 takes the likeliest token; otherwise samples from softmax(logits / temperature).
        top_k: samples among the k likeliest tokens only.
        seed: seed of the sampling.
        eot: stops when every row has produced this token; a finished row repeats it.

    >>> from normstream.models import DecoderConfig
    >>> model = DecoderLM(DecoderConfig(placement="pre", vocab_size=10, dim=8, n_layers=1, n_heads=2))
    >>> generate(model, torch.tensor([[1, 2]]), 3).shape
    torch.Size([1, 5])
    """
    _check(model, prompt_BT, max_new_tokens, temperature, top_k)
    generator = torch.Generator(device=prompt_BT.device).manual_seed(seed)
    cache, tokens_BT, new_BT = KVCache(), prompt_BT, prompt_BT
    finished = torch.zeros(prompt_BT.shape[0], 1, dtype=torch.bool, device=prompt_BT.device)
    with evaluating(model):
        for _ in range(max_new_tokens):
            logits_BV = model(new_BT, cache=cache)[:, -1]
            new_BT = _choose(logits_BV, temperature, top_k, generator)
            if eot is not None:
                new_BT = torch.where(finished, eot, new_BT)
                finished = finished | (new_BT == eot)
            tokens_BT = torch.cat((tokens_BT, new_BT), dim=1)
            if eot is not None and finished.all():
                break
    return tokens_BT


def _choose(
    logits_BV: Float[Tensor, "B V"], temperature: float, top_k: int | None, generator: torch.Generator
) -> Int[Tensor, "B 1"]:
    if temperature == 0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        least_BV = logits_BV.topk(min(top_k, logits_BV.shape[-1])).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_BV, -torch.inf)
    return torch.multinomial((logits_BV.float() / temperature).softmax(dim=-1), 1, generator=generator)


def _check(model: DecoderLM, prompt_BT: Tensor, max_new_tokens: int, temperature: float, top_k: int | None) -> None:
    length = prompt_BT.shape[1]
    if length < 1:
        raise ValueError("the prompt is empty; give at least one token")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    if length + max_new_tokens > model.config.max_seq_len:
        raise ValueError(
            f"prompt of {length} and {max_new_tokens} new tokens exceed max_seq_len {model.config.max_seq_len}; "
            f"ask for at most {max(0, model.config.max_seq_len - length)}"
        )
    if temperature != 0 and not MIN_TEMPERATURE <= temperature < math.inf:
        raise ValueError(f"temperature must be 0 or between {MIN_TEMPERATURE:g} and infinity, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
