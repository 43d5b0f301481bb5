"""Post-pre SiameseNorm against numbers of its released DeiT code, with that model's own sublayers written here.

The junctions come from the public placement name. Official code norms x lazily (at the start of the next sublayer),
ours eagerly (at the end of the join): the official ``{l}.x`` is the input of our x norm.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from normstream import placements
from normstream.norms import NormConfig

FOLDER = Path(__file__).parents[1] / "golden"
HEADS, N_LAYERS = 4, 3


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


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(FOLDER / "siamese_deit.safetensors")


@pytest.fixture(scope="module")
def leaves(golden) -> dict[str, Tensor]:
    """The official weights that are no norms of a stream; every norm of the file belongs to a junction."""
    names = {name.removeprefix("param.") for name in golden if name.startswith("param.")}
    return {n: golden[f"param.{n}"].clone().requires_grad_() for n in names if "norm" not in n}


@pytest.fixture(scope="module")
def row(golden) -> nn.ModuleList:
    norm = NormConfig(kind="layer", eps=1e-6, bias=True)
    row = nn.ModuleList(placements.get("siamese").junctions(dim=32, n_layers=N_LAYERS, norm=norm)).double()
    ours, used = dict(row.named_parameters()), set()
    for i, names in enumerate(official_norm_names()):
        for our_name, official in names.items():
            for part in ("weight", "bias"):
                ours.pop(f"{i}.{our_name}.{part}").data.copy_(golden[f"param.{official}.{part}"])
                used.add(f"param.{official}.{part}")
    assert ours == {}, "every norm of the row is written once"
    assert used == {name for name in golden if name.startswith("param.") and "norm" in name}, "each official norm once"
    return row


def attention(z: Tensor, w: dict[str, Tensor], layer: int) -> Tensor:
    name, (batch, length, dim) = f"blocks.{layer}.attn", z.shape
    qkv = F.linear(z, w[f"{name}.qkv.weight"], w[f"{name}.qkv.bias"])
    q, k, v = qkv.view(batch, length, 3, HEADS, dim // HEADS).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, dim)
    return F.linear(out, w[f"{name}.proj.weight"], w[f"{name}.proj.bias"])


def feed_forward(z: Tensor, w: dict[str, Tensor], layer: int) -> Tensor:
    name = f"blocks.{layer}.mlp"
    hidden = F.gelu(F.linear(z, w[f"{name}.fc1.weight"], w[f"{name}.fc1.bias"]))
    return F.linear(hidden, w[f"{name}.fc2.weight"], w[f"{name}.fc2.bias"])


def assert_gradient(name: str, got: Tensor | None, wanted: Tensor) -> None:
    assert got is not None, name
    error = (got - wanted).abs().max().item()
    assert error <= 1e-7 * wanted.abs().max().item(), f"{name}: {error}"


def test_streams_and_inputs_from_recorded_updates(row, golden, run_row):
    """The recorded undivided updates are replayed: only our junctions are between them and the recorded streams."""
    before_norm: list[Tensor] = []
    hooks = [
        junction.join.norm_x.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
        for junction in row
    ]
    updates = [golden[f"hidden.{layer}.{kind}_update"] for layer in range(N_LAYERS) for kind in ("attn", "ffn")]
    states, inputs = run_row(row, golden["hidden.embed"], [lambda z, o=o: o for o in updates])
    for hook in hooks:
        hook.remove()

    def close(got: Tensor, name: str) -> None:
        torch.testing.assert_close(got, golden[name], rtol=0, atol=1e-9, msg=lambda m: f"{name}: {m}")

    for layer in range(N_LAYERS):
        close(inputs[2 * layer], f"hidden.{layer}.attn_input")
        close(inputs[2 * layer + 1], f"hidden.{layer}.ffn_input")
        close(before_norm[2 * layer + 2], f"hidden.{layer}.x")
        close(states[2 * layer + 2][1], f"hidden.{layer}.y")
    close(inputs[-1], "output.final_hidden")


def test_logits_and_every_gradient(row, leaves, golden, run_row):
    image = golden["input.image"].clone().requires_grad_()
    patches = F.conv2d(image, leaves["patch_embed.proj.weight"], leaves["patch_embed.proj.bias"], stride=4)
    tokens = torch.cat([leaves["cls_token"].expand(len(image), -1, -1), patches.flatten(2).transpose(1, 2)], dim=1)
    sublayers = [
        lambda z, f=f, layer=layer: f(z, leaves, layer) for layer in range(N_LAYERS) for f in (attention, feed_forward)
    ]
    _, inputs = run_row(row, tokens + leaves["pos_embed"], sublayers)
    logits = F.linear(inputs[-1][:, 0], leaves["head.weight"], leaves["head.bias"])
    torch.testing.assert_close(inputs[-1], golden["output.final_hidden"], rtol=0, atol=1e-9)
    torch.testing.assert_close(logits, golden["output.logits"], rtol=0, atol=1e-9)

    loss = (golden["loss.weight"] * logits).sum()
    torch.testing.assert_close(loss, golden["loss.value"][0], rtol=0, atol=1e-9)
    loss.backward()
    checked = {"grad_input.image"}
    assert_gradient("image", image.grad, golden["grad_input.image"])
    for name, leaf in leaves.items():
        assert_gradient(name, leaf.grad, golden[f"grad.{name}"])
        checked.add(f"grad.{name}")
    ours = dict(row.named_parameters())
    for i, names in enumerate(official_norm_names()):
        for our_name, official in names.items():
            for part in ("weight", "bias"):
                assert_gradient(official, ours[f"{i}.{our_name}.{part}"].grad, golden[f"grad.{official}.{part}"])
                checked.add(f"grad.{official}.{part}")
    assert checked == {name for name in golden if name.startswith("grad")}
    assert json.loads((FOLDER / "siamese_deit.json").read_text())["zero_gradient"] == []
