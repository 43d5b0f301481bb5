"""Initialization: one table of schemes, the same values on every device and for every placement with that scheme.

============== ============================ ===================================== =========================
scheme         matrices and embedding       matrices that write to the stream     cut
============== ============================ ===================================== =========================
plain          N(0, std)                    N(0, std)                             none
gpt2           N(0, std)                    N(0, std / sqrt(N))                   none
megatron_full  N(0, std)                    N(0, std / sqrt(N))                   3 standard deviations
============== ============================ ===================================== =========================

std is ``init_std``, by default sqrt(2 / (5 dim)); N is the number of sublayers, 2 n_layers. Norm gains start at an
effective 1, biases at 0.

Every parameter has a random generator of its own, seeded by the seed and the parameter's name: its values depend on
nothing else, so two placements with one scheme start with equal sublayers, and a model built on the meta device gets
the values that it would have had on the CPU.

Sources: GPT-2 (Radford et al. 2019), karpathy/nanoGPT:model.py; Megatron-full: allenai/OLMo:olmo/initialization.py
and the released SiameseNorm and HybridNorm code.
"""

import hashlib
import math

import torch
from torch import Tensor, nn

from normstream.layers import Layer
from normstream.models import DecoderLM


@torch.no_grad()
def initialize(model: DecoderLM, seed: int) -> None:
    """Sets every parameter of ``model`` by its scheme, in place.

    >>> from normstream.models import DecoderConfig
    >>> model = DecoderLM(DecoderConfig(placement="pre", dim=8, n_layers=1, n_heads=2))
    >>> initialize(model, seed=0)
    >>> round(model.tok_embeddings.weight.std().item() / (2 / (5 * 8)) ** 0.5, 1)
    1.0
    """
    config = model.config
    scheme = model.placement.init if config.init == "placement" else config.init
    cut = 3.0 if scheme == "megatron_full" else None
    std = config.resolved_init_std
    branch_std = std if scheme == "plain" else std / math.sqrt(2 * config.n_layers)

    model.tie()
    outputs = _branch_outputs(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            if not (config.tied and module is model.lm_head):
                _normal(module.weight, branch_std if module in outputs else std, cut, f"{seed}:{name}.weight")
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()


def _branch_outputs(model: DecoderLM) -> set[nn.Module]:
    sublayers = [getattr(layer, kind) for layer in model.layers if isinstance(layer, Layer) for kind in layer.kinds]
    return {getattr(sublayer, name) for sublayer in sublayers for name in sublayer.branch_outputs}


def _normal(parameter: Tensor, std: float, cut: float | None, stream: str) -> None:
    seed = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "big", signed=True)
    generator = torch.Generator().manual_seed(seed)
    values = torch.empty(parameter.shape, dtype=torch.float32)
    if cut is None:
        values.normal_(0.0, std, generator=generator)
    else:
        nn.init.trunc_normal_(values, 0.0, std, -cut * std, cut * std, generator=generator)
    parameter.copy_(values)
