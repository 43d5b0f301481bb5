"""The conventions of released model families, so that a decoder of ours is the same function as theirs.

A family says everything but the sizes: where the norms sit and what they are, activation, biases, positions, windows,
caps and multipliers. Numbers in which the released models of one family differ (eps, the base of the rotary angles,
the window) are the defaults of the family's configuration class in transformers; give others where a model has them.

============= ================================== ====================================================================
family        placement                          source, huggingface/transformers:
============= ================================== ====================================================================
llama         pre                                models/llama/modeling_llama.py
qwen3         pre, QK-norm for each head         models/qwen3/modeling_qwen3.py
deepseek_v3   pre, norms of the latent vectors   models/deepseek_v3/modeling_deepseek_v3.py
olmo          pre, norms without gains           models/olmo/modeling_olmo.py
gpt2          gpt2                               models/gpt2/modeling_gpt2.py
gemma2        gemma2                             models/gemma2/modeling_gemma2.py
gemma3        gemma3, QK-norm for each head      models/gemma3/modeling_gemma3.py, the text model
olmo2         olmo2, QK-norm over all heads      models/olmo2/modeling_olmo2.py
glm4          glm4                               models/glm4/modeling_glm4.py
cohere2       parallel, one norm                 models/cohere2/modeling_cohere2.py
gpt_neox      parallel, two norms                models/gpt_neox/modeling_gpt_neox.py
bloom         bloom                              models/bloom/modeling_bloom.py
phi           parallel, one norm                 models/phi/modeling_phi.py
============= ================================== ====================================================================

Gemma multiplies the embedding by sqrt(dim) rounded to the dtype of the activations: 55.5 for 55.43 in bfloat16.
"""

import math
from dataclasses import replace
from typing import Any

from normstream.layers import LatentConfig, PositionConfig
from normstream.layers.inner import Inner
from normstream.models.config import DecoderConfig
from normstream.names import nearest
from normstream.norms import NormConfig

RMS = NormConfig(kind="rms", eps=1e-6, cast="before_gain")
LAYER = NormConfig(kind="layer", eps=1e-5, bias=True)
GEMMA_RMS = NormConfig(kind="rms", eps=1e-6, gain="zero_centered", cast="after_gain")

FAMILIES: dict[str, DecoderConfig] = {
    "llama": DecoderConfig(placement="pre", norm=RMS),
    "qwen3": DecoderConfig(placement="pre", norm=RMS, inner=Inner(qk="model")),
    "deepseek_v3": DecoderConfig(
        placement="pre",
        norm=RMS,
        inner=Inner(eps=1e-6),  # a constant in their code, whatever the model's eps
        positions=PositionConfig(pairing="interleaved"),
        latent=LatentConfig(kv_rank=512, q_rank=1536, nope_head_dim=128, rope_head_dim=64, v_head_dim=128),
    ),
    "olmo": DecoderConfig(placement="pre", norm=NormConfig(kind="layer", eps=1e-5, gain="none")),
    "gpt2": DecoderConfig(
        placement="gpt2",
        norm=LAYER,
        activation="gelu_tanh",
        bias="all",
        positions=PositionConfig(kind="learned"),
        tied=True,
    ),
    "gemma2": DecoderConfig(
        placement="gemma2",
        norm=GEMMA_RMS,
        activation="geglu_tanh",
        window=4096,
        full_every=2,
        attention_cap=50.0,
        logit_cap=30.0,
        tied=True,
    ),
    "gemma3": DecoderConfig(
        placement="gemma3",
        norm=GEMMA_RMS,
        activation="geglu_tanh",
        window=4096,
        full_every=6,
        positions=PositionConfig(theta=1_000_000.0, local_theta=10_000.0),
        tied=True,
    ),
    "olmo2": DecoderConfig(placement="olmo2", norm=NormConfig(kind="rms", eps=1e-5, cast="after_gain")),
    "glm4": DecoderConfig(
        placement="glm4",
        norm=replace(RMS, eps=1.5625e-7),
        bias="qkv",
        positions=PositionConfig(fraction=0.5, pairing="interleaved"),
    ),
    "cohere2": DecoderConfig(
        placement="parallel(norms=1)",
        norm=NormConfig(kind="layer", eps=1e-5, bias=False),
        window=4096,
        full_every=4,
        positions=PositionConfig(pairing="interleaved", layers="windowed"),
        logit_multiplier=0.0625,
        tied=True,
    ),
    "gpt_neox": DecoderConfig(
        placement="parallel(norms=2)",
        norm=LAYER,
        activation="gelu",
        bias="all",
        positions=PositionConfig(fraction=0.25),
    ),
    "bloom": DecoderConfig(
        placement="bloom",
        norm=LAYER,
        activation="gelu_tanh",
        bias="all",
        positions=PositionConfig(kind="alibi"),
        tied=True,
    ),
    "phi": DecoderConfig(
        placement="parallel(norms=1)",
        norm=LAYER,
        activation="gelu_tanh",
        bias="all",
        head_bias=True,
        positions=PositionConfig(fraction=0.5),
    ),
}
"""The conventions of each family, at our default sizes; ``family`` gives them other sizes."""

ROOT_DIM_EMBEDDING = ("gemma2", "gemma3")
"""Families that multiply the embedding by the square root of its width."""


def family(name: str, **dimensions: Any) -> DecoderConfig:
    """A configuration with the conventions of the family ``name``; ``dimensions`` are fields of ``DecoderConfig``.

    Raises ValueError with the nearest name for an unknown family, and what ``DecoderConfig`` raises.

    Source: huggingface/transformers, see the module's table.

    >>> config = family("gemma2", dim=256, n_heads=8)
    >>> config.placement, config.embedding_multiplier, config.logit_cap
    ('gemma2', 16.0, 30.0)
    """
    if name not in FAMILIES:
        raise ValueError(f"unknown family {name!r}; {nearest(name, FAMILIES)}")
    conventions = FAMILIES[name]
    if name in ROOT_DIM_EMBEDDING:
        dimensions.setdefault("embedding_multiplier", math.sqrt(dimensions.get("dim", conventions.dim)))
    return replace(conventions, **dimensions)
