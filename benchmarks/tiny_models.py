"""Tiny random models of every family of transformers, for tests and for the comparison with the table of placements.

Sizes are cut by the names of the fields of each configuration class (``tiny_sizes``). Gains, biases and (where the
configuration has one) eps are randomized, so that a wrong map between two models, or an answer that was guessed from
defaults, cannot pass.
"""

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.tiny_sizes import EXCEPTIONS, NEVER_TINY, SIZES, SPECIAL_TOKENS, VOCAB_SIZE
from normstream.names import nearest


def names() -> tuple[str, ...]:
    """Every model type that has a causal, masked or encoder-decoder language model, and ViT.

    >>> "gemma2" in names()
    True
    """
    heads = _heads()
    return tuple(sorted({name for head in heads[:3] for name in head if name not in NEVER_TINY} | {"vit"}))


def tiny_config(name: str, seed: int = 0) -> Any:
    """A tiny configuration of one model type; every eps drawn log-uniformly from 1e-5 ... 1e-3.

    Raises:
        ValueError: for a model type that transformers does not have.
    """
    from transformers import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        raise ValueError(f"transformers has no model type {name!r}; {nearest(name, names())}")
    whole, wanted = CONFIG_MAPPING[name], model_class(name).config_class
    part_of_it = wanted in {type(part) for part in _parts(whole).values()}  # of a family that also sees or hears
    return _tiny(wanted if part_of_it else whole, torch.Generator().manual_seed(seed))


def tiny_model(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A tiny random model with its language (or classification) head, in evaluation mode, attention and experts eager.

    Raises:
        ValueError: for a model type that transformers does not have, or that has no such head.
    """
    config = tiny_config(name, seed)
    config._attn_implementation = config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # for what the class itself draws and ``randomize`` only moves
        model = model_class(name)(config)
    randomize(model, seed)
    return model.to(dtype).eval()


def model_class(name: str) -> Any:
    """The class of transformers with a language head for a model type: encoder-decoder, masked, causal, or image.

    Raises:
        ValueError: for a model type without such a head.
    """
    import transformers

    causal, masked, sequence, image = _heads()
    found = next((head[name] for head in (sequence, masked, causal, image) if name in head), None)
    if found is None:
        raise ValueError(f"transformers has no language or classification head for {name!r}")
    return getattr(transformers, found if isinstance(found, str) else found[0])


def randomize(model: nn.Module, seed: int = 0) -> None:
    """Draws matrices at 1 / sqrt(fan_in), embeddings at 0.5, and moves every gain and bias by up to 0.3 in place."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) in embeddings:
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
            elif parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(_fan_in(parameter)))
            elif parameter.is_floating_point():
                parameter.add_(0.6 * torch.rand(parameter.shape, generator=generator) - 0.3)


def _fan_in(matrix: Tensor) -> int:
    """Inputs of a Linear, of stacked ones (experts, in, out or out, in: of similar size here), or of a convolution."""
    return matrix.shape[-1] if matrix.ndim < 4 else math.prod(matrix.shape[1:])


def _tiny(config_class: Any, generator: torch.Generator, **flags: bool) -> Any:
    parameters = inspect.signature(config_class.__init__).parameters
    fields = set(parameters) | set(config_class.attribute_map)
    exceptions = EXCEPTIONS.get(config_class.model_type, {})
    values = {name: value for name, value in SIZES.items() if name in fields}
    values |= {name: token for name, token in SPECIAL_TOKENS.items() if _is_beyond(parameters.get(name))}
    values |= {name: _draw_eps(generator) for name in sorted(fields) if _is_eps(name)}
    values = {name: value for name, value in values.items() if not _is_switched_off(name, parameters)}
    for name, part in _parts(config_class).items():
        kept = {flag: True for flag in ("is_decoder", "add_cross_attention") if getattr(part, flag, False)}
        values[name] = _tiny(type(part), generator, **kept)
    return config_class(**(values | exceptions | flags))


def _parts(config_class: Any) -> dict[str, Any]:
    """The configurations inside a configuration, with default values: text, vision, audio, encoder, decoder."""
    if not config_class.sub_configs:
        return {}
    whole = config_class()
    parts = {name: getattr(whole, name, None) for name in config_class.sub_configs}
    return {name: part for name, part in parts.items() if part is not None}


def _is_beyond(field: inspect.Parameter | None) -> bool:
    """Whether a token id's default does not fit into the tiny vocabulary."""
    return field is not None and isinstance(field.default, int) and field.default >= VOCAB_SIZE


def _is_switched_off(name: str, parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Whether giving a number would switch on what a family does without by default: another norm, a low rank."""
    return name in parameters and parameters[name].default is None and name.endswith(("_eps", "_lora_rank"))


def _is_eps(name: str) -> bool:
    return name in ("eps", "hc_eps") or ("norm" in name and "eps" in name)


def _draw_eps(generator: torch.Generator) -> float:
    return 10 ** (-5 + 2 * torch.rand((), generator=generator).item())


def _heads() -> tuple[Any, ...]:
    from transformers.models.auto import modeling_auto

    return (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    )
