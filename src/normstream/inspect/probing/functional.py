"""Normalising operations outside norm modules: what a probe that works with modules cannot see."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
NORMS = {aten.native_layer_norm.default, aten._fused_rms_norm.default, aten.native_group_norm.default}
ROOTS = {aten.rsqrt.default, aten.sqrt.default, aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim}
POWERS = {aten.pow.Tensor_Scalar: (0.5, -0.5)}


def functional_norms(model: nn.Module, inputs: Mapping[str, Any], norms: Mapping[str, object]) -> dict[str, int]:
    """Counts normalising operations of one forward pass by the innermost module that they run in, norms left out.

    Counted are layer, RMS and group norms, and roots and vector norms that give one number for a whole row (RMS norms
    that are written out). ``norms`` holds the paths of the norm modules.

    >>> class QK(nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.normalize(x, dim=-1)
    >>> model = nn.Sequential(nn.LayerNorm(4), QK())
    >>> functional_norms(model, {"input": torch.randn(3, 4)}, {"0": None})
    {'1': 1}
    """
    counter = _Counter()
    handles = []
    for path, module in model.named_modules():
        where = None if path in norms else path
        handles.append(module.register_forward_pre_hook(lambda *_, where=where: counter.stack.append(where)))
        handles.append(module.register_forward_hook(lambda *_: counter.leave(), always_call=True))
    try:
        with torch.no_grad(), counter:
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return dict(counter.counts)


class _Counter(TorchDispatchMode):
    """Sees every operation below the autograd level; the hooks tell it which module is running."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.stack: list[str | None] = []
        """Paths of the modules that are running, outermost first; None for a norm."""

    def leave(self) -> None:
        self.stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        innermost = self.stack[-1] if self.stack else None
        if innermost is not None and None not in self.stack and _normalises(func, args, output):
            self.counts[innermost] += 1
        return output


def _normalises(func: Any, args: Any, output: Any) -> bool:
    if func in NORMS:
        return True
    if func not in ROOTS and not (func in POWERS and args[1] in POWERS[func]):
        return False
    return isinstance(output, Tensor) and output.ndim > 1 and _is_one_a_row(args[0], output)


def _is_one_a_row(source: Any, output: Tensor) -> bool:
    """A root of a statistic has one number a row: its last axis is 1, or the reduction took it away."""
    return output.shape[-1] == 1 or (isinstance(source, Tensor) and output.ndim < source.ndim)
