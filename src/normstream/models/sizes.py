"""How many parameters a model has, and how many of them a token meets."""

from typing import Any

import torch

from normstream.layers import MoE
from normstream.models.build import build_model
from normstream.models.model_config import ModelConfig


def total_parameters(config: ModelConfig) -> int:
    """The number of parameters of a model, a tied matrix counted once; no memory is used for them.

    >>> from normstream.models import DecoderConfig
    >>> total_parameters(DecoderConfig(placement="pre", vocab_size=10, dim=8, n_layers=1, n_heads=2, ffn_dim=16))
    824
    """
    return sum(parameter.numel() for parameter in _on_meta(config).parameters())


def active_parameters(config: ModelConfig) -> int:
    """The number of parameters without the experts that a token is not given to; embedding and head count.

    >>> from normstream.layers import MoEConfig
    >>> from normstream.models import DecoderConfig
    >>> sizes = {"placement": "pre", "vocab_size": 10, "dim": 8, "n_layers": 1, "n_heads": 2, "ffn_dim": 16}
    >>> one_of_four = DecoderConfig(**sizes, moe=MoEConfig(n_experts=4, top_k=1, normalized=False))
    >>> active_parameters(one_of_four) - active_parameters(DecoderConfig(**sizes))  # the router
    32
    """
    model = _on_meta(config)
    idle = 0
    for module in model.modules():
        if isinstance(module, MoE):
            n_experts, top_k = len(module.experts.w_up.weight), module.router.top_k
            of_experts = sum(p.numel() for p in module.experts.parameters() if p.ndim == 3)
            idle += of_experts // n_experts * (n_experts - top_k)
    return sum(parameter.numel() for parameter in model.parameters()) - idle


def _on_meta(config: ModelConfig) -> Any:
    with torch.device("meta"):
        return build_model(config)
