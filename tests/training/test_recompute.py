"""Which operations the backward pass does again, and that gradients do not depend on it."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from normstream import DecoderConfig, DecoderLM, initialize
from normstream.ops import status
from normstream.training.config import Recomputation
from normstream.training.recompute import keep_the_expensive, wrap_layers

LAYERS = 4


class Calls(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.name().split(".")[0]] += 1
        return function(*args, **(kwargs or {}))


def model_of(**options: Any) -> DecoderLM:
    config = {"placement": "siamese", "vocab_size": 20, "dim": 16, "n_layers": LAYERS, "n_heads": 2, "dropout": 0.1}
    model = DecoderLM(DecoderConfig(**(config | options)))
    initialize(model, seed=0)
    return model.train()


def step(model: DecoderLM) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients."""
    torch.manual_seed(0)
    loss = model(torch.arange(12).view(2, 6)).logsumexp(-1).square().mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def counted(**recomputation: Any) -> Counter[str]:
    model = model_of()
    wrap_layers(model, compiled=False, **recomputation)
    with Calls() as calls:
        step(model)
    return calls.counts


def test_what_is_done_again():
    """Seven products with matrices a layer and one attention; SwiGLU's silu stands for all that is cheap."""
    none = counted()
    layer = counted(recomputed="layer")
    some = counted(recomputed="selective")
    half = counted(recomputed="layer", every=2)
    inputs = counted(recomputed="inputs")
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    again = {name: layer[name] - none[name] for name in ("aten::mm", "aten::silu", attention)}
    assert again == {"aten::mm": 7 * LAYERS, "aten::silu": LAYERS, attention: LAYERS}
    assert {name: half[name] - none[name] for name in again} == {name: n // 2 for name, n in again.items()}
    assert {name: some[name] - none[name] for name in again} == {"aten::mm": 0, "aten::silu": LAYERS, attention: 0}
    assert {name: inputs[name] - none[name] for name in again} == dict.fromkeys(again, 0)


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("recomputed", ["inputs", "selective", "layer"])
@pytest.mark.parametrize("every", [1, 3])
def test_gradients_are_the_same(precision: torch.dtype | None, recomputed: Recomputation, every: int):
    results = []
    for what in ("none", recomputed):
        model = model_of(drop_path=0.2)
        wrap_layers(model, compiled=False, recomputed=what, every=every)
        with torch.autocast("cpu", precision, enabled=precision is not None):
            results.append(step(model))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.untyped  # the tracer cannot follow the type checks of a test run
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("recomputed", ["selective", "layer"])
def test_compiled_gradients_are_the_same(recomputed: Recomputation, monkeypatch: pytest.MonkeyPatch):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: real(f, backend="aot_eager"))
    results = []
    ways: list[tuple[bool, Recomputation]] = [(False, "none"), (True, "none"), (True, recomputed)]
    for compiled, what in ways:
        torch._dynamo.reset()
        model = model_of(dropout=0.0)
        wrap_layers(model, compiled=compiled, recomputed=what)
        results.append(step(model))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[2], results[1], rtol=1e-6, atol=1e-7)


@pytest.mark.untyped
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("recomputed", ["selective", "layer"])
def test_compiled_with_dropout(recomputed: Recomputation, monkeypatch: pytest.MonkeyPatch):
    """The draws of the backward pass are those of the forward pass: the loss falls along the gradient as it must."""
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: real(f, backend="aot_eager"))
    torch._dynamo.reset()
    model = model_of(dropout=0.3, n_layers=2).double()
    wrap_layers(model, compiled=True, recomputed=recomputed)
    _, gradients = step(model)
    direction = {name: torch.randn_like(g) for name, g in gradients.items()}
    slope = sum((gradients[name] * d).sum().item() for name, d in direction.items())
    ends = []
    for sign in (1, -1):
        moved = model_of(dropout=0.3, n_layers=2).double()
        wrap_layers(moved, compiled=True, recomputed=recomputed)
        with torch.no_grad():
            for name, p in moved.named_parameters():
                p += sign * 1e-6 * direction[name]
        ends.append(step(moved)[0])
    assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(slope, rel=1e-5)


def test_fused_junctions_are_done_again():
    plain, some = counted(), counted(recomputed="selective")
    if status()["cpp"] != "compiled for the CPU":
        pytest.skip("no C++ compiler")
    assert plain["normstream::junction"] == 2 * LAYERS + 1
    assert some["normstream::junction"] == plain["normstream::junction"] + 2 * LAYERS
    assert some["normstream::junction_backward"] == plain["normstream::junction_backward"]
    assert counted(recomputed="inputs")["normstream::junction_z"] == 2 * LAYERS


def test_policy():
    ops = torch.ops.aten
    kept = [ops.mm.default, ops.addmm.default, ops._scaled_dot_product_flash_attention.default]
    again = [ops.silu.default, ops.mul.Tensor, ops._to_copy.default, ops.rsqrt.default]
    assert [keep_the_expensive(None, op).name for op in kept] == ["MUST_SAVE"] * 3
    assert [keep_the_expensive(None, op).name for op in again] == ["PREFER_RECOMPUTE"] * 4
