"""Distances of layers from their skip connection, against closed forms and torch's own Jacobian."""

import math
from typing import Any

import pytest
import torch
from tests.inspect.wired import wired
from torch import Tensor, nn

from normstream.init import initialize
from normstream.inspect.anatomy import Anatomy, Call, LayerSite, StackAnatomy
from normstream.inspect.measures.jacobian import jacobian_distances
from normstream.models import DecoderConfig, DecoderLM


class Linears(nn.Module):
    """x <- skip x + A x in every layer, added in place."""

    def __init__(self, skip: float) -> None:
        super().__init__()
        self.skip = skip
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))
        for layer in self.layers:
            layer.register_forward_hook(self.add)

    def add(self, layer: nn.Module, args: tuple[Tensor], update: Tensor) -> Tensor:
        (x,) = args
        x *= self.skip
        x += update
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = 1.0 * x
        for layer in self.layers:
            x = layer(x)
        return x


def linear_anatomy(skip: float) -> Anatomy:
    sites = tuple(LayerSite(index, Call(f"layers.{index}"), skip, ()) for index in range(2))
    return Anatomy((StackAnatomy("main", sites, (), (), 1.0),), None, False, None)


@pytest.mark.parametrize("skip", [1.0, 2.5])
def test_the_distance_of_a_linear_layer_is_the_norm_of_its_matrix(skip: float) -> None:
    model, x = Linears(skip).eval(), torch.randn(1, 5, 16)
    exact, notes = jacobian_distances(model, {"x": x}, linear_anatomy(skip), probes=80)
    estimated, _ = jacobian_distances(model, {"x": x}, linear_anatomy(skip), probes=8)
    for index, layer in enumerate(model.layers):
        expected = layer.weight.norm().item() / math.sqrt(16)  # type: ignore[union-attr]
        assert exact["main", index] == pytest.approx(expected, rel=1e-5)
        assert estimated["main", index] == pytest.approx(expected, rel=0.2)
    assert notes == ()


def test_the_distance_of_a_two_stream_layer_is_that_of_its_whole_jacobian() -> None:
    model = DecoderLM(DecoderConfig(placement="siamese", dim=8, n_layers=2, n_heads=2)).double().eval()
    initialize(model, seed=0)
    tokens = torch.arange(3)[None]
    found, _ = jacobian_distances(model, {"tokens_BT": tokens}, None, probes=48)

    (context,) = model._contexts(torch.arange(3)[None], None, 3, None).values()
    first: Any = model.before_layers
    state, _ = first((), model.tok_embeddings(tokens))

    def layer(flat: Tensor) -> Tensor:
        streams = tuple(flat.view(2, 1, 3, 8))
        after, *_ = model.layers[0](streams, first.read(streams)[1], context)
        return torch.stack(after).flatten()

    jacobian: Any = torch.autograd.functional.jacobian(layer, torch.stack(state).flatten().detach())
    assert found["main", 0] == pytest.approx((jacobian - torch.eye(48)).norm().item() / math.sqrt(48), rel=1e-9)


def test_four_probes_are_within_a_tenth_of_the_exact_distance() -> None:
    case = wired("llama")
    case.inputs["input_ids"] = case.inputs["input_ids"][:, :5]
    exact, _ = jacobian_distances(case.model, case.inputs, case.anatomy, probes=5 * 32)
    estimated, _ = jacobian_distances(case.model, case.inputs, case.anatomy)
    for key, value in exact.items():
        assert estimated[key] == pytest.approx(value, rel=0.1)


def test_a_layer_that_adds_nothing_is_at_no_distance() -> None:
    case = wired("llama")
    for layer in case.model.model.layers[1:]:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    found, _ = jacobian_distances(case.model, case.inputs, case.anatomy)
    assert found["main", 0] > 0.1
    assert [found["main", index] for index in (1, 2, 3)] == [0, 0, 0]


def test_a_layer_that_changes_the_shape_is_named_in_a_note() -> None:
    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4)])

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x))

    found, notes = jacobian_distances(Halving().eval(), {"x": torch.randn(1, 3, 8)}, linear_anatomy(1.0))
    assert list(found) == [("main", 0)]
    assert "layers.1" in notes[0]
