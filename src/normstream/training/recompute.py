"""Layers as training calls them: compiled, and with activations that the backward pass computes again.

The inputs of sublayers alone (``normstream.ops.rebuild``) cost one more pass over memory for each junction.
Recomputation of a whole layer keeps its input alone and costs one more forward pass. The selective one also keeps the
results of matrix products and attention, which are nearly all of the time, and computes again what is cheap: junctions,
norms, rotations, activations, products of gates, casts. Junctions are not kept: they cost little and give up to
six activations a layer.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from normstream.models import trunks
from normstream.training.config import Recomputation

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "_grouped_mm"})
"""aten's matrix products."""


def wrap_layers(model: nn.Module, *, compiled: bool, recomputed: Recomputation = "none", every: int = 1) -> None:
    """Compiles each layer's forward, and makes it recompute its activations in the backward pass, if asked for.

    The layer's own ``__call__`` stays outside, and with it all hooks, which then see each layer once per forward pass.

    Args:
        model: the layers of whose stacks to wrap.
        compiled: whether to compile each layer.
        recomputed: nothing, sublayers' inputs alone, all but what is expensive, or whole layers.
        every: every how many layers of a stack one is recomputed, the first of them being layer 0.

    >>> from normstream.models import DecoderConfig, DecoderLM
    >>> wrap_layers(DecoderLM(DecoderConfig(dim=8, n_layers=1, n_heads=2)), compiled=False, recomputed="layer")
    """
    layer: Any
    for index, layer in ((i, layer) for trunk in trunks(model).values() for i, layer in enumerate(trunk.layers)):
        what = recomputed if index % every == 0 else "none"
        layer.rebuild_z = what == "inputs"
        if what == "selective":
            contexts = partial(create_selective_checkpoint_contexts, keep_the_expensive)
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
        if compiled:
            layer.forward = torch.compile(layer.forward)
        if what == "layer":
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def keep_the_expensive(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    """Whether the result of an operation is kept, which is so for matrix products and attention.

    >>> keep_the_expensive(None, torch.ops.aten.mm.default).name
    'MUST_SAVE'
    >>> keep_the_expensive(None, torch.ops.aten.silu.default).name
    'PREFER_RECOMPUTE'
    """
    name = op.name().split(".")[0].removeprefix("aten::")
    expensive = name in PRODUCTS or "attention" in name
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE
