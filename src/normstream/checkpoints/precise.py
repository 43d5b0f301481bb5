"""Running a model in float64 throughout, also where its code asks for float32.

Norms and softmaxes of transformers upcast to float32 whatever they are given, and in a float64 model that is a
downcast: two models that are the same function would then differ by float32's rounding.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normstream.checkpoints.fill import not_finite
from normstream.inspect.hooks import tensors_in
from normstream.inspect.probing.subject import make_eager


class Float64(TorchFunctionMode):
    """Inside, a request for float32 gives float64.

    >>> with Float64():
    ...     (torch.ones(1).double().float() / 3).dtype, torch.zeros(1, dtype=torch.float32).dtype
    (torch.float64, torch.float64)
    """

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        wider = [torch.float64 if arg is torch.float32 else arg for arg in args]
        named = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return func(*wider, **named)


def in_float64(model: nn.Module) -> nn.Module:
    """A copy of a model in float64 and evaluation mode, experts in plain operations; to be run inside ``Float64()``."""
    exact = copy.deepcopy(model).double().eval()
    make_eager(exact)
    return exact


def check_finite(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the parameter if it is one, where a model gives NaN or infinity."""
    if broken := not_finite(dict(model.named_parameters())):
        raise ValueError(f"{broken[0]} holds NaN or infinity; expected a model whose weights are finite numbers")
    if not answer(model, inputs).isfinite().all():
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        raise ValueError(f"the model's answer is not finite in {dtype}: see normstream inspect for what overflows")


@torch.no_grad()
def answer(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """What a model returns first: logits where it has a head, else its last hidden state."""
    return next(tensors_in(model(**inputs))).clone()


def exact_answer(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """The answer of a model's copy in float64."""
    with Float64():
        return answer(in_float64(model), widened(inputs))


def widened(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same inputs, pixels and other floats in float64."""
    return {
        key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in inputs.items()
    }


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference of two answers, relative to the largest value.

    >>> difference(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 5.0]))
    0.2
    """
    scale = max(float(expected.abs().max()), torch.finfo(torch.float64).tiny)
    return float((found.double() - expected.double()).abs().max()) / scale
