"""Leaving out layers: the right ones, a config that says so, and the function of the old model without them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.tiny_models import tiny_model
from torch import Tensor, nn

from normstream.checkpoints import load_source
from normstream.checkpoints.precise import answer, difference
from normstream.checkpoints.source import quiet_transformers
from normstream.checkpoints.surgery.prune import _configs, influence_of, prune
from normstream.inspect.anatomy import Anatomy, Call, LayerSite, StackAnatomy
from normstream.inspect.inputs import make_inputs


def silence(layer: Any, names: tuple[str, ...]) -> None:
    """Makes a layer hand on its input."""
    with torch.no_grad():
        for name in names:
            layer.get_submodule(name).weight.zero_()


WRITERS = ("self_attn.o_proj", "mlp.down_proj")


def test_the_layer_that_does_nothing_goes() -> None:
    model: Any = tiny_model("llama")
    silence(model.model.layers[1], WRITERS)
    inputs = make_inputs(model)
    shorter, report = prune(model, 1, inputs)
    assert report.dropped == (1,)
    assert report.influence[1] == pytest.approx(0.0, abs=1e-3)  # the arc cosine of a rounded 1
    assert min(report.influence[i] for i in (0, 2, 3)) > 0.05
    assert difference(answer(shorter, inputs), answer(model, inputs)) < 1e-6
    assert report.loss_after == pytest.approx(report.loss_before, abs=1e-5)
    assert len(model.model.layers) == 4


class Turn(nn.Module):
    """Turns a stream of two channels."""

    def __init__(self, degrees: float) -> None:
        super().__init__()
        angle = torch.deg2rad(torch.tensor(degrees))
        matrix = [[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]]
        self.register_buffer("matrix", 3.0 * torch.tensor(matrix))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix.T.to(x.dtype)  # type: ignore[operator]


def test_influence_is_the_angle() -> None:
    """A layer that turns every token by 45 degrees, at whatever scale, has influence 1/4."""
    model = nn.Sequential(Turn(45.0), Turn(90.0), Turn(180.0))
    layers = tuple(LayerSite(i, Call(str(i)), 1.0, ()) for i in range(3))
    stack = StackAnatomy("main", layers, (), (), 1.0)
    found = influence_of(model, {"input": torch.randn(1, 5, 2)}, stack)
    assert found == pytest.approx((0.25, 0.5, 1.0), abs=1e-3)


WRITERS_OF = {
    "gemma3_text": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "vit": ("attention.o_proj", "mlp.fc2"),
    "deepseek_v3": WRITERS,
}


@pytest.mark.parametrize("family", WRITERS_OF)
def test_config_without_the_layers(tmp_path: Path, family: str) -> None:
    """The saved model is one that plain transformers loads and that gives the same answer."""
    model: Any = tiny_model(family)
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == 4)
    dropped = (0,) if family == "deepseek_v3" else (0, 2)
    for i in dropped:
        for name in WRITERS_OF[family]:
            part: Any = layers[i].get_submodule(name)
            with torch.no_grad():
                part.weight.fill_(-1.0 if family == "gemma3_text" else 0.0)  # 1 + w = 0
                if getattr(part, "bias", None) is not None:
                    part.bias.zero_()
    inputs = make_inputs(model)
    shorter, report = prune(model, len(dropped), inputs)
    assert report.dropped == dropped
    if family == "gemma3_text":
        assert report.config["layer_types"] == [model.config.layer_types[i] for i in (1, 3)]
    if family == "deepseek_v3":
        assert report.config == {"num_hidden_layers": 3, "first_k_dense_replace": 0}
    assert difference(answer(shorter, inputs), answer(model, inputs)) < 1e-5
    with quiet_transformers():
        shorter.save_pretrained(tmp_path)  # type: ignore[operator]
        loaded: Any = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    assert difference(answer(loaded, inputs), answer(shorter, inputs)) < 1e-6
    assert torch.equal(answer(load_source(tmp_path).model, inputs), answer(loaded, inputs))


def test_encoder_decoder_needs_a_stack() -> None:
    model: Any = tiny_model("bart")
    with pytest.raises(ValueError, match="several stacks: state which one, encoder or decoder"):
        prune(model, 1)
    with pytest.raises(ValueError, match=r"no stack 'decodr'; did you mean 'decoder'\?"):
        prune(model, 1, stack="decodr")
    shorter, report = prune(model, 1, stack="decoder")
    assert report.config == {"decoder_layers": len(model.model.decoder.layers) - 1}
    assert len(shorter.model.encoder.layers) == len(model.model.encoder.layers)  # type: ignore


@pytest.mark.parametrize("n_layers", [0, 4, -1])
def test_number_of_layers(n_layers: int) -> None:
    with pytest.raises(ValueError, match=rf"expected 1 to 3 of the 4 layers to leave out, got {n_layers}"):
        prune(tiny_model("llama"), n_layers)


def test_shared_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="share their weights"):
        prune(tiny_model("albert"), 1)


def test_depth_in_a_multiplier_is_refused() -> None:
    """MiniCPM scales its residual by the root of the number of layers: no config has the old factor with fewer."""
    with pytest.raises(ValueError, match="the config cannot describe the model without these layers"):
        prune(tiny_model("minicpm3"), 1)


def test_model_without_a_config() -> None:
    model = nn.Sequential(nn.Sequential(Turn(45.0), Turn(90.0)))
    layers = tuple(LayerSite(i, Call(f"0.{i}"), 1.0, ()) for i in range(2))
    wiring = Anatomy((StackAnatomy("main", layers, (), (), 1.0),), None, False, None)
    with pytest.raises(ValueError, match="has no config of transformers"):
        prune(model, 1, {"input": torch.randn(1, 5, 2, dtype=torch.float64)}, wiring)


class Config:
    def to_dict(self) -> dict[str, Any]:
        return {
            "num_layers": 4,
            "heads": 4,
            "kinds": ["a", "b", "c", "d"],
            "sparse": [1, 3],
            "text": {"depth": 4, "kinds": [1, 2, 3, 4]},
            "dense": 2,
            "use_cache": True,
        }


def test_configs_that_are_tried() -> None:
    first, second, third, *more = _configs(Config(), 4, [0, 1, 3])
    assert first == {"num_layers": 3, "kinds": ["a", "b", "d"], "sparse": [1, 2]}
    assert second == {"heads": 3, "kinds": ["a", "b", "d"], "sparse": [1, 2]}
    assert third == {"text.depth": 3, "text.kinds": [1, 2, 4]}
    assert {**first, "dense": 2} in more
    assert {"num_layers": 3, "sparse": [1, 2]} in more


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_that_was_cast(dtype: torch.dtype) -> None:
    """Casting a model rounds buffers that no file holds, such as the frequencies of rotary positions."""
    shorter, report = prune(tiny_model("gemma2").to(dtype), 1)
    assert report.config["num_hidden_layers"] == 3
    assert "model.layers.3" not in dict(shorter.named_modules())


def test_weights_that_are_no_numbers() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_parameter("model.layers.1.self_attn.q_proj.weight").fill_(torch.nan)
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn.q_proj.weight holds NaN or infinity"):
        prune(model, 1)
