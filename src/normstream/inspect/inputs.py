"""Inputs for a model that nobody described: read off the signature of its ``forward`` and the size of its embedding."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

IMAGE_SIZE = 32
"""Pixels a side for a model that does not say what it expects."""
SAMPLES = 6407
"""Samples of sound: about twenty vectors after the usual convolutions, of which each sees 400 and moves by 320."""


def make_inputs(
    model: nn.Module,
    text: str | None = None,
    tokenizer: Any = None,
    n_tokens: int = 31,
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments for ``model.forward``: one sequence of prime length, so that a token axis shows by its size.

    The sequence is ``text``, cut, or random tokens without special ones. The decoder of an encoder-decoder gets a
    sequence of its own, of the next smaller prime length; models of images and sound get random ones.

    Args:
        model: anything with ``input_ids``, ``pixel_values``, ``input_values`` or ``input_features`` in its signature,
            or with a token embedding and one required argument.
        text: what to run the model on; None for random tokens.
        tokenizer: a transformers tokenizer, needed with ``text``.
        n_tokens: the longest sequence, at least 2.
        seed: for random tokens.

    Raises:
        ValueError: for a text without a tokenizer, or if the signature does not say what the model takes.

    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embedding = nn.Embedding(50, 8)
    ...     def forward(self, input_ids):
    ...         return self.embedding(input_ids)
    >>> make_inputs(Model(), n_tokens=20)["input_ids"].shape
    torch.Size([1, 19])
    """
    if n_tokens < 2:
        raise ValueError(f"n_tokens must be at least 2, got {n_tokens}")
    parameters = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(seed)
    shared = {"use_cache": False} if "use_cache" in parameters else {}
    signals = {"pixel_values": _image_shape, "input_values": _sound_shape, "input_features": _spectrum_shape}
    signal = next((name for name in signals if name in parameters and "input_ids" not in parameters), None)
    if signal is not None:
        inputs = {signal: torch.randn(signals[signal](model), generator=generator)} | shared
        if "decoder_input_ids" in parameters:
            length = largest_prime(min(n_tokens, _longest(model)))
            inputs["decoder_input_ids"] = _random_ids(model, length, generator)
        return inputs
    name = _ids_name(model, parameters)
    n_tokens = largest_prime(min(n_tokens, _longest(model)))
    ids = _random_ids(model, n_tokens, generator) if text is None else _text_ids(model, text, tokenizer, n_tokens)
    inputs = {name: ids} | shared
    if "attention_mask" in parameters:
        inputs["attention_mask"] = torch.ones_like(ids)
    if "decoder_input_ids" in parameters:
        length = largest_prime(ids.shape[1] - 1)
        inputs["decoder_input_ids"] = _random_ids(model, length, generator) if text is None else ids[:, :length]
    return inputs


@torch.no_grad()
def check_runs(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raises ValueError, with what the model says, if it does not run with these inputs."""
    try:
        model(**inputs)
    except Exception as error:  # whatever a foreign model raises
        shapes = ", ".join(f"{name} {tuple(v.shape) if isinstance(v, Tensor) else v}" for name, v in inputs.items())
        raise ValueError(f"the model does not run with {shapes}: {error}; pass inputs that it takes") from error


def largest_prime(limit: int) -> int:
    """The largest prime number up to ``limit``, at least 2.

    >>> largest_prime(30), largest_prime(1)
    (29, 2)
    """
    return next((n for n in range(limit, 2, -1) if all(n % d for d in range(2, int(n**0.5) + 1))), 2)


def token_embedding(model: nn.Module) -> nn.Embedding | None:
    """The model's own answer if it has one, else its largest embedding table."""
    try:
        own = getattr(model, "get_input_embeddings", lambda: None)()
    except NotImplementedError:  # transformers, for models of sound
        own = None
    if isinstance(own, nn.Embedding):
        return own
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return max(tables, key=lambda table: table.num_embeddings, default=None)


def _ids_name(model: nn.Module, parameters: Any) -> str:
    if "input_ids" in parameters:
        return "input_ids"
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(required) == 1 and token_embedding(model) is not None:
        return required[0]
    raise ValueError(
        f"expected a model that takes input_ids or pixel_values, or one argument and has a token embedding; "
        f"its forward takes {', '.join(parameters)}: pass inputs, a dictionary of keyword arguments"
    )


def _longest(model: nn.Module) -> int:
    """The number of positions that the configuration says there are."""
    config = getattr(model, "config", None)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
    lengths = [getattr(config, name, None) for name in names]
    return min((length for length in lengths if isinstance(length, int) and length > 1), default=2**30)


def _random_ids(model: nn.Module, n_tokens: int, generator: torch.Generator) -> Tensor:
    table = token_embedding(model)
    size = getattr(getattr(model, "config", None), "vocab_size", None) if table is None else table.num_embeddings
    if not isinstance(size, int):
        raise ValueError("expected a model with a token embedding, or a vocab_size in its config: pass inputs yourself")
    special = _special_ids(model) | {getattr(table, "padding_idx", None)}
    usable = [token for token in range(size) if token not in special] or list(range(size))
    return torch.tensor(usable)[torch.randint(len(usable), (1, n_tokens), generator=generator)]


def _special_ids(model: nn.Module) -> set[int]:
    """Padding, image places and the like, which some models treat in their own way."""
    config = getattr(model, "config", None)
    values: dict[str, Any] = getattr(config, "to_dict", dict)()
    return {value for name, value in values.items() if name.endswith("token_id") and isinstance(value, int)}


def _text_ids(model: nn.Module, text: str, tokenizer: Any, n_tokens: int) -> Tensor:
    if tokenizer is None:
        raise ValueError(
            "a text needs a tokenizer, and this model came without one; leave the text out for random tokens"
        )
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=n_tokens)["input_ids"]
    if ids.shape[1] < 2:
        raise ValueError(f"expected a text of at least 2 tokens, got {ids.shape[1]}; give a longer one")
    table = token_embedding(model)
    if table is not None and int(ids.max()) >= table.num_embeddings:
        raise ValueError(
            f"the tokenizer gives token {int(ids.max())}, but the embedding has {table.num_embeddings} rows: "
            "it is another model's tokenizer"
        )
    return ids[:, : largest_prime(ids.shape[1])]


def _image_shape(model: nn.Module) -> tuple[int, int, int, int]:
    config = getattr(model, "config", None)
    size = getattr(config, "image_size", IMAGE_SIZE)
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return 1, getattr(config, "num_channels", 3), height, width


def _sound_shape(model: nn.Module) -> tuple[int, int]:
    return 1, SAMPLES


def _spectrum_shape(model: nn.Module) -> tuple[int, int, int]:
    """Whisper's: frequency bins, and twice as many frames as positions since a convolution halves them."""
    config = getattr(model, "config", None)
    return 1, getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500)
