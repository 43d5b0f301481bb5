"""Post-pre SiameseNorm in a vision Transformer, against numbers of its released DeiT code.

Official code norms x lazily (at the start of the next sublayer), ours eagerly (at the end of the join): the official
``{l}.x`` is the input of our x norm.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from normstream.junctions import set_backend
from normstream.models import ViT, ViTConfig

FOLDER = Path(__file__).parents[1] / "golden"
HEADS, N_LAYERS = 4, 3
CONFIG = ViTConfig(
    placement="siamese",
    image_size=12,
    patch_size=4,
    channels=3,
    n_classes=10,
    dim=32,
    n_layers=N_LAYERS,
    n_heads=HEADS,
    ffn_dim=64,
)
PLAIN = {
    "token_embeddings.weight": "cls_token",
    "pos_embeddings.weight": "pos_embed",
    "patch_embeddings.projection.weight": "patch_embed.proj.weight",
    "patch_embeddings.projection.bias": "patch_embed.proj.bias",
    "head.weight": "head.weight",
    "head.bias": "head.bias",
}
"""Our names of what is outside the blocks to the official ones."""


def official_norm_names() -> list[dict[str, str]]:
    """Per junction: our norm to the official module. The two final norms have swapped names in the official code."""
    row = []
    for layer in range(N_LAYERS):
        for i in (1, 2):
            block = f"blocks.{layer}"
            row.append(
                {
                    "join.norm_x": f"{block}.post_norm{i}",
                    "read.norm_y": f"{block}.pre_norm{i}",
                    "read.norm_in": f"{block}.input_norm{i}",
                }
            )
    return [*row, {"join.norm_x": "pre_norm", "read.norm_y": "post_norm", "read.norm_in": "final_norm"}]


def official_values(golden: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Our parameters' names to official values (``param``) or gradients (``grad``); each official one is used once."""
    left = {name.removeprefix(f"{kind}."): value for name, value in golden.items() if name.startswith(f"{kind}.")}
    ours = {name: left.pop(official) for name, official in PLAIN.items()}
    junctions = ["before_layers"]
    for layer in range(N_LAYERS):
        junctions += [f"layers.{layer}.after_attention", f"layers.{layer}.after_feed_forward"]
    for part in ("weight", "bias"):
        for junction, norms in zip(junctions, official_norm_names(), strict=True):
            ours |= {f"{junction}.{norm}.{part}": left.pop(f"{name}.{part}") for norm, name in norms.items()}
        for layer in range(N_LAYERS):
            attention, block = f"layers.{layer}.attention", f"blocks.{layer}"
            for matrix, rows in zip("qkv", left.pop(f"{block}.attn.qkv.{part}").chunk(3), strict=True):
                ours[f"{attention}.w{matrix}.{part}"] = rows
            ours[f"{attention}.wo.{part}"] = left.pop(f"{block}.attn.proj.{part}")
            for matrix, official in (("w_up", "fc1"), ("w_down", "fc2")):
                ours[f"layers.{layer}.feed_forward.{matrix}.{part}"] = left.pop(f"{block}.mlp.{official}.{part}")
    assert not left, list(left)
    return ours


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(FOLDER / "siamese_deit.safetensors")


@pytest.fixture
def model(golden: dict[str, Tensor]) -> ViT:
    model = ViT(CONFIG).double()
    values, parameters = official_values(golden, "param"), dict(model.named_parameters())
    assert values.keys() == parameters.keys()
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value.view_as(parameters[name]))
    return model


def close(got: Tensor, wanted: Tensor, name: str, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance, msg=lambda m: f"{name}: {m}")


def test_every_inner_value(model: ViT, golden: dict[str, Tensor]) -> None:
    seen: dict[str, Tensor] = {}

    def keep_sublayer(layer: int, kind: str):
        def hook(module, args, output):
            seen[f"{layer}.{kind}_input"], seen[f"{layer}.{kind}_update"] = args[0], output

        return hook

    def keep_layer(layer: int):
        return lambda module, args, output: seen.update({f"{layer}.y": output[0][1]})

    def keep_x(layer: int):
        return lambda module, args: seen.update({f"{layer}.x": args[0]})

    blocks: Any = model.layers
    for index, layer in enumerate(blocks):
        layer.attention.register_forward_hook(keep_sublayer(index, "attn"))
        layer.feed_forward.register_forward_hook(keep_sublayer(index, "ffn"))
        layer.register_forward_hook(keep_layer(index))
        layer.after_feed_forward.join.norm_x.register_forward_pre_hook(keep_x(index))
    model.before_layers.register_forward_hook(lambda module, args, output: seen.update(embed=args[1]))
    hidden = model.hidden(golden["input.image"])
    for name, value in seen.items():
        close(value, golden[f"hidden.{name}"], name)
    assert {f"hidden.{name}" for name in seen} == {name for name in golden if name.startswith("hidden.")}
    close(hidden, golden["output.final_hidden"], "final hidden")


def largest(name: str, values: dict[str, Tensor]) -> float:
    """The largest magnitude of the official tensor that a value is from; queries, keys and values share one."""
    names = [name.replace(".wk.", f".w{matrix}.") for matrix in "qkv"] if ".wk." in name else [name]
    return max(values[name].abs().max().item() for name in names)


@pytest.mark.parametrize("backend", ["auto", "plain"])
def test_logits_and_every_gradient(model: ViT, golden: dict[str, Tensor], backend: Any) -> None:
    set_backend(model, backend)
    image = golden["input.image"].clone().requires_grad_()
    logits = model(image)
    close(logits, golden["output.logits"], "logits")
    loss = (golden["loss.weight"] * logits).sum()
    close(loss, golden["loss.value"][0], "loss")
    loss.backward()
    wanted = official_values(golden, "grad") | {"image": golden["grad_input.image"]}
    found = {name: p.grad for name, p in model.named_parameters()} | {"image": image.grad}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        gradient = found[name]
        assert gradient is not None, name
        close(gradient, value.view_as(gradient), name, tolerance=1e-7 * largest(name, wanted))
    assert json.loads((FOLDER / "siamese_deit.json").read_text())["zero_gradient"] == []
