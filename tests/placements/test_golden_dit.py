"""Post-pre SiameseNorm against numbers of its released DiT code, with that model's own sublayers written here.

The junctions come from the public placement name; the input norms have no gain, since adaLN's shift and scale, which
belong to the sublayers here, take its place. So does adaLN's gate: the update that the junctions receive is gated.
Official code norms x lazily (at the start of the next sublayer), ours eagerly (at the end of the join): the official
``{l}.x`` is the input of our x norm.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from normstream import placements
from normstream.norms import NormConfig

FOLDER = Path(__file__).parents[1] / "golden"
DIM, HEADS, N_LAYERS, PATCH, SIDE = 32, 4, 3, 2, 3
Weights = dict[str, Tensor]


def official_norm_names() -> list[dict[str, str]]:
    """Per junction: our norm to the official module."""
    row = [
        {"join.norm_x": f"blocks.{layer}.postnorm{i}", "read.norm_y": f"blocks.{layer}.prenorm{i}"}
        for layer in range(N_LAYERS)
        for i in (1, 2)
    ]
    return [*row, {"join.norm_x": "postnorm", "read.norm_y": "prenorm"}]


@pytest.fixture(scope="module")
def golden() -> Weights:
    return load_file(FOLDER / "siamese_dit.safetensors")


@pytest.fixture(scope="module")
def leaves(golden) -> Weights:
    """The official weights that are no norms of a stream."""
    names = {name.removeprefix("param.") for name in golden if name.startswith("param.")}
    return {n: golden[f"param.{n}"].clone().requires_grad_() for n in names if "norm" not in n}


@pytest.fixture(scope="module")
def row(golden) -> nn.ModuleList:
    junctions = placements.get("siamese").junctions(
        dim=DIM,
        n_layers=N_LAYERS,
        norm=NormConfig(kind="layer", eps=1e-6, bias=True),
        input_norm=NormConfig(kind="layer", eps=1e-6, gain="none"),
    )
    row = nn.ModuleList(junctions).double()
    ours, used = dict(row.named_parameters()), set()
    for i, names in enumerate(official_norm_names()):
        for our_name, official in names.items():
            for part in ("weight", "bias"):
                ours.pop(f"{i}.{our_name}.{part}").data.copy_(golden[f"param.{official}.{part}"])
                used.add(f"param.{official}.{part}")
    assert ours == {}, "every norm of the row is written once"
    assert used == {name for name in golden if name.startswith("param.") and "norm" in name}, "each official norm once"
    return row


def linear(x: Tensor, w: Weights, name: str) -> Tensor:
    return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])


def attention(z: Tensor, w: Weights, layer: int) -> Tensor:
    qkv = linear(z, w, f"blocks.{layer}.attn.qkv")
    q, k, v = qkv.view(*z.shape[:2], 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4)
    return linear(
        F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(z.shape), w, f"blocks.{layer}.attn.proj"
    )


def feed_forward(z: Tensor, w: Weights, layer: int) -> Tensor:
    hidden = F.gelu(linear(z, w, f"blocks.{layer}.mlp.fc1"), approximate="tanh")
    return linear(hidden, w, f"blocks.{layer}.mlp.fc2")


def modulate(z: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return z * (1 + scale[:, None]) + shift[:, None]


def adaptive(kind: str, w: Weights, layer: int, condition: Tensor) -> Callable[[Tensor], Tensor]:
    """The sublayer with adaLN-zero around it: normed z to gated update."""
    chunks = linear(F.silu(condition), w, f"blocks.{layer}.adaLN_modulation.1").chunk(6, dim=1)
    shift, scale, gate = chunks[:3] if kind == "attn" else chunks[3:]
    branch = attention if kind == "attn" else feed_forward
    return lambda z: gate[:, None] * branch(modulate(z, shift, scale), w, layer)


def timestep_and_label(t: Tensor, label: Tensor, w: Weights) -> Tensor:
    angles = t[:, None] * torch.exp(-math.log(10_000) * torch.arange(128, dtype=torch.float64) / 128)
    features = torch.cat((angles.cos(), angles.sin()), dim=-1)
    time = linear(F.silu(linear(features, w, "t_embedder.mlp.0")), w, "t_embedder.mlp.2")
    return time + w["y_embedder.embedding_table.weight"][label]


def unpatchify(patches: Tensor) -> Tensor:
    grid = patches.view(-1, SIDE, SIDE, PATCH, PATCH, 6)
    return torch.einsum("nhwpqc->nchpwq", grid).reshape(-1, 6, SIDE * PATCH, SIDE * PATCH)


def assert_gradient(name: str, got: Tensor | None, wanted: Tensor) -> None:
    assert got is not None, name
    error = (got - wanted).abs().max().item()
    assert error <= 1e-7 * wanted.abs().max().item(), f"{name}: {error}"


def test_streams_and_inputs_from_recorded_updates(row, leaves, golden, run_row):
    """The recorded updates are replayed, gated: only our junctions are between them and the recorded streams."""
    before_norm: list[Tensor] = []
    hooks = [
        junction.join.norm_x.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
        for junction in row
    ]
    fused: list[Tensor] = []
    hooks.append(row[-1].read.norm_in.register_forward_pre_hook(lambda module, args: fused.append(args[0])))
    replayed, modulations = [], []
    for layer in range(N_LAYERS):
        name = f"blocks.{layer}.adaLN_modulation.1"
        chunks = linear(F.silu(golden["hidden.cond"]), leaves, name).chunk(6, dim=1)
        for kind, (shift, scale, gate) in (("attn", chunks[:3]), ("ffn", chunks[3:])):
            update = gate[:, None] * golden[f"hidden.{layer}.{kind}_update"]
            replayed.append(lambda z, update=update: update)
            modulations.append((shift, scale))
    states, inputs = run_row(row, golden["hidden.embed"], replayed)
    for hook in hooks:
        hook.remove()

    def close(got: Tensor, name: str) -> None:
        torch.testing.assert_close(got, golden[name], rtol=0, atol=1e-9, msg=lambda m: f"{name}: {m}")

    for layer in range(N_LAYERS):
        close(modulate(inputs[2 * layer], *modulations[2 * layer]), f"hidden.{layer}.attn_input")
        close(modulate(inputs[2 * layer + 1], *modulations[2 * layer + 1]), f"hidden.{layer}.ffn_input")
        close(before_norm[2 * layer + 2], f"hidden.{layer}.x")
        close(states[2 * layer + 2][1], f"hidden.{layer}.y")
    close(fused[0], "hidden.final_layer_input")


def test_prediction_and_every_gradient(row, leaves, golden, run_row):
    image = golden["input.image"].clone().requires_grad_()
    patches = F.conv2d(image, leaves["x_embedder.proj.weight"], leaves["x_embedder.proj.bias"], stride=PATCH)
    embedding = patches.flatten(2).transpose(1, 2) + golden["param.pos_embed"]
    condition = timestep_and_label(golden["input.t"], golden["input.label"], leaves)
    torch.testing.assert_close(condition, golden["hidden.cond"], rtol=0, atol=1e-9)
    sublayers = [adaptive(kind, leaves, layer, condition) for layer in range(N_LAYERS) for kind in ("attn", "ffn")]
    _, inputs = run_row(row, embedding, sublayers)
    last = linear(F.silu(condition), leaves, "final_layer.adaLN_modulation.1").chunk(2, dim=1)
    prediction = unpatchify(linear(modulate(inputs[-1], *last), leaves, "final_layer.linear"))
    torch.testing.assert_close(prediction, golden["output.pred"], rtol=0, atol=1e-9)

    loss = (golden["loss.weight"] * prediction).sum()
    torch.testing.assert_close(loss, golden["loss.value"][0], rtol=0, atol=1e-9)
    loss.backward()
    facts: dict[str, Any] = json.loads((FOLDER / "siamese_dit.json").read_text())
    checked = {"grad_input.image"}
    assert_gradient("image", image.grad, golden["grad_input.image"])
    for name, leaf in leaves.items():
        if name not in facts["no_gradient"] + facts["gradient_left_out_for_size"]:
            assert_gradient(name, leaf.grad, golden[f"grad.{name}"])
            checked.add(f"grad.{name}")
    ours = dict(row.named_parameters())
    for i, names in enumerate(official_norm_names()):
        for our_name, official in names.items():
            for part in ("weight", "bias"):
                assert_gradient(official, ours[f"{i}.{our_name}.{part}"].grad, golden[f"grad.{official}.{part}"])
                checked.add(f"grad.{official}.{part}")
    assert checked == {name for name in golden if name.startswith("grad")}
    assert facts["zero_gradient"] == []
