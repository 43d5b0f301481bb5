"""DeepNorm in both stacks of an encoder-decoder against numbers of torchscale; that model's sublayers are written here.

The junctions come from the public placement name and the two stacks: 3 encoder and 2 decoder blocks.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from normstream import placements
from normstream.norms import NormConfig
from normstream.placements import Stack

FOLDER = Path(__file__).parents[1] / "golden"
HEADS = 4
STACKS = {"encoder": 3, "decoder": 2}
KINDS = {
    "encoder": ("attention", "feed_forward"),
    "decoder": ("attention", "cross_attention", "feed_forward"),
}
OFFICIAL_NORMS = {
    "attention": "self_attn_layer_norm",
    "cross_attention": "encoder_attn_layer_norm",
    "feed_forward": "final_layer_norm",
}


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(FOLDER / "deepnorm_encoder_decoder.safetensors")


@pytest.fixture(scope="module")
def leaves(golden) -> dict[str, Tensor]:
    """The official weights that are no norms: those of the sublayers, embeddings and head."""
    names = {name.removeprefix("param.") for name in golden if name.startswith("param.")}
    return {n: golden[f"param.{n}"].clone().requires_grad_() for n in names if "norm" not in n}


def norm_names(stack: str) -> dict[str, str]:
    """Our parameter in the row of junctions to the official one."""
    places = [(layer, kind) for layer in range(STACKS[stack]) for kind in KINDS[stack]]
    return {
        f"{i + 1}.join.norm.{part}": f"{stack}.layers.{layer}.{OFFICIAL_NORMS[kind]}.{part}"
        for i, (layer, kind) in enumerate(places)
        for part in ("weight", "bias")
    }


@pytest.fixture(scope="module")
def rows(golden) -> dict[str, nn.ModuleList]:
    rows = {}
    for stack, n_layers in STACKS.items():
        role = Stack("encoder" if stack == "encoder" else "decoder", STACKS["encoder"], STACKS["decoder"])
        junctions = placements.get("deepnorm").junctions(
            dim=32,
            n_layers=n_layers,
            sublayers=KINDS[stack],
            norm=NormConfig(kind="layer", eps=1e-5, bias=True),
            stack=role,
        )
        rows[stack] = nn.ModuleList(junctions).double()
        ours, names = dict(rows[stack].named_parameters()), norm_names(stack)
        assert ours.keys() == names.keys()
        for name, official in names.items():
            ours[name].data.copy_(golden[f"param.{official}"])
    return rows


def attention(z: Tensor, w: dict[str, Tensor], name: str, memory: Tensor, causal: bool = False) -> Tensor:
    def heads(x: Tensor, letter: str) -> Tensor:
        x = F.linear(x, w[f"{name}.{letter}_proj.weight"], w[f"{name}.{letter}_proj.bias"])
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    out = F.scaled_dot_product_attention(heads(z, "q"), heads(memory, "k"), heads(memory, "v"), is_causal=causal)
    return F.linear(out.transpose(1, 2).flatten(-2), w[f"{name}.out_proj.weight"], w[f"{name}.out_proj.bias"])


def feed_forward(z: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    hidden = F.gelu(F.linear(z, w[f"{name}.fc1.weight"], w[f"{name}.fc1.bias"]))
    return F.linear(hidden, w[f"{name}.fc2.weight"], w[f"{name}.fc2.bias"])


def sublayers(w: dict[str, Tensor], stack: str, memory: Tensor | None = None) -> list[Callable[[Tensor], Tensor]]:
    row: list[Callable[[Tensor], Tensor]] = []
    for layer in range(STACKS[stack]):
        name = f"{stack}.layers.{layer}"
        row.append(lambda z, n=name: attention(z, w, f"{n}.self_attn", z, causal=stack == "decoder"))
        if memory is not None:
            row.append(lambda z, n=name: attention(z, w, f"{n}.encoder_attn", memory))
        row.append(lambda z, n=name: feed_forward(z, w, f"{n}.ffn"))
    return row


def forward(rows, golden, w, run_row) -> dict[str, Tensor]:
    """Every official tensor that the two rows of junctions make."""
    seen: dict[str, Tensor] = {}
    memory = None
    for stack, tokens in (("encoder", "src"), ("decoder", "tgt")):
        embedding = F.embedding(golden[f"input.{tokens}_ids"], w[f"{stack}.embed_tokens.weight"])
        states, inputs = run_row(rows[stack], embedding, sublayers(w, stack, memory))
        per_block = len(KINDS[stack])
        for layer in range(STACKS[stack]):
            (seen[f"hidden.{stack}.{layer}"],) = states[(layer + 1) * per_block]
        memory = inputs[-1]
    seen["output.final_hidden"] = inputs[-1]
    seen["output.logits"] = F.linear(inputs[-1], w["decoder.output_projection.weight"])
    return seen


def test_streams_and_logits(rows, golden, leaves, run_row):
    with torch.no_grad():
        seen = forward(rows, golden, leaves, run_row)
    assert len(seen) == 7
    for name, tensor in seen.items():
        torch.testing.assert_close(tensor, golden[name], rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_streams_from_recorded_updates(rows, golden, run_row):
    """The recorded updates are replayed: only our junctions are between them and the recorded streams."""
    for stack, tokens in (("encoder", "src"), ("decoder", "tgt")):
        embedding = F.embedding(golden[f"input.{tokens}_ids"], golden[f"param.{stack}.embed_tokens.weight"])
        short = {"attention": "attn", "cross_attention": "cross", "feed_forward": "ffn"}
        updates = [
            golden[f"hidden.{stack}.{layer}.{short[kind]}_update"]
            for layer in range(STACKS[stack])
            for kind in KINDS[stack]
        ]
        states, _ = run_row(rows[stack], embedding, [lambda z, o=o: o for o in updates])
        for layer in range(STACKS[stack]):
            (x,) = states[(layer + 1) * len(KINDS[stack])]
            torch.testing.assert_close(x, golden[f"hidden.{stack}.{layer}"], rtol=0, atol=1e-9)


def test_every_gradient(rows, golden, leaves, run_row):
    loss = (golden["loss.weight"] * forward(rows, golden, leaves, run_row)["output.logits"]).sum()
    torch.testing.assert_close(loss, golden["loss.value"][0], rtol=0, atol=1e-9)
    loss.backward()
    ours: dict[str, Tensor] = dict(leaves)
    for stack, row in rows.items():
        parameters = dict(row.named_parameters())
        ours |= {official: parameters[name] for name, official in norm_names(stack).items()}
    assert set(ours) == {name.removeprefix("grad.") for name in golden if name.startswith("grad.")}
    for name, leaf in ours.items():
        wanted = golden[f"grad.{name}"]
        assert leaf.grad is not None, name
        scale = 1.0 if name.endswith("k_proj.bias") else wanted.abs().max().item()  # adding to all keys does nothing
        assert (leaf.grad - wanted).abs().max() <= 1e-7 * scale, name
